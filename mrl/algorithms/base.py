"""The interface of an algorithm: advantages, token weights, and the loss of a microbatch.

To add an algorithm, add a file to this folder that defines `ALGORITHM`, a subclass of `Algorithm`. The training loop
and the Megatron actor use nothing else of it.

Call order in one step: `informative_groups` (with dynamic sampling), `shape_rewards`, `outcome_advantages`,
`advantages`; then for each minibatch `weigh`, and `loss` for each of its microbatches.

`resolve` fills the fields that a config leaves null and rejects fields that the algorithm ignores. `build` checks the
config against the rollout section and creates the algorithm.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from mrl.algorithms import _correction_config as correction
from mrl.algorithms._entropy_control import EntropyControl
from mrl.algorithms._kl_control import KlControl
from mrl.algorithms._policy_loss import LOSSES, READ, PolicyLoss
from mrl.algorithms.functional import advantages as advantage_maths
from mrl.algorithms.functional.aggregation import token_weights
from mrl.config.config import AlgorithmConfig, DpoConfig, LearnsFrom, RolloutConfig
from mrl.config.registry import check_subclass, find
from mrl.errors import UserError
from mrl.types import RolloutBatch

T = TypeVar("T")

LARGEST = 1e9
"""Upper limit of every number in `algorithm`; its square still fits in fp32."""

FALLBACKS = {
    "advantage_std": "unbiased",
    "advantage_eps": 1e-6,
    "singleton_group": "error",
    "loss_aggregation": "seq_mean_token_mean",
    "policy_loss": "vanilla",
    "dynamic_sampling": False,
}
"""Defaults of fields that an algorithm's `defaults` lack: GRPO's."""

PROXIMAL, REFERENCE = "proximal_logprobs_R", "ref_logprobs_R"
"""Batch fields that the forward pass of the update can compute itself, if it is the first update of the step."""

SumReduce = Callable[[Tensor], Tensor]
"""Collective over the data-parallel group: elementwise sum of the ranks' tensors (fp64), the same on every rank."""


@dataclass(frozen=True)
class Outcomes:
    """Rewards of all samples of the step, over all ranks: one row per sample, ordered by (group, sample index).

    With `algorithm.credit=turn` there is one row per turn instead.

    Attributes:
        rewards_N: Total reward, fp64.
        group_id_N: Group (prompt) of each sample.
        response_lens_N: Length of each response, tokens.
        truncated_N: True where the response was cut at its length limit.
        parts: Values by reward function, fp64 [N], NaN where the function returned none.
        part_weights: Weight of each reward function in the total.
        own_N: Reward of each turn without the rewards of later turns, fp64; `rewards_N` then has the sum with the later
            turns. None: rows are samples.
        sampled_lens_N: Tokens of each response that the policy sampled, without an environment's; None: all.
    """

    rewards_N: Tensor
    group_id_N: Tensor
    response_lens_N: Tensor
    truncated_N: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    part_weights: Mapping[str, float] = field(default_factory=dict)
    own_N: Tensor | None = None
    sampled_lens_N: Tensor | None = None


