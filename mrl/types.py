"""Data types of the training loop: Prompt -> Rollout -> RolloutBatch, and the legend of shape suffixes.

A tensor's suffix names its dimensions:
    B  sequences
    P  packed tokens: prompt and response of every sequence, concatenated, without padding
    R  packed response tokens, in the same order
    N  samples of the step (in `rollout/`), attention heads (in models)
    K  kept token ids (in `SamplingMask`), KV heads (in models)
    U  turns of episodes    T  positions of one sequence    V  vocabulary
    H  hidden size    D  head size    E  experts

`logprobs_R[i]` is the log-probability of response token i itself, given all tokens before it in its sequence (it is not
shifted by one). Logarithms are natural; log-probabilities are fp32, in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """A prompt from the training or held-out data.

    Attributes:
        uid: Index of the prompt in the order of the run, never reused. It seeds sampling and is the `group_id` of the
            prompt's samples.
        prompt_ids: Token ids after the chat template.
        text: Readable text of the prompt.
        answer: Ground truth for the reward; None if the data has none.
        extra: Remaining columns of the data row.
        source: File or task and row number of the prompt ("train.jsonl:17").
        data_source: Name of the data set ("openai/gsm8k"), as in verl. Metrics are also logged per data set, and reward
            functions may choose the scoring by it.
        question: Original prompt from the data, text or chat messages.
        row: All columns of the data row.
    """

    uid: int
    prompt_ids: tuple[int, ...]
    text: str
    answer: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    data_source: str = ""
    question: str | list[dict[str, Any]] = ""
    row: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Segment:
    """A run of response tokens, `start` to `end` (exclusive), all sampled by the policy or all observed."""

    start: int
    end: int
    sampled: bool


EPISODE_ENDS = (
    "finished",
    "max_assistant_turns",
    "max_user_turns",
    "response_length",
    "environment_failed",
    "environment_timeout",
)
"""Reasons for the end of an episode: the environment was done, a limit was reached (turns of the policy, turns of the
environment, tokens), the environment failed, or it timed out."""


@dataclass(frozen=True)
class Episode:
    """Record of a finished multi-turn conversation with an environment.

    Attributes:
        end: Reason for the end, one of `EPISODE_ENDS`.
        num_turns: Turns of the policy.
        num_tool_calls: Tool calls of the policy.
        num_failed_calls: Tool calls that could not be parsed or exceeded the limit.
        turn_rewards: Reward of the environment for each turn of the policy; 0 if it gave none.
        final_text: Last turn of the policy without its end token; reward functions read it as the response.
        error: Failure of the environment; None if it did not fail. A failed sample is counted and not trained on.
        facts: Additional numbers or texts that the environment reported.
        turns: ("policy" or "environment", text) for each segment of the response, in order; the environment's text
            includes the chat template's markup.
    """

    end: str
    num_turns: int
    num_tool_calls: int
    num_failed_calls: int
    turn_rewards: tuple[float, ...]
    final_text: str
    error: str | None = None
    facts: dict[str, float | str] = field(default_factory=dict)
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def reward(self) -> float:
        """Sum of the environment's rewards."""
        return math.fsum(self.turn_rewards)


