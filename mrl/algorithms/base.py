"""The interface of an algorithm: advantages, weights of tokens, and the loss of a microbatch.

Owns `Algorithm`. The loop and the Megatron actor know nothing else of an algorithm; adding one is adding a file that
defines `ALGORITHM`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from mrl.config import AlgorithmConfig, RolloutConfig
from mrl.types import RolloutBatch

SumReduce = Callable[[Tensor], Tensor]
"""Collective over the data-parallel group: elementwise sum of the ranks' tensors (fp64), the same on every rank."""


@dataclass(frozen=True)
class Outcomes:
    """One row for each sample of the step, over all ranks, ordered by (group, sample index).

    Attributes:
        rewards_N: Total reward, fp64.
        group_id_N: Group of each sample.
        response_lens_N: Response tokens.
        truncated_N: True where the response was cut at its length limit.
    """

    rewards_N: Tensor
    group_id_N: Tensor
    response_lens_N: Tensor
    truncated_N: Tensor


class Algorithm(ABC):
    """Built from the resolved `AlgorithmConfig`; holds no state between steps."""

    defaults: ClassVar[dict[str, Any]]
    """Values of the `AlgorithmConfig` fields that are null in the config."""

    def __init__(self, config: AlgorithmConfig, rollout: RolloutConfig) -> None:
        self.config = config
        self.rollout = rollout

    @property
    def needs_reference(self) -> bool:
        """Whether `ref_logprobs_R` must be set before `advantages`."""
        return self.config.kl_in != "none"

    @property
    def needs_proximal(self) -> bool:
        """Whether `proximal_logprobs_R` must be set before the update."""
        return self.config.proximal == "recompute"

    @abstractmethod
    def shape_rewards(self, outcomes: Outcomes) -> Tensor:
        """Rewards after shaping that needs no log-probabilities (overlong penalty), fp64 [N]."""

    @abstractmethod
    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """One advantage per sample from the whole step's rewards, fp64 [N]. Every rank computes the same."""

    @abstractmethod
    def advantages(self, batch: RolloutBatch, outcome_advantages_B: Tensor, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets `batch.advantages_R` (and narrows `batch.response_mask_R`)."""

    @abstractmethod
    def weigh(self, minibatch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets `minibatch.weights_R` from counts over the global minibatch."""

    @abstractmethod
    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss sum of a microbatch, and metrics.

        Args:
            logprobs_R: Current policy, fp32, requires grad.
            entropy_R: Entropy of the distribution at each response token, fp32, requires grad.
            microbatch: `advantages_R` and `weights_R` set.

        Returns:
            Scalar whose sum over all microbatches and data-parallel ranks is the loss; and detached scalars that are
            summed the same way (names that end in "max" or "min" are reduced by that instead).
        """
