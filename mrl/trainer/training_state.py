"""What the loop moves on beside the weights, as a commit's `state.json` holds it, and how it comes back.

Owns its keys and what each must be. Weights and the folders of commits are `checkpointing.py`'s.
"""

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
from mrl.rollout.buffer import InFlight
from mrl.rollout.prompt_assignment import LengthHistory
from mrl.trainer.inflight_samples import KeptSamples
from mrl.trainer.reference import Reference


@dataclass
class TrainingState:
    """Where the loop's parts stand.

    Attributes:
        source: The training prompts.
        history: Lengths of responses.
        reference: Of the KL.
        kl_control: Of the KL in the reward.
        entropy_control: Of the entropy bonus.
        in_flight: Prompts that were drawn and not trained on.
        policy_version: Optimizer steps taken in this run.
    """

    source: PromptSource
    history: LengthHistory
    reference: Reference
    kl_control: KlControl
    entropy_control: EntropyControl
    in_flight: InFlight
    policy_version: int = 0

    @property
    def position(self) -> int:
        """Of the first prompt in the stream that was not trained on."""
        return self.in_flight.first(self.source.position)

    @property
    def epoch(self) -> float:
        """Passes over the data that were trained on."""
        return self.position / self.source.num_rows

    def kept_samples(self) -> KeptSamples:
        """Samples in flight on this rank, for a commit."""
        if not self.in_flight.outlives_steps:
            return KeptSamples()
        return KeptSamples(*self.in_flight.tables(), *self.in_flight.samples())

    def snapshot(self) -> dict[str, Any]:
        """JSON-able: all of it."""
        entropy = self.entropy_control
        return {
            "policy_version": self.policy_version,
            "source": self.source.state_dict(),
            "history": self.history.state_dict(),
            "reference": self.reference.record,
            "kl_coef": self.kl_control.coef if self.kl_control.adapts else None,
            "entropy_ctrl": [entropy.coef, entropy.last] if entropy.adapts else None,
            "in_flight": self.in_flight.state_dict() if self.in_flight.outlives_steps else None,
        }

    def restore(self, state: Mapping[str, Any]) -> str | None:
        """Takes back source, history and adaptive coefficients of a `snapshot`.

        Returns:
            Its record of the reference, for `Reference.resume`.

        Raises:
            UserError: They are of other data. What no run leaves there raises the errors of `not_of_a_run`.
        """
        self.source.load_state_dict(state["source"])
        self.history.load_state_dict(state["history"])
        if self.kl_control.adapts and state["kl_coef"] is not None:
            self.kl_control.coef = state["kl_coef"]
        if self.entropy_control.adapts and state["entropy_ctrl"] is not None:
            self.entropy_control.coef, self.entropy_control.last = state["entropy_ctrl"]
        record: str | None = state["reference"]
        return record


@dataclass
class Standing:
    """What a run has reached, as a commit holds it beside the weights of now.

    Attributes:
        state: JSON-able. `step`: steps done. `unlogged`: metrics of that step where its evaluation and its line in the
            log are still to come. `warm_start`: before step 0, warm start steps done and where their prompts stand.
        metrics: Of the step; `checkpoint.best_metric` is looked up in it.
        samples: In flight on this rank.
        committed: Whether a commit of exactly this is there.
    """

    state: dict[str, Any]
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: KeptSamples = field(default_factory=KeptSamples)
    committed: bool = False


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
}
"""What a commit's state must have."""

ENTROPY_KINDS: list[list[type]] = [[], [float, float], [float, type(None)]]
"""Of the coefficient and the entropy that moved it, where there are any."""


def resumed(state: Mapping[str, Any], path: Path) -> Standing:
    """What a commit in folder `path` holds.

    Raises:
        UserError: Its state was not written by a run.
    """
    state = {"unlogged": None, "in_flight": None, "warm_start": None, "kl_coef": None, "entropy_ctrl": None, **state}
    wrong = [name for name, kinds in STATE_KINDS.items() if type(state.get(name)) not in kinds]
    warm = state["warm_start"]
    if not wrong and warm is not None and not (type(warm.get("step")) is int and isinstance(warm.get("source"), dict)):
        wrong = ["warm_start"]
    if not wrong and [type(value) for value in state["entropy_ctrl"] or ()] not in ENTROPY_KINDS:
        wrong = ["entropy_ctrl"]
    if wrong:
        raise _strange(path, f"lacks {', '.join(wrong)}, or has something else there")
    return Standing(dict(state), committed=True)


@contextmanager
def not_of_a_run(path: Path) -> Iterator[None]:
    """Inside, a part of the state of a commit in folder `path` that does not fit is a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _strange(path, f"has something else than a run leaves there ({type(error).__name__}: {error})") from error


def _strange(path: Path, what: str) -> UserError:
    return UserError(f"checkpoint '{path}' is of no run of mrl: its state.json {what}. Give another checkpoint.")