@dataclass(frozen=True)
class SamplingMask:
    """Sampling mask: the vocabulary ids that top-k, top-p or min-p kept at each response token.

    Ragged, and always on the CPU; chunks of it are copied to the device when logits are masked.

    Attributes:
        ids_K: Kept token ids of all response tokens, concatenated, int32.
        counts_R: Number of kept ids at each response token, int32; 0 at an observed token.
    """

    ids_K: Tensor
    counts_R: Tensor

    def split(self, lens: Sequence[int]) -> list[SamplingMask]:
        """Returns consecutive parts with `lens` response tokens each."""
        counts = torch.split(self.counts_R, list(lens))
        ids = torch.split(self.ids_K, [int(count_R.sum()) for count_R in counts])
        return [SamplingMask(*part) for part in zip(ids, counts, strict=True)]

    @staticmethod
    def of_observed(count: int) -> SamplingMask:
        """Returns the mask of `count` observed tokens, which keeps no ids."""
        return SamplingMask(torch.zeros(0, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))

    @staticmethod
    def join(parts: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenates masks along the response tokens."""
        parts = parts or [SamplingMask.of_observed(0)]
        return SamplingMask(torch.cat([part.ids_K for part in parts]), torch.cat([part.counts_R for part in parts]))

    def where(self, mask_R: Tensor) -> SamplingMask:
        """Returns the entries of the response tokens selected by a bool mask [R]."""
        return SamplingMask(self.ids_K[mask_R.repeat_interleave(self.counts_R)], self.counts_R[mask_R])


@dataclass
class Rollout:
    """A sampled response with its reward.

    Attributes:
        prompt: Prompt of the response.
        sample_index: Index among the samples of this prompt, 0 .. n-1.
        response_ids: All tokens after the prompt in the order the model saw them: sampled ones, the end-of-sequence
            token included, and in an episode the observed ones from the environment.
        rollout_logprobs: Log-probability of each response token from the engine at sampling time (pi_old), nats; 0 at
            observed tokens.
        finish_reason: "stop" (end token or stop string) or "length".
        policy_version: Version of the weights (number of optimizer steps) that sampled the last token.
        response_text: Decoded response, set before scoring.
        reward: Total reward, set by scoring; NaN if there is no score, and then the sample is not trained on.
        reward_parts: Value of each reward function before its weight.
        reward_facts: Additional output of the reward functions, see `rewards/base.py`.
        reward_error: Scoring failure; None if scoring succeeded.
        reward_cached: True if the score came from the cache and no worker or judge was called.
        routed_experts: Experts that the engine chose for each prompt and response token in each layer, in any order,
            int8 (int16 above 128 experts) [num_tokens, layers, top_k] on the CPU. The last token never went through the
            model; its entries are -1. None unless `rollout.enable_rollout_routing_replay`.
        sampled_mask: True at sampled response tokens, False at observed ones; None if all are sampled. episode: Record
            of the conversation with an environment; None for a single-turn response. kept_tokens: Token ids that
            truncation kept at each response token; None unless `SamplingConfig.return_kept_tokens`.
        log_kept_mass: Log of the probability that the kept ids of each response token had before truncation, nats; 0 at
            observed tokens; empty without `kept_tokens`.
        version_runs: (policy version, number of tokens) of consecutive parts of a response that several versions
            sampled; empty if `policy_version` sampled all tokens.
    """

    prompt: Prompt
    sample_index: int
    response_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: FinishReason
    policy_version: int
    response_text: str = ""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_facts: dict[str, float | str] = field(default_factory=dict)
    reward_error: str | None = None
    reward_cached: bool = False
    routed_experts: Tensor | None = field(default=None, repr=False, compare=False)
    sampled_mask: list[bool] | None = None
    episode: Episode | None = None
    kept_tokens: SamplingMask | None = field(default=None, repr=False, compare=False)
    log_kept_mass: list[float] = field(default_factory=list, repr=False, compare=False)
    version_runs: tuple[tuple[int, int], ...] = ()

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(policy version, number of tokens) of consecutive parts; one part if a single version sampled all."""
        return self.version_runs or ((self.policy_version, len(self.response_ids)),)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Number of response tokens that the policy sampled."""
        return len(self.response_ids) if self.sampled_mask is None else sum(self.sampled_mask)

    @property
    def segments(self) -> list[Segment]:
        """Alternating sampled and observed parts of the response."""
        mask = [True] * len(self.response_ids) if self.sampled_mask is None else self.sampled_mask
        starts = [i for i in range(len(mask)) if i == 0 or mask[i] != mask[i - 1]]
        ends = [*starts[1:], len(mask)][: len(starts)]
        return [Segment(start, end, mask[start]) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class PartialRollout:
    """Partial rollout: an unfinished response that sampling continues from, maybe with newer weights.

    Attributes:
        prompt: Prompt of the response.
        sample_index: Index among the samples of this prompt, 0 .. n-1.
        response_ids: Tokens sampled so far, at least one.
        rollout_logprobs: Log-probability of each token at sampling time, nats.
        version_runs: (policy version, number of tokens) of consecutive parts.
        kept_tokens: Token ids that truncation kept at each token; None unless `SamplingConfig.return_kept_tokens`.
        log_kept_mass: Log of the kept probability of each token, nats, see `Rollout.log_kept_mass`.
    """

    prompt: Prompt
    sample_index: int
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    version_runs: tuple[tuple[int, int], ...]
    kept_tokens: SamplingMask | None = field(default=None, repr=False, compare=False)
    log_kept_mass: tuple[float, ...] = field(default=(), repr=False, compare=False)


@dataclass
class RolloutBatch:
    """Packed sequences to train on; no padding is stored.

    Attributes:
        tokens_P: Prompt and response ids of all sequences, concatenated, int64.
        prompt_lens_B: Prompt length of each sequence, int64.
        response_lens_B: Response length of each sequence (at least 1), int64.
        response_mask_R: True at trained tokens, bool; False at all observed tokens.
        rollout_logprobs_R: Log-probabilities from the engine at sampling time, fp32.
        group_id_B: `Prompt.uid` of each sequence, int64.
        rewards_B: Total reward of each sequence, fp32.
        advantages_R: Advantages, set by `Algorithm.advantages`, fp32.
        weights_R: Weight of each token in the loss, set by `Algorithm.weigh`, fp32. The loss is the sum of weight x
            token loss over all microbatches and data-parallel ranks.
        ref_logprobs_R: Log-probabilities of the frozen reference, fp32; None without a KL term.
        teacher_B: Index of the sequence's teacher in the config, int64; None without distillation.
        teacher_logprobs_R: Log-probabilities of that teacher, fp32; None if full distributions are compared.
        teacher_states_R: Final hidden states of that teacher that predict each token, [R, H] on ranks of the last
            pipeline stage, [R, 0] on others. None unless full distributions are compared.
        values_R: Critic values of the state before each token, before the critic's updates, fp32; None without critic.
        returns_R: Regression targets of the critic, set by `Algorithm.advantages`, fp32.
        critic_mask_R: Tokens that the critic trains on, set by `Algorithm.advantages`, bool; None: all trained tokens.
        proximal_logprobs_R: Log-probabilities recomputed by the actor at the rollout weights, fp32; None unless the
            loss is decoupled (`Algorithm.needs_proximal`).
        current_logprobs_R: Log-probabilities of the actor right before the update on this minibatch, fp32; None unless
            `Algorithm.needs_current`.
        current_entropy_R: Entropies of the same forward pass, nats, fp32.
        sample_index_B: Index among the samples of the prompt, int64. Together with `group_id_B` it seeds the sequence's
            random numbers.
        correct_B: True for correct answers, bool.
        nll_weights_R: Weight of each token of correct samples in an additional likelihood loss, set by
            `Algorithm.weigh`, fp32; None unless `algorithm.positive_example_nll_weight`.
        chosen_R: Tokens that Clip-Cov excludes or KL-Cov penalizes, set by `Algorithm.weigh`, bool; None for other
            losses.
        entropic_R: High-entropy tokens that the policy loss is limited to, set by `Algorithm.weigh`, bool; None: all
            trained tokens.
        importance_mean_B: Mean importance weight of the minibatch, which divides the weights, equal for all sequences,
            fp32; None unless `rollout_correction.rollout_is_batch_normalize`.
        metric_weights_R: Weight of each token in averaged metrics, 1 / (trained tokens of the global minibatch), 0 at
            others; set by `Algorithm.weigh`, fp32.
        truncated_B: True if the response was cut at the length limit, bool; used by
            `algorithm.overlong.mask_truncated`.
        turn_R: Index of the turn of each response token among all turns of the batch, int64, with
            `algorithm.credit=turn`. A turn includes the observation that follows it.
        routed_experts_P: Routing record to replay in the layers of this rank's pipeline stage, from the engine or from
            the actor before its updates, [P, layers, top_k], dtype as in `Rollout`; -1 at the last token of a response.
            None without router replay.
        kept_tokens_R: Token ids that truncation kept at each response token, on ranks of the last pipeline stage; None
            without truncation and on other stages.
    """

    tokens_P: Tensor
    prompt_lens_B: Tensor
    response_lens_B: Tensor
    response_mask_R: Tensor
    rollout_logprobs_R: Tensor
    group_id_B: Tensor
    rewards_B: Tensor
    advantages_R: Tensor | None = None
    weights_R: Tensor | None = None
    ref_logprobs_R: Tensor | None = None
    teacher_B: Tensor | None = None
    teacher_logprobs_R: Tensor | None = None
    teacher_states_R: Tensor | None = None
    values_R: Tensor | None = None
    returns_R: Tensor | None = None
    critic_mask_R: Tensor | None = None
    proximal_logprobs_R: Tensor | None = None
    current_logprobs_R: Tensor | None = None
    current_entropy_R: Tensor | None = None
    sample_index_B: Tensor | None = None
    correct_B: Tensor | None = None
    nll_weights_R: Tensor | None = None
    chosen_R: Tensor | None = None
    entropic_R: Tensor | None = None
    importance_mean_B: Tensor | None = None
    metric_weights_R: Tensor | None = None
    truncated_B: Tensor | None = None
    turn_R: Tensor | None = None
    routed_experts_P: Tensor | None = None
    kept_tokens_R: SamplingMask | None = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences B."""
        return self.prompt_lens_B.numel()

    @property
    def valued_R(self) -> Tensor:
        """Tokens that the critic trains on, bool."""
        return self.response_mask_R if self.critic_mask_R is None else self.critic_mask_R

    @property
    def seq_lens_B(self) -> Tensor:
        """Prompt plus response length of each sequence."""
        return self.prompt_lens_B + self.response_lens_B

    @property
    def sequence_R(self) -> Tensor:
        """Index of the sequence that each response token belongs to, int64."""
        rows = torch.arange(self.num_sequences, device=self.response_lens_B.device)
        return rows.repeat_interleave(self.response_lens_B, output_size=self.response_mask_R.numel())

    @property
    def advantage_index_R(self) -> Tensor:
        """Index of the advantage of each response token, int64: its turn if turns are credited, else its sequence."""
        return self.sequence_R if self.turn_R is None else self.turn_R

    def select(self, rows: list[int]) -> RolloutBatch:
        """Returns a copy of the sequences `rows`, in this order."""
        chosen: dict[str, Any] = {}
        index_B = torch.tensor(rows, dtype=torch.int64)
        index = {
            "B": index_B,
            "P": ragged_indices(self.seq_lens_B, index_B),
            "R": ragged_indices(self.response_lens_B, index_B),
        }
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if isinstance(value, SamplingMask):
                supports = value.split(self.response_lens_B.tolist())
                chosen[item.name] = SamplingMask.join([supports[row] for row in rows])
            elif value is not None:
                chosen[item.name] = value[index[item.name[-1]]]
        return replace(self, **chosen)


def ragged_indices(lens_B: Tensor, index: Tensor) -> Tensor:
    """Returns the positions of the elements of rows `index` in a packed tensor of rows with `lens_B` elements."""
    starts_B = lens_B.cumsum(0) - lens_B
    return ranges(starts_B[index], starts_B[index] + lens_B[index])


def ranges(begin_N: Tensor, end_N: Tensor) -> Tensor:
    """Concatenates the integer ranges `begin_N[i]` .. `end_N[i]` (exclusive)."""
    lens_N = end_N - begin_N
    shift_N = begin_N - (lens_N.cumsum(0) - lens_N)
    return torch.arange(int(lens_N.sum())) + shift_N.repeat_interleave(lens_N)


TurnRewards = Mapping[tuple[int, int], Sequence[float]]
"""Environment rewards of the turns of each episode, by (uid, sample index)."""


class SampleTable:
    """Metadata of all samples of all ranks, one row each, ordered by (uid, sample index), equal on every rank.

    `table["reward"]` is a column, fp64 [N]; NaN if a sample has no score. Columns:

    - `FACTS`: `rank` stores the tokens; `correct`, `failed`, `truncated` and `cached` are 0 or 1; `token_crc` is the
      CRC-32 of the response ids; `sampled_len` is the number of sampled tokens among `response_len`; `end` is an index
      of `EPISODE_ENDS`, -1 without an episode; `version` is the policy version of the last token and `num_versions`
      the number of versions that sampled the response.
    - "reward/<function>" for each reward function; NaN if it gave no value.
    - `KEPT`, only with truncated sampling: sums over the sample's tokens, and extremes.

    `turn_rewards` has the environment's reward of each turn, only with `algorithm.credit=turn`.
    """

    FACTS: ClassVar = (
        "rank",
        "uid",
        "sample_index",
        "prompt_len",
        "response_len",
        "reward",
        "correct",
        "failed",
        "truncated",
        "token_crc",
        "sampled_len",
        "num_turns",
        "tool_calls",
        "failed_calls",
        "end",
        "cached",
        "version",
        "oldest_version",
        "num_versions",
    )
    KEPT: ClassVar = ("kept_ids", "kept_ids/max", "kept_mass", "kept_mass/min")

    def __init__(self, columns: tuple[str, ...], rows_NC: Tensor, turn_rewards: TurnRewards | None = None) -> None:
        self.turn_rewards = dict(turn_rewards or {})
        keys_2N = rows_NC[:, [columns.index("sample_index"), columns.index("uid")]].T.numpy()
        self.columns = columns
        self.rows_NC = rows_NC[torch.from_numpy(np.lexsort(keys_2N))]

    def __getitem__(self, column: str) -> Tensor:
        return self.rows_NC[:, self.columns.index(column)]

    def __len__(self) -> int:
        return self.rows_NC.size(0)

    @property
    def num_prompts(self) -> int:
        """Number of distinct prompts."""
        return len(set(self["uid"].tolist()))

    @property
    def scored(self) -> SampleTable:
        """Rows of the samples that have a reward."""
        return self.keep(self["reward"].isfinite())

    def keep(self, mask_N: Tensor) -> SampleTable:
        """Returns the rows selected by a bool mask [N]."""
        return self if mask_N.all() else SampleTable(self.columns, self.rows_NC[mask_N], self.turn_rewards)

    @staticmethod
    def join(tables: list[SampleTable]) -> SampleTable:
        """Concatenates tables with equal columns."""
        turn_rewards = {key: rewards for table in tables for key, rewards in table.turn_rewards.items()}
        return SampleTable(tables[0].columns, torch.cat([table.rows_NC for table in tables]), turn_rewards)