class Algorithm(ABC):
    """Base class of algorithms, built from a resolved `AlgorithmConfig`.

    Its only state between steps are the adaptive coefficients, `kl_control` and `entropy_control`.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    """Values for the `AlgorithmConfig` fields that are null in the config; GRPO's for fields that are missing here."""

    unused: ClassVar[frozenset[str]] = frozenset(
        {
            "advantage_std",
            "advantage_eps",
            "advantage_std_over",
            "singleton_group",
            "policy_loss",
            "entropy_coef",
            "entropy_ctrl",
            "positive_example_nll_weight",
            "top_entropy_quantile",
            "overlong",
        }
    )
    """`AlgorithmConfig` fields without effect in this algorithm; they are null, and a config that sets one is rejected.
    A subclass of `Algorithm` that reads some of them sets `unused = mrl.Algorithm.unused - {"entropy_coef"}`;
    `PolicyGradient` reads them all."""

    own_loss: ClassVar[PolicyLoss | None] = None
    """Policy loss that is not in the table of `algorithm.policy_loss`, which is then refused; None: a loss of it."""

    kl_places: ClassVar[frozenset[str]] = frozenset({"none"})
    """Values of `kl_in` that this algorithm supports. With "loss" it adds the KL to `ref_logprobs_R` in `loss`."""

    learns_from: ClassVar[LearnsFrom] = "samples"
    """Source of the training data. With "responses" and "pairs" the data set has the responses: nothing is sampled or
    scored, and only `weigh` and `loss` are called. The two sequences of a pair share a `group_id_B` and a microbatch;
    `sample_index_B` is 0 for the preferred one and 1 for the other."""

    def __init__(self, config: AlgorithmConfig, rollout: RolloutConfig) -> None:
        self.config = config
        self.rollout = rollout
        self.kl_control = KlControl(config)
        self.entropy_control = EntropyControl(config)

    def informative_groups(self, outcomes: Outcomes) -> Tensor:
        """Returns which samples dynamic sampling keeps, bool [N]: those of groups whose rewards are not all equal.

        The loop passes the rewards before `shape_rewards`, so a group of correct answers of different lengths still
        counts as uninformative.
        """
        return advantage_maths.informative_groups(outcomes.rewards_N, outcomes.group_id_N)

    @property
    def supervised(self) -> bool:
        """True if the training data come from a data set and nothing is sampled."""
        return self.learns_from != "samples"

    @property
    def num_samples(self) -> int:
        """Number of sequences per prompt and step."""
        return {"samples": self.rollout.n, "responses": 1, "pairs": 2}[self.learns_from]

    @property
    def needs_reference(self) -> bool:
        """True if `ref_logprobs_R` must be set before `advantages` (supervised algorithms: before `loss`)."""
        return self.config.kl_in != "none"

    @property
    def needs_proximal(self) -> bool:
        """True if `proximal_logprobs_R` must be set before the update."""
        return not self.config.rollout_correction.resolved.bypass_mode

    @property
    def reads_early(self) -> frozenset[str]:
        """Names of the log-probabilities (PROXIMAL, REFERENCE) that `advantages`, `weigh` or `counted_R` read.

        Others may be None until `loss` is called, so the forward pass of the update can compute them.
        """
        return frozenset({PROXIMAL, REFERENCE})

    @property
    def singleton(self) -> advantage_maths.SingletonPolicy:
        """Treatment of a group with one sample: "zero" if the others have no score, else as configured."""
        return "zero" if self.rollout.n > 1 else required(self.config.singleton_group, "algorithm.singleton_group")

    def counted_R(self, batch: RolloutBatch) -> Tensor:
        """Returns the tokens over which losses and metrics are averaged, bool [R]."""
        return batch.response_mask_R

    needs_values: ClassVar[bool] = False
    """True if the algorithm has a critic: `values_R` must be set before `advantages`, which then sets `returns_R`."""

    @property
    def needs_current(self) -> bool:
        """True if `current_logprobs_R` and `current_entropy_R` of each minibatch must be set before `weigh`."""
        return False

    @abstractmethod
    def shape_rewards(self, outcomes: Outcomes) -> Tensor:
        """Returns the rewards with the shaping that needs no log-probabilities (overlong penalty), fp64 [N]."""

    @abstractmethod
    def outcome_advantages(self, outcomes: Outcomes) -> Tensor:
        """Returns one advantage per sample (or turn) from the rewards of the complete step, fp64 [N].

        `outcomes.rewards_N` are the shaped rewards. Every rank computes the same result.
        """

    @abstractmethod
    def advantages(self, batch: RolloutBatch, outcome_advantages_B: Tensor, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets `batch.advantages_R`; may narrow `batch.response_mask_R`.

        Algorithms with a critic also set `batch.returns_R`.

        Args:
            batch: Sequences of this rank.
            outcome_advantages_B: Outcome advantages, indexed by `batch.advantage_index_R`.
            reduce: Elementwise sum over the data-parallel ranks.
        """

    def weigh(self, minibatch: RolloutBatch, reduce: SumReduce) -> None:
        """Collective over data-parallel: sets `minibatch.weights_R` and `minibatch.metric_weights_R`.

        The weights follow `algorithm.loss_aggregation`, with counts over the global minibatch. Algorithms with other
        weights override this method.
        """
        minibatch.weights_R, minibatch.metric_weights_R = token_weights(
            self.counted_R(minibatch),
            minibatch.sequence_R,
            minibatch.num_sequences,
            required(self.config.loss_aggregation, "algorithm.loss_aggregation"),
            reduce,
            norm_length=self.config.loss_norm_length or self.rollout.response_length,
        )

    @abstractmethod
    def loss(self, logprobs_R: Tensor, entropy_R: Tensor, microbatch: RolloutBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss sum of a microbatch, and its metrics.

        Args:
            logprobs_R: Log-probabilities of the current policy, fp32, with gradient.
            entropy_R: Entropy of the distribution at each response token, fp32, with gradient.
            microbatch: Sequences with `advantages_R` and `weights_R` set.

        Returns:
            A scalar whose sum over all microbatches and data-parallel ranks is the loss; and detached scalars that are
            summed the same way (names that end in "max" or "min" are reduced by max or min instead).
        """

    def check_set(self, batch: RolloutBatch) -> None:
        """Checks what `advantages` (maybe a user's own) has set.

        Raises:
            UserError: `advantages_R` is missing or not one number per response token.
        """
        _check_shape("advantages", "batch.advantages_R", batch.advantages_R, batch.response_mask_R)

    def checked_per_sample(self, method: str, outcomes: Outcomes) -> Tensor:
        """Returns the result of `shape_rewards` or `outcome_advantages`, after a check of its shape.

        Raises:
            UserError: The method (maybe a user's own) did not return one number per row of `outcomes`.
        """
        returned = getattr(self, method)(outcomes)
        _check_shape(method, "its result", returned, outcomes.rewards_N)
        value: Tensor = returned
        return value

    def checked_loss(self, *scores_and_microbatch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the result of `loss`, after a check of its types.

        Raises:
            UserError: `loss` (maybe a user's own) did not return a scalar tensor and a dict of scalar tensors.
        """
        returned: Any = self.loss(*scores_and_microbatch)
        match returned:
            case (Tensor() as value, Mapping() as metrics) if value.dim() == 0:
                wrong = [name for name, one in metrics.items() if not (isinstance(one, Tensor) and one.dim() == 0)]
                if not wrong:
                    return value, dict(metrics)
                found = f"metric {wrong[0]!r} is {_type_and_shape(metrics[wrong[0]])}"
            case (value, metrics):
                found = f"it returned ({_type_and_shape(value)}, {_type_and_shape(metrics)})"
            case _:
                found = f"it returned {_type_and_shape(returned)}"
        raise UserError(
            f"the algorithm's loss must return a scalar tensor and a dict of scalar tensors (metrics), but {found}. "
            "See `loss` in mrl/algorithms/base.py."
        )

    def finalize_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns the metrics of a minibatch to log, from the metrics of `loss` reduced over microbatches and ranks."""
        return metrics


def _check_shape(method: str, what: str, value: Any, like: Tensor) -> None:
    """Raises UserError unless a value is a tensor of numbers with the shape of `like`."""
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype == torch.bool:
        raise UserError(
            f"the algorithm's {method}: {what} is {_type_and_shape(value)}, expected a tensor of numbers of shape "
            f"{list(like.shape)}. See `{method}` in mrl/algorithms/base.py."
        )


def _type_and_shape(value: Any) -> str:
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    return f"a {type(value).__name__}{shape}"


def required(value: T | None, name: str) -> T:
    """Returns the value; raises RuntimeError if it is None because an earlier phase did not set it."""
    if value is None:
        raise RuntimeError(f"{name} is not set: the phase that sets it did not run (see mrl/algorithms/base.py).")
    return value


def resolve(config: AlgorithmConfig) -> AlgorithmConfig:
    """Returns the config with its null fields filled with the algorithm's defaults.

    Fields that have no effect stay null. Resolving a resolved config changes nothing.

    Raises:
        UserError: The algorithm is unknown, a value is out of range, or a field is set that would have no effect.
    """
    algorithm = _find(config.name)
    correction.check_policy_loss(config.policy_loss, config.rollout_correction)
    fill = {name: value for name, value in _defaults(config, algorithm).items() if getattr(config, name) is None}
    filled = replace(config, **fill)
    unused = _unused_fields(filled, algorithm)
    _reject_unused_fields(config, unused)
    if "rollout_correction" not in unused:
        correction.parse(filled.rollout_correction)
        filled = replace(filled, rollout_correction=correction.with_preset(filled.rollout_correction))
    unused_nulls: dict[str, Any] = {name: None for name in _NULLABLE if name in unused}
    filled = replace(filled, **unused_nulls)
    optional = {*unused, "loss_norm_length", "value_lam"}
    missing = [name for name in _NULLABLE if getattr(filled, name) is None and name not in optional]
    if missing:
        raise UserError(f"algorithm.name={config.name}: its `defaults` lack {', '.join(missing)}. Add them.")
    _check_ranges(filled)
    if filled.kl_in not in algorithm.kl_places:
        raise UserError(
            f"algorithm.kl_in='{filled.kl_in}' does not work with algorithm.name='{config.name}', which supports "
            f"{sorted(algorithm.kl_places)}. A KL in the reward needs an advantage per token: use "
            "algorithm.name='reinforce_pp' or 'reinforce_pp_baseline', or algorithm.kl_in='loss'."
        )
    if filled.kl_in == "reward" and filled.kl_estimator.endswith("+"):
        raise UserError(
            f"algorithm.kl_estimator={filled.kl_estimator} changes only the gradient, and a KL in the reward has none. "
            f"Set algorithm.kl_estimator={filled.kl_estimator[:-1]}, which has the same value."
        )
    return filled


def build(config: AlgorithmConfig, rollout: RolloutConfig) -> Algorithm:
    """Creates the algorithm after resolving its config and checking it against the rollout section.

    Raises:
        UserError: `resolve` rejects the config, or it cannot work with `rollout`.
    """
    config = resolve(config)
    if rollout.n == 1 and config.singleton_group == "error":
        raise UserError(
            f"rollout.n=1 gives algorithm '{config.name}' groups of one sample, which have no baseline. Set rollout.n "
            "to at least 2, or algorithm.singleton_group to 'zero' or 'reward'."
        )
    if rollout.n == 1 and config.dynamic_sampling:
        raise UserError(
            "algorithm.dynamic_sampling drops groups whose rewards are all equal; with rollout.n=1 that is every "
            "group. Set rollout.n to at least 2, or algorithm.dynamic_sampling=false."
        )
    if config.overlong.buffer_length > rollout.response_length:
        raise UserError(
            f"algorithm.overlong.buffer_length={config.overlong.buffer_length} is longer than "
            f"rollout.response_length={rollout.response_length}; it must be at most that."
        )
    return _find(config.name)(config, rollout)


_NULLABLE = tuple(item.name for item in fields(AlgorithmConfig) if item.default is None)


def _find(name: str) -> type[Algorithm]:
    found: type[Algorithm] = find("algorithms", name, "ALGORITHM")
    check_subclass(f"algorithm.name='{name}'", found, Algorithm)
    return found


def _defaults(config: AlgorithmConfig, algorithm: type[Algorithm]) -> dict[str, Any]:
    """Returns the algorithm's defaults, overridden by those of a policy loss that is not the algorithm's own."""
    chosen = config.policy_loss
    if algorithm.own_loss is not None:
        return {**FALLBACKS, **algorithm.own_loss.defaults, **algorithm.defaults}
    own_name = algorithm.defaults.get("policy_loss", FALLBACKS["policy_loss"])
    own = {**FALLBACKS, **LOSSES[own_name].defaults, **algorithm.defaults}
    if chosen is None and correction.is_reinforce(config.rollout_correction) and algorithm.learns_from == "samples":
        return {**own, "policy_loss": correction.REINFORCE}
    if chosen is None or "policy_loss" in algorithm.unused or chosen == own_name:
        return own
    return {**own, **LOSSES[chosen].defaults}


def _unused_fields(config: AlgorithmConfig, algorithm: type[Algorithm]) -> dict[str, str]:
    """Returns the fields without effect under `config`, each with the reason."""
    by_name = f"algorithm.name is '{config.name}'"
    own = algorithm.own_loss
    unused = dict.fromkeys(sorted(algorithm.unused | ({"policy_loss"} if own else set())), by_name)
    if own is not None:
        unread_keys, why = sorted(READ - own.keys), by_name
    elif config.policy_loss is None or "policy_loss" in unused:
        unread_keys, why = sorted(READ), by_name
    else:
        unread_keys = sorted(READ - LOSSES[config.policy_loss].keys)
        why = f"algorithm.policy_loss is '{config.policy_loss}'"
    conditions = [
        (unread_keys, True, why),
        (("advantage_eps", "advantage_std_over"), config.advantage_std == "none", "algorithm.advantage_std is 'none'"),
        (("credit",), algorithm.learns_from != "samples", by_name),
        (
            ("loss_norm_length",),
            config.loss_aggregation != "seq_mean_token_sum_norm",
            f"algorithm.loss_aggregation is '{config.loss_aggregation}', not 'seq_mean_token_sum_norm'",
        ),
        (
            ("gamma", "lam", "value_lam", "lam_length_alpha"),
            not algorithm.needs_values,
            f"algorithm.name '{config.name}' has no critic",
        ),
        (("lam",), bool(config.lam_length_alpha), "algorithm.lam_length_alpha is above 0"),
        (("kl_coef", "kl_estimator"), config.kl_in == "none", "algorithm.kl_in is 'none'"),
        (
            tuple(f"entropy_ctrl.{name}" for name in ("target_entropy", "delta", "min_coef", "max_coef")),
            config.entropy_ctrl.type == "fixed",
            "algorithm.entropy_ctrl.type is 'fixed'",
        ),
        (("kl_unbiased",), config.kl_in != "loss", f"algorithm.kl_in is '{config.kl_in}'"),
        (
            ("kl_ctrl.type", "kl_ctrl.target_kl", "kl_ctrl.horizon"),
            config.kl_in != "reward",
            f"algorithm.kl_in is '{config.kl_in}', not 'reward'",
        ),
        (
            ("kl_ctrl.type", "kl_ctrl.target_kl", "kl_ctrl.horizon"),
            config.kl_coef == 0,
            "algorithm.kl_coef is 0, which the controller cannot change: it multiplies",
        ),
        (
            ("kl_ctrl.target_kl", "kl_ctrl.horizon"),
            config.kl_ctrl.type == "fixed",
            "algorithm.kl_ctrl.type is 'fixed'",
        ),
        (tuple(f"dpo.{item.name}" for item in fields(DpoConfig)), algorithm.learns_from != "pairs", by_name),
        (("dpo.label_smoothing",), config.dpo.loss_type != "robust", "algorithm.dpo.loss_type is not 'robust'"),
        (("max_sampling_rounds",), not config.dynamic_sampling, "algorithm.dynamic_sampling is off"),
        (("overlong.penalty",), config.overlong.buffer_length == 0, "algorithm.overlong.buffer_length is 0"),
    ]
    for names, holds, reason in conditions:
        if holds:
            unused.update({name: reason for name in names if name not in unused})
    return unused if "rollout_correction" in unused else correction.unused_fields(config.rollout_correction) | unused


def _reject_unused_fields(config: AlgorithmConfig, unused: dict[str, str]) -> None:
    """Raises UserError for the first field that is set but has no effect."""
    for name, reason in unused.items():
        given: Any = config
        default: Any = AlgorithmConfig()
        for part in name.split("."):
            given, default = getattr(given, part), getattr(default, part)
        if given != default:
            shown = "" if is_dataclass(given) else f"={given}"
            raise UserError(
                f"algorithm.{name}{shown} would have no effect because {reason}. Remove it, or change that."
            )


def _check_ranges(config: AlgorithmConfig) -> None:
    """Raises UserError for the first value out of its range; null fields are skipped."""
    for name, value, holds, expected in ranges(config):
        if value is not None and not (-LARGEST <= value <= LARGEST and holds(value)):
            raise UserError(f"algorithm.{name}={value} is out of range, expected {expected}, up to {LARGEST:g}.")


def ranges(config: AlgorithmConfig) -> list[tuple[str, float | None, Callable[[float], bool], str]]:
    """Returns (field, value, check, description of the allowed range) for each number in `algorithm`."""
    overlong, entropy, clip_cov_lb = config.overlong, config.entropy_ctrl, config.clip_cov.clip_cov_lb
    threshold = config.rollout_correction.off_policy_mask_threshold
    return [
        ("advantage_eps", config.advantage_eps, lambda x: x > 0, "a number above 0"),
        ("gamma", config.gamma, lambda x: 0 < x <= 1, "a number in (0, 1]"),
        ("lam", config.lam, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        ("value_lam", config.value_lam, lambda x: 0 <= x <= 1, "a number in [0, 1]"),
        ("lam_length_alpha", config.lam_length_alpha, lambda x: x >= 0, "0 (off) or a number above 0"),
        ("clip_low", config.clip_low, lambda x: 0 < x <= 1, "a number in (0, 1]"),
        ("clip_high", config.clip_high, lambda x: x > 0, "a number above 0"),
        ("dual_clip", config.dual_clip, lambda x: x == 0 or x > 1, "0 (off) or a number above 1"),
        ("loss_norm_length", config.loss_norm_length, lambda x: x >= 1, "at least 1 token"),
        ("kl_coef", config.kl_coef, lambda x: x >= 0, "a number of at least 0"),
        ("kl_ctrl.target_kl", config.kl_ctrl.target_kl, lambda x: x > 0, "a number above 0"),
        ("kl_ctrl.horizon", config.kl_ctrl.horizon, lambda x: x >= 1, "at least 1 response"),
        ("entropy_coef", config.entropy_coef, lambda x: x >= 0, "a number of at least 0"),
        ("rollout_correction.off_policy_mask_threshold", threshold, lambda x: x >= 0, "a number of at least 0"),
        ("max_sampling_rounds", config.max_sampling_rounds, lambda x: 1 <= x <= 10_000, "1 to 10000"),
        ("overlong.buffer_length", overlong.buffer_length, lambda x: x >= 0, "at least 0 tokens"),
        ("overlong.penalty", overlong.penalty, lambda x: x > 0, "a number above 0"),
        ("sapo.tau_pos", config.sapo.tau_pos, lambda x: x > 0, "a number above 0"),
        ("sapo.tau_neg", config.sapo.tau_neg, lambda x: x > 0, "a number above 0"),
        ("vespo.k_pos", config.vespo.k_pos, lambda x: x >= 0, "a number of at least 0"),
        ("vespo.lambda_pos", config.vespo.lambda_pos, lambda x: x > 0, "a number above 0"),
        ("vespo.k_neg", config.vespo.k_neg, lambda x: x >= 0, "a number of at least 0"),
        ("vespo.lambda_neg", config.vespo.lambda_neg, lambda x: x > 0, "a number above 0"),
        ("clip_cov.clip_cov_ratio", config.clip_cov.clip_cov_ratio, lambda x: 0 < x <= 1, "a number in (0, 1]"),
        ("clip_cov.clip_cov_lb", config.clip_cov.clip_cov_lb, lambda _: True, "a number"),
        ("clip_cov.clip_cov_ub", config.clip_cov.clip_cov_ub, lambda x: x > clip_cov_lb, "above clip_cov_lb"),
        ("kl_cov.kl_cov_ratio", config.kl_cov.kl_cov_ratio, lambda x: 0 < x <= 1, "a number in (0, 1]"),
        ("kl_cov.ppo_kl_coef", config.kl_cov.ppo_kl_coef, lambda x: x >= 0, "a number of at least 0"),
        ("dro.dro_beta", config.dro.dro_beta, lambda x: x > 0, "a number above 0"),
        ("dpo.beta", config.dpo.beta, lambda x: x > 0, "a number above 0"),
        ("dpo.label_smoothing", config.dpo.label_smoothing, lambda x: 0 <= x < 0.5, "a number in [0, 0.5)"),
        ("dpo.sft_loss_weight", config.dpo.sft_loss_weight, lambda x: x >= 0, "a number of at least 0"),
        ("entropy_ctrl.target_entropy", entropy.target_entropy, lambda x: x > 0, "a number above 0"),
        ("entropy_ctrl.delta", entropy.delta, lambda x: x > 0, "a number above 0"),
        ("entropy_ctrl.min_coef", entropy.min_coef, lambda x: x >= 0, "a number of at least 0"),
        ("entropy_ctrl.max_coef", entropy.max_coef, lambda x: x >= entropy.min_coef, "at least min_coef"),
        ("positive_example_nll_weight", config.positive_example_nll_weight, lambda x: x >= 0, "at least 0"),
        ("top_entropy_quantile", config.top_entropy_quantile, lambda x: 0 < x <= 1, "a number in (0, 1]"),
        ("dppo.ratio_cap", config.dppo.ratio_cap, lambda x: x >= 1, "a number of at least 1"),
    ]
