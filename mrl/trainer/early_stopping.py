"""Early stopping: ends a run when a metric of its evaluations no longer improves (`train.early_stopping`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mrl.config.config import EarlyStoppingConfig


class EarlyStopping:
    """Best value of the metric so far, and the number of evaluations since.

    The same on all ranks: every rank records the same values.

    Args:
        config: Config section `train.early_stopping`.
        first_step: Evaluations after at most this many steps may raise the best value, but do not count as evaluations
            without improvement: the actor has not been trained yet.
    """

    def __init__(self, config: EarlyStoppingConfig, first_step: int = 0) -> None:
        self._config, self._first_step = config, first_step
        self._best: float | None = None
        self._best_step = 0
        self._num_stale = 0

    @property
    def metric(self) -> str | None:
        """Name of the metric; None if early stopping is off."""
        return self._config.metric if self._config.patience else None

    def record(self, step: int, value: float) -> None:
        """Records the metric of the evaluation after `step` steps; a value that is not finite is no improvement."""
        sign = 1 if self._config.mode == "max" else -1
        if math.isfinite(value) and (self._best is None or sign * value > sign * self._best + self._config.min_delta):
            self._best, self._best_step, self._num_stale = value, step, 0
        elif step > self._first_step:
            self._num_stale += 1

    @property
    def why(self) -> str:
        """Reason to end the run, a sentence; "" to continue."""
        config = self._config
        if not config.patience or self._num_stale < config.patience:
            return ""
        best = "it was never finite" if self._best is None else f"best {self._best:.6g}, after step {self._best_step}"
        return (
            f"Early stopping: {config.metric} has not improved by more than train.early_stopping.min_delta="
            f"{config.min_delta:g} in {self._num_stale} evaluations ({best}). Raise train.early_stopping.patience to "
            "continue."
        )

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state, JSON-serializable; None if early stopping is off."""
        if self.metric is None:
            return None
        compared = {"metric": self._config.metric, "mode": self._config.mode}
        return {**compared, "best": self._best, "best_step": self._best_step, "num_stale": self._num_stale}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Loads a `state_dict`; starts anew where it is None or of another metric or mode."""
        if self.metric is None or state is None:
            return
        best = None if state["best"] is None else float(state["best"])
        best_step, num_stale = int(state["best_step"]), int(state["num_stale"])
        if (state["metric"], state["mode"]) == (self._config.metric, self._config.mode):
            self._best, self._best_step, self._num_stale = best, best_step, num_stale
