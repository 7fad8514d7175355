"""Training state besides model weights and optimizers, stored as `state.json` in checkpoints; its keys and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.algorithms._entropy_control import EntropyControl
from mrl.algorithms._kl_control import KlControl
from mrl.data.prompts import PromptSource
from mrl.errors import UserError
from mrl.rollout.buffer import RolloutBuffer
from mrl.rollout.prompt_assignment import LengthHistory
from mrl.trainer.early_stopping import EarlyStopping
from mrl.trainer.inflight_samples import BufferSnapshot
from mrl.trainer.reference import Reference


@dataclass
class TrainingState:
    """Training state besides model weights and optimizers.

    Attributes:
        source: Training prompts and the position in them.
        history: Response lengths seen so far.
        reference: KL reference.
        kl_control: Adaptive coefficient of the KL in the reward.
        entropy_control: Adaptive coefficient of the entropy bonus.
        buffer: Rollout buffer.
        early_stopping: Best evaluation so far.
        policy_version: Optimizer steps taken in this run.
    """

    source: PromptSource
    history: LengthHistory
    reference: Reference
    kl_control: KlControl
    entropy_control: EntropyControl
    buffer: RolloutBuffer
    early_stopping: EarlyStopping
    policy_version: int = 0

    @property
    def position(self) -> int:
        """Uid of the first prompt that was not trained on."""
        return self.buffer.first_untrained(self.source.position)

    @property
    def epoch(self) -> float:
        """Number of passes over the data that were trained on; a fraction."""
        return self.position / self.source.num_rows

    def snapshot_buffer(self) -> BufferSnapshot:
        """Returns this rank's samples in the rollout buffer, for a checkpoint."""
        if not self.buffer.needs_checkpoint:
            return BufferSnapshot()
        return BufferSnapshot(*self.buffer.tables(), *self.buffer.samples())

    def snapshot(self) -> dict[str, Any]:
        """Returns the state, JSON-serializable."""
        entropy = self.entropy_control
        return {
            "policy_version": self.policy_version,
            "source": self.source.state_dict(),
            "history": self.history.state_dict(),
            "reference": self.reference.stored_path,
            "kl_coef": self.kl_control.coef if self.kl_control.is_adaptive else None,
            "entropy_ctrl": [entropy.coef, entropy.last] if entropy.is_adaptive else None,
            "in_flight": self.buffer.state_dict() if self.buffer.needs_checkpoint else None,
            "early_stopping": self.early_stopping.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Loads data position, length history, adaptive coefficients and early stopping of a `snapshot`.

        Returns:
            Reference path of the snapshot, for `Reference.resume`.

        Raises:
            UserError: The snapshot belongs to other training data. Malformed state raises errors that
                `malformed_state_is_user_error` converts.
        """
        self.source.load_state_dict(state["source"])
        self.history.load_state_dict(state["history"])
        if self.kl_control.is_adaptive and state["kl_coef"] is not None:
            self.kl_control.coef = state["kl_coef"]
        if self.entropy_control.is_adaptive and state["entropy_ctrl"] is not None:
            self.entropy_control.coef, self.entropy_control.last = state["entropy_ctrl"]
        self.early_stopping.load_state_dict(state["early_stopping"])
        record: str | None = state["reference"]
        return record


@dataclass
class SavedState:
    """Training state after a step, as a checkpoint stores it in addition to the weights.

    Attributes:
        state: JSON-serializable state. `step`: steps done. `unlogged`: metrics of that step if it is not yet evaluated
            and logged. `warm_start`: steps of the warm start and the position in its prompts, before step 0.
        metrics: Metrics of the step, among them `checkpoint.best_metric`.
        samples: Samples in the rollout buffer on this rank.
        is_saved: True if a checkpoint of this state exists.
    """

    state: dict[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: BufferSnapshot = field(default_factory=BufferSnapshot)
    is_saved: bool = False


STATE_KINDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "policy_version": (int,),
    "source": (dict,),
    "history": (dict,),
    "reference": (str, type(None)),
    "kl_coef": (float, type(None)),
    "entropy_ctrl": (list, type(None)),
    "unlogged": (dict, type(None)),
    "in_flight": (dict, type(None)),
    "warm_start": (dict, type(None)),
    "early_stopping": (dict, type(None)),
}
"""Required keys of `state.json` and their types."""

OPTIONAL = ("unlogged", "in_flight", "warm_start", "kl_coef", "entropy_ctrl", "early_stopping")
"""Keys that checkpoints of earlier versions may lack; then None."""

ENTROPY_KINDS: list[list[type]] = [[], [float, float], [float, type(None)]]
"""Allowed types of `entropy_ctrl`: nothing, or the coefficient and the entropy of the last step (or None)."""


def parse_state(state: Mapping[str, Any], path: Path) -> SavedState:
    """Validates the state of the checkpoint in folder `path`.

    Raises:
        UserError: A key is missing or has another type.
    """
    state = dict.fromkeys(OPTIONAL) | dict(state)
    wrong = [name for name, kinds in STATE_KINDS.items() if type(state.get(name)) not in kinds]
    warm = state["warm_start"]
    if not wrong and warm is not None and not (type(warm.get("step")) is int and isinstance(warm.get("source"), dict)):
        wrong = ["warm_start"]
    if not wrong and [type(value) for value in state["entropy_ctrl"] or ()] not in ENTROPY_KINDS:
        wrong = ["entropy_ctrl"]
    if wrong:
        raise _invalid(path, f"missing or wrong type: {', '.join(wrong)}")
    return SavedState(dict(state), is_saved=True)


@contextmanager
def malformed_state_is_user_error(path: Path) -> Iterator[None]:
    """Converts errors of malformed state in the checkpoint folder `path` into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _invalid(path, f"{type(error).__name__}: {error}") from error


def _invalid(path: Path, why: str) -> UserError:
    return UserError(f"'{path}/state.json' is not a valid mrl training state ({why}). Choose another checkpoint.")
