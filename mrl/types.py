"""What flows through the loop: Prompt -> Rollout -> RolloutBatch.

Owns the data types that every folder speaks, and the legend of shape suffixes. It computes nothing.

Shapes (suffixes in `algorithms/functional/` and `engines/native/`):
    B sequences        P packed tokens: prompts and responses of all sequences, one after the other, no padding
    R packed response tokens, the same order       N heads    K KV heads    D head dim    H hidden    V vocabulary
    T positions of one sequence    E experts

Position rule, stated once: `logprobs_R[i]` scores response token i, that is, it is the log-probability of the token
itself given everything before it in its sequence. Logarithms are natural; log-probabilities are fp32.
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
    """One prompt of the stream.

    Attributes:
        uid: Position in the prompt stream, never reused in a run; seeds the sampler and is the samples' `group_id`.
        prompt_ids: Token ids, the chat template applied.
        text: The prompt as a person reads it.
        answer: Ground truth for the reward, None where the data has none.
        extra: The other columns of the data row.
        source: File or task that the row came from, and the row in it ("train.jsonl:17").
        data_source: Name of the data set that the row belongs to ("openai/gsm8k"), as in verl; metrics are also told
            by it, and reward functions may choose by it how to score.
        question: The prompt as the data have it: a text, or chat messages.
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
    """A part of a response: tokens `start` to `end` (exclusive), all sampled or all observed."""

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
"""Why an episode ended: the environment was done, a limit was reached (turns of either side, room for tokens), the
environment failed, or it did not answer in time."""


@dataclass(frozen=True)
class Episode:
    """How one conversation with an environment went.

    Attributes:
        end: One of `EPISODE_ENDS`.
        num_turns: Turns that the policy took.
        num_tool_calls: Calls that it made.
        num_failed_calls: Messages to it about calls that could not be read or were too many.
        turn_rewards: What the environment gave for each of the policy's turns; 0 where it gave nothing.
        final_text: The policy's last turn, without its end token: what reward functions read as the response.
        error: What went wrong in the environment; None: nothing did. Such a sample is counted and not trained.
        facts: What the environment says besides, numbers or texts.
        turns: Who said what, in order: ("policy" or "environment", text); the environment's with the template's words.
            One for each segment of the response.
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
class Support:
    """The tokens that an engine kept at each response token, where top-k, top-p or min-p dropped the others.

    Ragged, 4 bytes for each kept token, and always on the CPU: the device gets a chunk of rows at a time.

    Attributes:
        ids_K: Ids of the kept tokens, one response token after the other, int32.
        counts_R: How many were kept at each response token, int32; 0 at one that was not sampled.
    """

    ids_K: Tensor
    counts_R: Tensor

    def split(self, lens: Sequence[int]) -> list[Support]:
        """Consecutive parts of that many response tokens."""
        counts = torch.split(self.counts_R, list(lens))
        ids = torch.split(self.ids_K, [int(count_R.sum()) for count_R in counts])
        return [Support(*part) for part in zip(ids, counts, strict=True)]

    @staticmethod
    def of_observed(count: int) -> Support:
        """Of so many response tokens that were not sampled."""
        return Support(torch.zeros(0, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))

    @staticmethod
    def join(parts: Sequence[Support]) -> Support:
        """Of all parts' response tokens, part after part."""
        parts = parts or [Support.of_observed(0)]
        return Support(torch.cat([part.ids_K for part in parts]), torch.cat([part.counts_R for part in parts]))

    def where(self, mask_R: Tensor) -> Support:
        """Of the response tokens where the mask is True."""
        return Support(self.ids_K[mask_R.repeat_interleave(self.counts_R)], self.counts_R[mask_R])


