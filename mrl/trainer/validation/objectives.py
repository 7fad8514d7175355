"""Generator of the tables in `mrl/docs/objectives.md`: `python -m mrl.trainer.validation.objectives` prints them.

Equations, sources and differences come from the docstrings of losses and algorithms, the names in other trainers from
`config/verl_keys/loss_names.py`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mrl.algorithms._policy_loss import LOSSES
from mrl.algorithms.base import Algorithm, resolve
from mrl.config.config import AlgorithmConfig
from mrl.config.registry import find, names
from mrl.config.verl_keys.loss_names import TRL_LOSSES, VERL_ESTIMATORS, VERL_LOSSES
from mrl.config.verl_keys.verl_presets import PRESETS

LOSS_HEAD = ("`algorithm.policy_loss`", "what it is", "verl", "TRL", "brings, reads", "source, and what differs")
PRESET_HEAD = ("`preset`", "`bypass_mode`", "`loss_type`", "`rollout_is`", "`rollout_rs`")
NAME_HEAD = ("`algorithm.name`", "advantage; loss", "verl", "loss", "otherwise than `grpo`", "source, and what differs")


def tables() -> str:
    """Returns all tables as Markdown: presets of the rollout correction, policy losses, algorithms."""
    presets = _table(PRESET_HEAD, map(_preset, PRESETS))
    losses = _table(LOSS_HEAD, map(_loss, LOSSES))
    algorithms = _table(NAME_HEAD, map(_algorithm, names("algorithms")))
    return f"## Presets\n\n{presets}\n\n## Policy losses\n\n{losses}\n\n## Algorithms\n\n{algorithms}\n"


def _preset(name: str) -> Sequence[str]:
    """Returns the table row of a preset; thresholds follow the kinds of weights and rejection tests."""
    fields = PRESETS[name]
    pairs = (("rollout_is", "rollout_is_threshold"), ("rollout_rs", "rollout_rs_threshold"))
    cells = [f"`{fields[key]}` {fields[bound]}" if key in fields else "" for key, bound in pairs]
    return (f"`{name}`", str(fields["bypass_mode"]).lower(), str(fields.get("loss_type", "")), *cells)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(map(_row, [head, ["---"] * len(head), *rows]))


def _loss(name: str) -> Sequence[str]:
    loss = LOSSES[name]
    text = inspect.getdoc(loss.function) or ""
    verl = ", ".join(f"`{theirs}`" for theirs, own in VERL_LOSSES.items() if own == name)
    trl = f"`{TRL_LOSSES[name]}`" if name in TRL_LOSSES else ""
    said = [*_values(loss.defaults), *(f"`algorithm.{key}`" for key in loss.reads if key not in loss.defaults)]
    return (f"`{name}`", _definition(text), verl, trl, ", ".join(said), _source(text))


def _algorithm(name: str) -> Sequence[str]:
    kind: type[Algorithm] = find("algorithms", name, "ALGORITHM")
    verl = ", ".join(f"`{theirs}`" for theirs, own in VERL_ESTIMATORS.items() if own == name)
    own, grpo = (asdict(resolve(AlgorithmConfig(name=each))) for each in (name, "grpo"))
    differs = {
        key: value
        for key, value in own.items()
        if value is not None and key not in ("name", "policy_loss") and value != grpo[key]
    }
    text = inspect.getdoc(inspect.getmodule(kind)) or ""
    loss = f"`{own['policy_loss']}`" if own["policy_loss"] else ""
    return (f"`{name}`", inspect.getdoc(kind) or "", verl, loss, ", ".join(_values(differs)), text)


def _definition(text: str) -> str:
    """Returns the part of a docstring before its arguments and source, without its verb."""
    return re.split(r"\n\n(?:Args|Source):", text)[0].removeprefix("Returns ")


def _source(text: str) -> str:
    """Returns the part of a docstring after "Source: "."""
    return text.partition("Source: ")[2]


def _values(values: Mapping[str, Any]) -> list[str]:
    return [f"`{key}={str(value).lower()}`" for key, value in values.items()]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(tables())
