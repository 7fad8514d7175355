"""What the first run of a process imports and makes once: imported by the server that ranks are forked from."""

import importlib

from mrl.checkpoint.run_dir.run_dir import installed_versions
from mrl.config.config import load, to_yaml
from mrl.config.megatron_fields.installed import CLASSES, fields_of
from mrl.config.registry import names

for _module in ("mrl.commands.cli", "mrl.commands.rehearse.rehearse", "torch.utils.serialization"):
    importlib.import_module(_module)
for _folder in ("algorithms", "models", "rewards", "observability.loggers"):
    for _name in names(_folder):
        importlib.import_module(f"mrl.{_folder}.{_name}")
for _section in CLASSES:
    fields_of(_section)
installed_versions()
to_yaml(load({}))