@dataclass
class Rollout:
    """One sampled response.

    Attributes:
        prompt: What was asked.
        sample_index: 0 .. n-1 among the samples of this prompt.
        response_ids: All tokens after the prompt, as the model saw them: those it sampled, the end-of-sequence token
            included where one was sampled, and in an episode those that its environment answered.
        rollout_logprobs: Log-probability of each response token, captured at sampling time (pi_old), nats; 0 at
            observed ones.
        finish_reason: "stop" (end token or stop string) or "length".
        policy_version: Optimizer steps in the weights that sampled.
        response_text: Decoded response, set before scoring.
        reward: Total reward, set by scoring; NaN where there is no score: the sample is then not trained on.
        reward_parts: Each reward function's own value, before its weight.
        reward_facts: What the functions said besides, see `rewards/base.py`.
        reward_error: Why scoring failed, None where it did not.
        reward_cached: No worker or judge was asked: they had scored the same before.
        routed_experts: Experts that the engine chose for each token of prompt and response in each layer, in any order,
            int8 (above 128 experts int16) [num_tokens, layers, top_k] on the CPU. The last token was sampled and
            never went through the model: its entries are -1. None unless `rollout.enable_rollout_routing_replay`.
        sampled_mask: True for each response token that the policy sampled, False for those it observed; None: all are
            sampled.
        episode: How a conversation with an environment went; None: a single answer.
        support: What truncation kept at each response token; None unless `SamplingConfig.with_support`.
        log_kept_mass: With a support, log of the probability that it had before the others were dropped, of each
            response token, nats; 0 at observed ones.
        version_runs: Of a response that weights of several versions sampled: (policy version, how many tokens), one
            after the other; empty: all tokens have `policy_version`, which is the last one's.
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
    support: Support | None = field(default=None, repr=False, compare=False)
    log_kept_mass: list[float] = field(default_factory=list, repr=False, compare=False)
    version_runs: tuple[tuple[int, int], ...] = ()

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """`version_runs`, of any response."""
        return self.version_runs or ((self.policy_version, len(self.response_ids)),)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy sampled."""
        return len(self.response_ids) if self.sampled_mask is None else sum(self.sampled_mask)

    @property
    def segments(self) -> list[Segment]:
        """The response in parts, sampled and observed in turn; one sampled part where nothing was observed."""
        mask = [True] * len(self.response_ids) if self.sampled_mask is None else self.sampled_mask
        starts = [i for i in range(len(mask)) if i == 0 or mask[i] != mask[i - 1]]
        ends = [*starts[1:], len(mask)][: len(starts)]
        return [Segment(start, end, mask[start]) for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True)
class Begun:
    """A response that is not whole: what was sampled of it, from which it is sampled on.

    Attributes:
        prompt: What was asked.
        sample_index: 0 .. n-1 among the samples of this prompt.
        response_ids: Sampled so far, at least one.
        rollout_logprobs: Log-probability of each, captured at sampling time, nats.
        version_runs: (policy version, how many tokens), one after the other.
        support: What truncation kept at each token; None unless `SamplingConfig.with_support`.
        log_kept_mass: As in `Rollout`.
    """

    prompt: Prompt
    sample_index: int
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    version_runs: tuple[tuple[int, int], ...]
    support: Support | None = field(default=None, repr=False, compare=False)
    log_kept_mass: tuple[float, ...] = field(default=(), repr=False, compare=False)


