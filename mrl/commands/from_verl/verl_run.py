"""Settings of a verl run with verl's own defaults, and the notes made while they are read.

Values are checked for their type here; `translate.py` and `rollout.py` translate them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.commands.from_verl.script import NOT_SET
from mrl.config.verl_keys.translated_keys import ACTOR, MAPS, MEGATRON, ROLLOUT
from mrl.errors import UserError

NUMBERS = {
    f"{ACTOR}ppo_micro_batch_size_per_gpu", f"{ACTOR}loss_scale_factor", "trainer.total_training_steps", "data.seed",
    "trainer.max_actor_ckpt_to_keep", f"{ROLLOUT}prompt_length", f"{ROLLOUT}response_length",
    f"{ROLLOUT}n_gpus_per_node",
}  # fmt: skip
"""Keys with numeric values whose default is null or a reference to another key."""


class TrackedSettings(dict[str, Any]):
    """Dotted keys and values that record which of them were read.

    Attributes:
        read: Keys that were looked up.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or the default."""
        self.read.add(key)
        return super().get(key, default)


class VerlRun:
    """verl's settings with its defaults; a value without a counterpart is noted when it is read.

    Attributes:
        given: Settings of the run.
        notes: Key -> why mrl does not support its value, or what is used instead.
        lossless: Keys of `notes` whose value verl ignores too, or of which only a default differs.
        decided: Key -> why its value needs no counterpart.
        megatron: Whether verl's actor is Megatron's.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = TrackedSettings(given)
        self.notes: dict[str, str] = {}
        self.lossless: set[str] = set()
        self.decided: dict[str, str] = {}
        engine = f"{given.get('model_engine', '')}{given.get(f'{ACTOR}strategy', '')}"
        self.megatron = "megatron" in engine or (not engine and any(key.startswith(MEGATRON) for key in given))

    def __getitem__(self, key: str) -> Any:
        """Returns the value, checked against the default's type; null and unresolved references become the default."""
        default = MAPS[key][1]
        value = self.given.get(key, default)
        if value is None or (isinstance(value, str) and value.startswith("${")):
            return default
        is_number = isinstance(default, (int, float)) or key in NUMBERS
        if is_number and isinstance(value, str) and is_unset(value):
            self.notes[key] = f"no value: the script reads a variable that is not set; {format_value(default)} is used"
            return default
        if is_number and isinstance(value, (bool, int)):
            # in Python a bool is an int: verl accepts 0 and 1 for bools, and bools for integers
            value = bool(value) if isinstance(default, bool) and value in (0, 1) else int(value)
        fits = isinstance(value, _types(key, default)) and isinstance(value, bool) is isinstance(default, bool)
        if not fits and (default not in (None, "???") or key in NUMBERS):
            raise UserError(f"{key}={format_value(value)} came, expected a value like verl's {format_value(default)}.")
        return value

    def one_of(self, key: str, known: dict[str, str] | tuple[str, ...], otherwise: str) -> str:
        """Returns the translated value; an unknown value is noted and `otherwise` returned."""
        words = known if isinstance(known, dict) else dict(zip(known, known, strict=True))
        value = str(self[key])
        if value not in words:
            self.notes[key] = f"mrl has {', '.join(words)}; {otherwise} is used"
        return words.get(value, otherwise)

    def under(self, prefix: str) -> dict[str, Any]:
        """Returns the given settings below a key prefix."""
        found = {key: value for key, value in self.given.items() if key.startswith(prefix)}
        self.given.read |= set(found)
        return {key.removeprefix(prefix): value for key, value in found.items()}

    def unread(self) -> dict[str, Any]:
        """Returns the given keys with a counterpart that nothing read and whose values are not verl's defaults."""
        return {
            key: value for key, value in self.given.items()
            if key in MAPS and key not in self.given.read and value is not None and value != MAPS[key][1]
            and not (isinstance(value, str) and value.startswith("${"))
        }  # fmt: skip


def is_unset(text: str) -> bool:
    """Returns whether a value is blank or the placeholder of an unset shell variable."""
    return not text.strip() or text.endswith(NOT_SET)


def _types(key: str, default: Any) -> tuple[type, ...]:
    """Returns the types that a value may have."""
    if key in NUMBERS or isinstance(default, (int, float)):
        return (int, float)
    return (str, list) if key in ("data.train_files", "data.val_files", "trainer.logger") else (type(default),)


def format_value(value: Any) -> str:
    """Returns a value as text for a message, cut to 60 characters."""
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
