"""What the first run of a process imports and makes once: imported by the server that ranks are forked from."""

import importlib

from mrl.config import load, to_yaml
from mrl.megatron_fields.installed import CLASSES, fields_of
from mrl.run_folder.run_dir import installed_versions
from mrl.schema.registry import names

for _module in ("mrl.cli", "mrl.rehearsal.rehearse", "torch.utils.serialization"):
    importlib.import_module(_module)
for _folder in ("algorithms", "models", "rewards", "observe.loggers"):
    for _name in names(_folder):
        importlib.import_module(f"mrl.{_folder}.{_name}")
for _section in CLASSES:
    fields_of(_section)
installed_versions()
to_yaml(load({}))