@dataclass
class RolloutBatch:
    """Sequences to train on, ragged: no padding is ever stored.

    Attributes:
        tokens_P: Prompt and response ids of every sequence, one sequence after the other, int64.
        prompt_lens_B: Prompt length of each sequence, int64.
        response_lens_B: Response length of each sequence (at least 1), int64.
        response_mask_R: True where the token is trained, bool: never where it was observed.
        rollout_logprobs_R: Captured at sampling time, fp32.
        group_id_B: Which prompt a sample belongs to, int64.
        rewards_B: Total outcome reward, fp32.
        advantages_R: Set by `Algorithm.advantages`, fp32.
        weights_R: Weight of each token in the loss sum, set by `Algorithm.weigh`, fp32; the sum of weight x loss over
            all microbatches and data-parallel ranks is the loss.
        ref_logprobs_R: By the frozen reference, fp32; None where no KL is used.
        teacher_B: Which teacher each sequence has, by its place in the config, int64; None without distillation.
        teacher_logprobs_R: By that teacher, fp32; None where whole distributions are compared.
        teacher_states_R: That teacher's final hidden state where it predicts the token, [R, H]; on ranks of the last
            pipeline stage, elsewhere [R, 0]. None unless whole distributions are compared.
        values_R: By the critic before its updates, of the state before each token, fp32; None without a critic.
        returns_R: What the critic learns, set by `Algorithm.advantages` from values, fp32.
        critic_mask_R: Where it learns that, set by `Algorithm.advantages`, bool; None: at every trained token.
        proximal_logprobs_R: Recomputed by the actor at the rollout weights, fp32; None unless decoupled.
        current_logprobs_R: By the actor right before the update on this minibatch, fp32; None unless the algorithm
            needs numbers of the whole minibatch at those weights (`Algorithm.needs_current`).
        current_entropy_R: Entropies, as `current_logprobs_R`.
        sample_index_B: Which of its prompt's samples it is, int64; with `group_id_B` the name of its random numbers.
        correct_B: True where the answer is right, bool.
        nll_weights_R: Weight of each token of the correct samples in their likelihood, set by `Algorithm.weigh`, fp32;
            None unless `algorithm.positive_example_nll_weight`.
        chosen_R: Tokens that the policy loss treats apart, set by `Algorithm.weigh`, bool; None where it has none.
        entropic_R: Tokens that the policy loss acts on, set by `Algorithm.weigh`, bool; None: on all that are trained.
        importance_mean_B: Mean of the importance weights, which divides them, the same for all sequences, fp32; None
            unless `rollout_correction.rollout_is_batch_normalize`.
        metric_weights_R: Weight of each token in metrics, 1 / (trained tokens of the global minibatch), 0 where not
            trained; set by `Algorithm.weigh`, fp32.
        truncated_B: True where the response was cut at its length limit, bool; needed by
            `algorithm.overlong.mask_truncated`.
        turn_R: With `algorithm.credit=turn`, which of all turns of the batch each response token belongs to, int64: a
            turn is what the policy sampled and what it observed after that.
        routed_experts_P: The experts that the engine, or the actor before its updates, chose for each token in the
            layers of this rank's pipeline stage, [P, layers, top_k], integers as in `Rollout`; -1 for a token that went
            nowhere (the last of a response). None unless they are replayed.
        support_R: What the engine kept at each response token, on ranks of the last pipeline stage, which score under
            it; None where nothing is dropped in training, and on other stages.
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
    support_R: Support | None = None

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.prompt_lens_B.numel()

    @property
    def valued_R(self) -> Tensor:
        """The tokens that the critic learns from, bool."""
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
    def credited_R(self) -> Tensor:
        """Which advantage each response token has, int64: that of its turn, else that of its sequence."""
        return self.sequence_R if self.turn_R is None else self.turn_R

    def select(self, rows: list[int]) -> RolloutBatch:
        """The given sequences, in the given order; every tensor is a copy."""
        chosen: dict[str, Any] = {}
        index_B = torch.tensor(rows, dtype=torch.int64)
        index = {"B": index_B, "P": ragged(self.seq_lens_B, index_B), "R": ragged(self.response_lens_B, index_B)}
        for item in fields(self):
            value: Any = getattr(self, item.name)
            if isinstance(value, Support):
                supports = value.split(self.response_lens_B.tolist())
                chosen[item.name] = Support.join([supports[row] for row in rows])
            elif value is not None:
                chosen[item.name] = value[index[item.name[-1]]]
        return replace(self, **chosen)


def ragged(lens_B: Tensor, index: Tensor) -> Tensor:
    """Places of the elements of these rows, row after row, where rows of `lens_B` elements lie one after the other."""
    starts_B = lens_B.cumsum(0) - lens_B
    return ranges(starts_B[index], starts_B[index] + lens_B[index])


def ranges(begin_N: Tensor, end_N: Tensor) -> Tensor:
    """The numbers from each begin up to its end, one range after the other."""
    lens_N = end_N - begin_N
    shift_N = begin_N - (lens_N.cumsum(0) - lens_N)
    return torch.arange(int(lens_N.sum())) + shift_N.repeat_interleave(lens_N)


TurnRewards = Mapping[tuple[int, int], Sequence[float]]
"""Of each turn of an episode, by (uid, sample index)."""


class SampleTable:
    """A few numbers for every sample of the job, ordered by (uid, sample index), the same on every rank.

    `table["reward"]` is a column, fp64 [N], NaN where a sample has no score. Columns are FACTS (`rank` is the one that
    holds the tokens; `correct`, `failed`, `truncated` and `cached` are 0 or 1; `token_crc` is the CRC-32 of the
    response ids; `sampled_len` of `response_len` tokens were sampled; `end` is a place in `EPISODE_ENDS`, -1 where
    there was no episode; `version`: policy version of the last token, `num_versions` sampled the response) and
    "reward/<function>" for each reward function, NaN where it gave none; with supports also KEPT: sums over the
    sample's tokens, and extremes. `turn_rewards` has the environment's by (uid, sample index), where turns are
    credited.
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
        """Different prompts among the samples."""
        return len(set(self["uid"].tolist()))

    @property
    def scored(self) -> SampleTable:
        """The samples that have a reward."""
        return self.keep(self["reward"].isfinite())

    def keep(self, mask_N: Tensor) -> SampleTable:
        """The rows where the mask is True; itself where it is True everywhere."""
        return self if mask_N.all() else SampleTable(self.columns, self.rows_NC[mask_N], self.turn_rewards)

    @staticmethod
    def join(tables: list[SampleTable]) -> SampleTable:
        """The rows of all tables, which have the same columns."""
        turn_rewards = {key: rewards for table in tables for key, rewards in table.turn_rewards.items()}
        return SampleTable(tables[0].columns, torch.cat([table.rows_NC for table in tables]), turn_rewards)
