"""Absurd values for each field by its type: every one is refused, or bounded before anything large starts."""

# ruff: noqa: E501 -- tables of odd things
from __future__ import annotations

import random
from typing import get_args, get_origin, get_type_hints

from mrl.config.config import Config, RewardFunctionConfig
from mrl.config.keys import dotted_keys
from tests.fuzz.cases import Case

WHOLE = (-(2**63), -1, 0, 1, 3, 100_000, 2**20, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**30)
REAL = (-1e30, -1.0, -1e-30, 0.0, 1e-300, 1e-30, 1e-9, 0.999999, 1.0, 1e9, 1e30, 1e300, float("nan"), float("inf"))
TEXT = ("", " ", "x" * 5000, "~", "/", "..", ":", "a:b", "nowhere", "char:", "é", "$HOME", "null")
LISTS = (
    "[]",
    "['']",
    "[' ']",
    "[a, a]",
    "[/]",
    "[~]",
    f"[{'a, ' * 5000}a]",
    "[nowhere.jsonl]",
    "[train.jsonl, train.jsonl]",
)
MAPPINGS = ("{}", "{a: 1}", "{hidden_size: 1000000000}", "{num_hidden_layers: 1000000000}", "{vocab_size: 100000000000}",
            "{num_attention_heads: 0}", "{hidden_size: -4}", "{num_hidden_layers: 0}", "{rms_norm_eps: 1e30}",
            "{rope_theta: 0}", "{rope_theta: nan}", "{max_position_embeddings: 0}", "{num_val: 1000000}", "{num_train: 1}",
            "{max_value: 1000000000}", "{held_out_frac: 1e-15}", "{held_out_frac: 0.9999999999999999}", "{held_out_frac: x}",
            "{wrong_frac: []}", "{min_terms: 16, max_terms: 16}", "{seed: [1]}", "{pattern: '('}", "{pattern: '(a+)+$'}",
            "{length: -1}", "{colour: red}")  # fmt: skip

LONG = {"train.num_steps", "train.num_epochs", "train.warm_start.num_steps", "actor.ppo_epochs"}
"""A large one is a long run, which is what it says: only looked at."""


def all_cases() -> list[tuple[str, str]]:
    """Key and value as an override, of every field."""
    found = []
    kinds = dotted_keys(Config) | {
        f"reward.functions[0].{name}": kind for name, kind in get_type_hints(RewardFunctionConfig).items()
    }
    for key, kind in kinds.items():
        for value in _values(kind):
            found.append((key, value))
    return found


def _values(kind: object) -> list[str]:
    if get_args(kind) and type(None) in get_args(kind):
        return ["null", *_values(get_args(kind)[0])]
    if get_origin(kind) is list:
        return list(LISTS)
    if get_origin(kind) is dict:
        return list(MAPPINGS)
    if kind is int:
        return [str(number) for number in WHOLE]
    if kind is float:
        return [repr(number) for number in REAL]
    if kind is bool:
        return ["true", "false", "null", "2"]
    return list(TEXT) if kind is str else [*map(str, get_args(kind)), "other"]


_ALL = all_cases()
random.Random(0).shuffle(_ALL)


def case(number: int) -> Case:
    """Each value by a dry run first; the second round trains, the third asks the others."""
    round_, index = divmod(number, len(_ALL))
    key, value = _ALL[index]
    command = ("dry run", "train", ("plan", "rehearse", "evaluate", "launch", "doctor")[index % 5])[round_ % 3]
    if command in ("train", "evaluate") and key in LONG:
        command = "dry run"
    more = ()
    if key.startswith("data.task_kwargs") or (key == "data.task"):
        more = ("data.train_files=[]", "data.task=addition") if key != "data.task" else ("data.train_files=[]",)
    if key.startswith("train.warm_start") and not key.endswith("num_steps"):
        more = ("train.warm_start.num_steps=1",)
    return Case(f"value {number}", command=command, overrides=(*more, f"{key}={value}"))
