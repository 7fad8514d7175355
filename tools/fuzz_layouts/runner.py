"""Runs a case on this machine: once in one process, once in its layouts.

Writes the files and configs of a case, and classifies how each `mrl train` ended. Ranks are forked from a server that
has imported everything (`distributed/local_ranks.py`), which makes starts cheap.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from safetensors.torch import save_file

from fuzz_layouts.cases import Case, Settings, Start
from fuzz_layouts.data import CHAT_TEMPLATE, TEMPLATE_FILE, write_rows
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config.config import Config, load
from mrl.data.tokenizer import CharTokenizer
from mrl.distributed.local_ranks import TOKENIZERS, TRAINING, RankError, run_ranks
from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.random_init import random_init
from mrl.trainer.hf_export import write_model_folder

PRELOAD = (*TRAINING, TOKENIZERS, "pyarrow.parquet")
ALONE, SPREAD = "alone", "spread"


@dataclass(frozen=True)
class Ended:
    """Ending of a run.

    Attributes:
        how: "done"; "refused": a user error; "failed": anything else, including a rank that does not end.
        start: Index of the start that ended this way; for "done" the last one.
        message: Message of the first rank that reported one.
        rows: Lines of metrics.jsonl.
    """

    how: str
    start: int
    message: str
    rows: list[dict[str, Any]]


def write_files(case: Case, folder: Path) -> None:
    """Writes data, template, model folders, and the config of each start into the case's folder."""
    folder.mkdir(parents=True)
    for name, rows in case.rows.items():
        write_rows(folder / name, rows)
    (folder / TEMPLATE_FILE).write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name, model in case.folders.items():
        _write_model(folder / name, model, case.seed)
    for side in (ALONE, SPREAD):
        for index, start in enumerate(starts_of(case, side)):
            values = {**case.settings, **case.changes[index], **start.settings, "run.output_dir": f"./{side}"}
            _config_file(folder, side, index).write_text(_yaml(values, folder), encoding="utf-8")


def starts_of(case: Case, side: str) -> list[Start]:
    """Returns the starts of a side; the one-process side has no settings of its own."""
    return case.starts if side == SPREAD else [Start(1, {}) for _ in case.starts]


def run_side(case: Case, folder: Path, side: str, *, time_limit_s: float) -> Ended:
    """Runs all starts of a case, each on new ranks.

    Args:
        case: Case whose files are written.
        folder: Folder of the case.
        side: ALONE or SPREAD.
        time_limit_s: Time limit of a start, seconds; a slower start has failed.
    """
    metrics = RunDir(folder / side).metrics
    ended = Ended("done", 0, "", [])
    for index, start in enumerate(starts_of(case, side)):
        how, message = _run(_config_file(folder, side, index), start.ranks, folder, time_limit_s)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        ended = Ended(how, index, message, rows)
        if how != "done":
            break
    return ended


def train_on_rank(config: Config) -> None:
    """Runs `mrl train` on a rank."""
    from mrl.train import train

    train(config)


def _run(file: Path, ranks: int, folder: Path, time_limit_s: float) -> tuple[str, str]:
    try:
        config = load(file)
        logs = folder / f"logs-{file.stem}"
        run_ranks(train_on_rank, [config], size=ranks, logs=logs, time_limit_s=time_limit_s, preload=PRELOAD)
    except UserError as error:
        return "refused", str(error)
    except RankError as error:
        return "refused" if error.is_user_error else "failed", str(error)
    return "done", ""


def _config_file(folder: Path, side: str, index: int) -> Path:
    return folder / f"{side}-{index}.yaml"


def _write_model(folder: Path, model: Settings, seed: int) -> None:
    """Writes a Hugging Face folder of a preset, with random weights and the character tokenizer."""
    tokenizer = CharTokenizer(model["model.tokenizer"].removeprefix("char:"))
    arch = arch_from_preset(model["model.preset"], model["model.overrides"], tokenizer.vocab_size)
    layout = hf_layout(arch, "float32")
    tensors = allocate(layout)
    random_init(arch, layout, tensors, seed)
    write_model_folder(folder, arch, "float32", tokenizer)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _yaml(values: Settings, folder: Path) -> str:
    """Returns the settings as YAML, with "./" in front of paths replaced by the folder."""

    def placed(value: Any) -> Any:
        if isinstance(value, list):
            return [placed(each) for each in value]
        return f"{folder}{value[1:]}" if isinstance(value, str) and value.startswith("./") else value

    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = placed(value)
    return OmegaConf.to_yaml(OmegaConf.create(nested))
