"""Maps a run of verl's SFT trainers to the keys of verl's RL trainer, with `algorithm.name=sft`.

The keys are then translated once, in `translate.py`; this file has what only SFT has: columns, `max_length`, defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.verl_keys.translated_keys import ACTOR, FSDP, MEGATRON
from mrl.config.verl_keys.verl_sft import (
    DEFAULTS,
    DEFAULTS_OF_ENGINES,
    DEFAULTS_OF_FSDP,
    MISSING,
    MOOT,
    RENAMED,
    SECTIONS,
)

Pair = tuple[str, Any]

MAX_LENGTH = 1024
"""verl's default length of prompt and response together, tokens."""
PER_EPOCH = "after_each_epoch"
_NAMES = {to: key for key, to in RENAMED.items()}


class SftRun:
    """Settings of an SFT run by the keys of the RL trainer.

    Attributes:
        given: RL keys and values, with the defaults of SFT.
        names: RL key -> original key.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._own = {key: value for key, value in given.items() if _is_own(key)}
        megatron = "megatron" in f"{given.get('engine', '')}{given.get('engine.strategy', '')}"
        sections = SECTIONS | {"engine.": MEGATRON if megatron else FSDP}
        self.given: dict[str, Any] = {"model_engine": "megatron"} if megatron else {}
        self.names: dict[str, str] = {}
        for key, value in given.items():
            if key in self._own:
                continue
            section = next((one for one in sections if key.startswith(one)), "")
            to = RENAMED.get(key) or sections.get(section, "") + key.removeprefix(section)
            self.given[to] = value
            self.names[to] = key
        old = "model.partial_pretrain" in given or any(key.startswith("data.multiturn.") for key in given)
        for key, value in (DEFAULTS | (DEFAULTS_OF_FSDP if old else DEFAULTS_OF_ENGINES)).items():
            self.given.setdefault(key, value)
        self._prefixes = {to: section for section, to in reversed(sections.items())}
        self._is_old = old
        self.given.setdefault(f"{ACTOR}ppo_mini_batch_size", self.given["data.train_batch_size"])
        length = self._own.get("data.max_length")
        self._length = length if isinstance(length, int) and length > 1 else MAX_LENGTH
        self.has_turns = given.get("data.multiturn.enable") is True or (
            "data.prompt_key" not in given and (not old or "data.messages_key" in given)
        )
        part = self._length // 2 if self.has_turns else self._length
        self.given |= {"data.max_prompt_length": part, "data.max_response_length": max(part, self._length - part)}

    def data(self, verl: VerlRun) -> Iterator[Pair]:
        """Yields fields of `data`, and the lengths of sequences."""
        own = self._own
        files = verl["data.train_files"]
        yield "data.train_files", files if isinstance(files, list) else [files]
        most = verl["data.train_max_samples"]
        yield "data.train_max_samples", most if most is not None and most > 0 else None
        if verl.given.get("data.val_files"):
            verl.notes["data.val_files"] = "verl measures the loss on its rows; mrl would score sampled responses"
        if self.has_turns:
            yield "data.messages_key", own.get("data.messages_key") or own.get("data.multiturn.messages_key")
        else:
            question, answer = own.get("data.prompt_key", "question"), own.get("data.response_key", "answer")
            yield "data.prompt_key", _inner(str(question), own.get("data.prompt_dict_keys"))
            yield "data.answer_key", _inner(str(answer), own.get("data.response_dict_keys"))
            yield "data.apply_chat_template", "always"
            verl.notes["data.max_length"] = (
                f"{self._length} tokens for prompt and response together; in mrl each may have that many"
            )
            verl.lossless.add("data.max_length")
        yield "data.shuffle", True
        yield "run.seed", verl["data.seed"]
        truncation = own.get("data.truncation", "error")
        if truncation == "right":
            yield "data.overlong_responses", "truncate_right"
        elif truncation == "left":
            yield "data.overlong_prompts", "truncate_left"
        elif truncation != "error":
            verl.notes["data.truncation"] = "mrl has error, left, right; error is used"
        yield "rollout.prompt_length", verl["data.max_prompt_length"]
        yield "rollout.response_length", verl["data.max_response_length"]
        for name in ("trainer.save_freq", "trainer.test_freq"):
            if verl.given.get(name) == PER_EPOCH:
                verl.notes[name] = "give a number of steps; -1 is used"
                verl.given[name] = -1
        self._sort(verl)

    def algorithm(self, verl: VerlRun) -> Iterator[Pair]:
        """Yields fields of `algorithm`."""
        yield "algorithm.name", "sft"

    def named(self, line: str) -> str:
        """Returns a message with the RL trainer's keys replaced by those of SFT."""
        return re.sub(r"[a-z_]+(?:\.\w+)+", lambda found: self._name(found[0]), line)

    def _name(self, key: str) -> str:
        """Returns the SFT trainer's key for a key of the RL trainer: the given one, else verl's own."""
        section = next((prefix for prefix in self._prefixes if key.startswith(prefix)), "")
        current = self._prefixes.get(section, "") + key.removeprefix(section)
        own = _NAMES.get(key, current) if self._is_old or not section else current
        return self.names.get(key, own)

    def _sort(self, verl: VerlRun) -> None:
        for key, value in self._own.items():
            if pattern := next((one for one in MOOT if fnmatchcase(key, one)), None):
                verl.decided[key] = MOOT[pattern]
            elif (pattern := next((one for one in MISSING if fnmatchcase(key, one)), None)) and value is not None:
                verl.notes[key] = f"{value} came; {MISSING[pattern]}"


def _is_own(key: str) -> bool:
    """Returns whether the RL trainer does not have a key, or uses it differently."""
    columns = "data.max_length data.truncation data.messages_key data.multiturn.messages_key data.prompt_key"
    columns += " data.response_key data.prompt_dict_keys data.response_dict_keys"
    return key in columns.split() or any(fnmatchcase(key, one) for one in (*MOOT, *MISSING) if key not in RENAMED)


def _inner(column: str, keys: Any) -> str:
    """Returns a column, or the first key inside it."""
    found = keys if isinstance(keys, list) else [keys] if keys else []
    return f"{column}.{found[0]}" if found else column


def is_sft(given: Mapping[str, Any]) -> bool:
    """Returns whether settings, without the program's name, are those of an SFT trainer."""
    return "model.partial_pretrain" in given or (
        any(key.startswith(("data.multiturn.", "data.max_length")) or key == "data.messages_key" for key in given)
        and not any(key.startswith("actor_rollout_ref.") for key in given)
    )
