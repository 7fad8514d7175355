"""Advantages from rewards: group baselines, batch normalisation, reward-to-go, overlong penalty, informative groups.

Everything is computed in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

StdKind = Literal["unbiased", "population", "none"]
SingletonPolicy = Literal["error", "zero", "reward"]
Baseline = Literal["mean", "leave_one_out"]

ROUNDING = 1e-12
"""Upper bound of the relative error of an fp64 mean over a batch."""


def group_relative(
    rewards_N: Tensor,
    group_id_N: Tensor,
    *,
    baseline: Baseline = "mean",
    std: StdKind,
    eps: float = 0.0,
    over: Literal["group", "batch"] = "group",
    singleton: SingletonPolicy,
) -> Tensor:
    """Returns each sample's advantage over the other samples of its prompt, fp64 [N].

    mean: (R_i - mean(R)) / (sigma + eps); leave_one_out: (R_i - mean of the others) / (sigma + eps), which is n / (n -
    1) times the former. A group whose rewards are all equal gets exactly 0.

    Args:
        rewards_N: One reward per sample.
        group_id_N: Group of each sample, in any order.
        baseline: Value that is subtracted: the group's mean, or the mean of its other samples.
        std: Divisor sigma: the sample deviation (n - 1), the population deviation (n), or none (no division at all).
        eps: Number added to sigma.
        over: Samples over which sigma is computed: the group or the batch.
        singleton: Advantage of a group with one sample: raise an error, 0, or its raw reward.

    Raises:
        ValueError: A group has one sample and `singleton` is "error".

    Source: GRPO, arXiv 2402.03300, section 4.1.2; without sigma: Dr.GRPO, arXiv 2503.20783; leave-one-out: RLOO, arXiv
    2402.14740, eq. 8; sigma of the batch: arXiv 2508.08221, and TRL's `scale_rewards=batch`.
    """
    rewards_N = rewards_N.double()
    ids_G, group_N = torch.unique(group_id_N, return_inverse=True)
    zeros_G = rewards_N.new_zeros(ids_G.numel())
    size_G = zeros_G.index_add(0, group_N, torch.ones_like(rewards_N))
    alone_N = size_G[group_N] == 1
    if singleton == "error" and bool(alone_N.any()):
        first = int(group_id_N[alone_N][0])
        raise ValueError(
            f"group {first} has one sample, so it has no baseline. Sample at least 2 per prompt (rollout.n), or set "
            "algorithm.singleton_group to 'zero' or 'reward'."
        )
    mean_G = zeros_G.index_add(0, group_N, rewards_N) / size_G
    centred_N = rewards_N - mean_G[group_N]
    centred_N = torch.where(_all_equal_N(rewards_N, group_N, ids_G.numel()), 0.0, centred_N)
    advantages_N = centred_N
    if baseline == "leave_one_out":
        advantages_N = advantages_N * (size_G / (size_G - 1).clamp(min=1))[group_N]
    if std != "none":
        if over == "batch":
            sigma_N = _deviation(rewards_N, std).expand_as(rewards_N)
        else:
            sigma_N = _group_deviation_N(centred_N, group_N, std)
        # Equal rewards give 0 / (0 + eps), where eps may be 0.
        advantages_N = torch.where(centred_N == 0, 0.0, advantages_N / (sigma_N + eps))
    if singleton == "reward":
        advantages_N = torch.where(alone_N, rewards_N, advantages_N)
    return advantages_N


def length_weighted(rewards_N: Tensor, lens_N: Tensor, group_id_N: Tensor, *, singleton: SingletonPolicy) -> Tensor:
    """Returns OPO's advantages, fp64 [N]: R_i - sum(l R) / sum(l) in each group, with l the lengths of the responses.

    Where the squared gradient of a response's log-probability is proportional to its length, this baseline gives the
    policy gradient the least variance. A group whose rewards are all equal gets exactly 0.

    Args:
        rewards_N: One reward per sample.
        lens_N: Sampled tokens of each response.
        group_id_N: Group of each sample, in any order.
        singleton: Advantage of a group with one sample, see `group_relative`.

    Source: arXiv 2505.23585, theorem 3.1.
    """
    centred_N = group_relative(rewards_N, group_id_N, std="none", singleton=singleton)
    ids_G, group_N = torch.unique(group_id_N, return_inverse=True)
    zeros_G = centred_N.new_zeros(ids_G.numel())
    lens_N = lens_N.double()
    size_G = zeros_G.index_add(0, group_N, torch.ones_like(lens_N))
    # The weighted mean of the centred rewards is the distance of both baselines.
    sums_G, total_G = (zeros_G.index_add(0, group_N, each_N) for each_N in (lens_N * centred_N, lens_N))
    shift_N = (sums_G / total_G.clamp(min=1))[group_N]
    return torch.where((size_G == 1)[group_N], centred_N, centred_N - shift_N)


def best_of_group(
    rewards_N: Tensor, group_id_N: Tensor, *, std: StdKind, eps: float = 0.0, singleton: SingletonPolicy
) -> Tensor:
    """Returns Pass@k's advantages, fp64 [N]: (R_1 - R_2) / (sigma + eps) for the best sample of a group, 0 for others.

    R_1 and R_2 are the two highest rewards of the group, so that a group with several best samples gets 0.

    Args:
        rewards_N: One reward per sample.
        group_id_N: Group of each sample, in any order.
        std: Kind of the group's deviation sigma; "none": no division.
        eps: Number added to sigma.
        singleton: Advantage of a group with one sample, see `group_relative`.

    Source: arXiv 2503.19595, section 3.
    """
    centred_N = group_relative(rewards_N, group_id_N, std="none", singleton=singleton)
    rewards_N = rewards_N.double()
    ids_G, group_N = torch.unique(group_id_N, return_inverse=True)
    none_G = rewards_N.new_full((ids_G.numel(),), -torch.inf)
    best_N = rewards_N == none_G.scatter_reduce(0, group_N, rewards_N, "amax")[group_N]
    second_N = none_G.scatter_reduce(0, group_N, torch.where(best_N, -torch.inf, rewards_N), "amax")[group_N]
    size_N, num_best_N = (
        torch.zeros_like(none_G).index_add(0, group_N, each_N.double())[group_N]
        for each_N in (torch.ones_like(best_N), best_N)
    )
    distance_N = rewards_N - second_N
    if std != "none":
        distance_N = distance_N / (_group_deviation_N(centred_N, group_N, std) + eps)
    distance_N = torch.where(best_N & (num_best_N == 1), distance_N, 0.0)
    return torch.where(size_N == 1, centred_N, distance_N)


def mean_relative(rewards_N: Tensor, group_id_N: Tensor, *, singleton: SingletonPolicy) -> Tensor:
    """Returns MaxRL's advantages, fp64 [N]: (R - mean(R)) / mean(R) in each group, 0 where the mean is at most 0.

    With rewards of 0 and 1 the expected gradient is that of the log-likelihood of success instead of its probability:
    prompts that are seldom solved weigh more.

    Args:
        rewards_N: One reward per sample, at least 0.
        group_id_N: Group of each sample, in any order.
        singleton: Advantage of a group with one sample, see `group_relative`.

    Source: arXiv 2602.02710.
    """
    rewards_N = rewards_N.double()
    centred_N = group_relative(rewards_N, group_id_N, std="none", singleton=singleton)
    ids_G, group_N = torch.unique(group_id_N, return_inverse=True)
    zeros_G = rewards_N.new_zeros(ids_G.numel())
    sums_G, size_G = (zeros_G.index_add(0, group_N, each_N) for each_N in (rewards_N, torch.ones_like(rewards_N)))
    mean_N = (sums_G / size_G)[group_N]
    alone_N = (size_G == 1)[group_N]
    divided_N = torch.where(mean_N > 0, centred_N / torch.where(mean_N > 0, mean_N, 1.0), 0.0)
    return torch.where(alone_N, centred_N, divided_N)


def decoupled(
    parts_NF: Tensor,
    weights_F: Tensor,
    group_id_N: Tensor,
    *,
    std: StdKind,
    eps: float = 0.0,
    singleton: SingletonPolicy,
) -> Tensor:
    """Returns GDPO's advantages, fp64 [N]: each reward normalised in its group, then their sum over the batch.

    S = sum over f of w_f (R_f - mean of the group) / (sigma of the group + eps); (S - mean(S)) / (sigma(S) + eps), both
    over all samples. Rewards of different scales thus count by their weights.

    Args:
        parts_NF: Rewards; where a function returned none (NaN), the sample is left out of its statistics and gets 0.
        weights_F: Weight of each reward function.
        group_id_N: Group of each sample, in any order.
        std: Kind of sigma; "none": no division.
        eps: Number added to sigma.
        singleton: Advantage of a group with one sample, see `group_relative`; 0 for a reward that only one sample of a
            group has.

    Source: arXiv 2601.05242; TRL's `multi_objective_aggregation=normalize_then_sum`. verl (`gdpo`) takes the mean and
    sigma of S over tokens, so that long samples count more.
    """
    sums_N = torch.zeros(parts_NF.size(0), dtype=torch.float64)
    for part_N, weight in zip(parts_NF.double().unbind(1), weights_F.tolist(), strict=True):
        given_N = ~part_N.isnan()
        all_given = bool(given_N.all())
        policy: SingletonPolicy = singleton if all_given else "zero"
        normalised = group_relative(part_N[given_N], group_id_N[given_N], std=std, eps=eps, singleton=policy)
        sums_N[given_N] += weight * normalised
    centred_N = sums_N - sums_N.mean()
    equal = bool((sums_N == sums_N[:1]).all())
    if std == "none" or equal:
        return torch.zeros_like(sums_N) if equal else centred_N
    return centred_N / (_deviation(sums_N, std) + eps)


def _group_deviation_N(centred_N: Tensor, group_N: Tensor, std: StdKind) -> Tensor:
    """Returns the standard deviation of each sample's group, fp64 [N], from values whose mean in each group is 0."""
    zeros_G = centred_N.new_zeros(int(group_N.max()) + 1)
    size_G = zeros_G.index_add(0, group_N, torch.ones_like(centred_N))
    dof_G = size_G if std == "population" else (size_G - 1).clamp(min=1)
    return (zeros_G.index_add(0, group_N, centred_N.square()) / dof_G).sqrt()[group_N]


def _deviation(values_N: Tensor, std: StdKind) -> Tensor:
    """Returns the standard deviation of all values, fp64 scalar; 0 for a single value."""
    dof = values_N.numel() if std == "population" else max(values_N.numel() - 1, 1)
    return ((values_N - values_N.mean()).square().sum() / dof).sqrt()


def informative_groups(rewards_N: Tensor, group_id_N: Tensor) -> Tensor:
    """Returns which samples belong to a group whose rewards are not all equal, bool [N]; others have no gradient.

    Source: dynamic sampling, DAPO (arXiv 2503.14476), section 3.2.
    """
    ids_G, group_N = torch.unique(group_id_N, return_inverse=True)
    return ~_all_equal_N(rewards_N.double(), group_N, ids_G.numel())


def _all_equal_N(rewards_N: Tensor, group_N: Tensor, num_groups: int) -> Tensor:
    """Returns True where all rewards of the sample's group are equal, bool [N]."""
    empty_G = rewards_N.new_zeros(num_groups)
    high_G = empty_G.scatter_reduce(0, group_N, rewards_N, "amax", include_self=False)
    low_G = empty_G.scatter_reduce(0, group_N, rewards_N, "amin", include_self=False)
    return (high_G == low_G)[group_N]


def overlong_penalty(response_lens_N: Tensor, *, max_length: int, buffer_length: int, penalty: float) -> Tensor:
    """Returns the reward penalty of long responses, fp64 [N]: from 0 to -penalty, linear over the last tokens.

    Args:
        response_lens_N: Length of each response, tokens.
        max_length: Length at which the full penalty applies, tokens.
        buffer_length: Tokens before `max_length` over which the penalty grows; 0: no penalty.
        penalty: Full penalty, above 0.

    Source: soft overlong punishment, DAPO (arXiv 2503.14476), eq. 13.
    """
    lens_N = response_lens_N.double()
    if buffer_length == 0:
        return torch.zeros_like(lens_N)
    return -penalty * ((lens_N - (max_length - buffer_length)) / buffer_length).clamp(0.0, 1.0)


def reward_to_go(rewards_R: Tensor, response_lens_B: Tensor) -> Tensor:
    """Returns the undiscounted sum of each token's reward and all later ones of its response, fp64 [R]."""
    rewards_R = rewards_R.double()
    if rewards_R.numel() == 0:
        return rewards_R
    parts = torch.split(rewards_R, response_lens_B.tolist())
    return torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts])


def whiten(
    values_R: Tensor,
    mask_R: Tensor,
    reduce: Callable[[Tensor], Tensor],
    *,
    std: StdKind,
    eps: float = 0.0,
    under_root: bool = False,
) -> Tensor:
    """Collective over data-parallel: returns (x - mean) / (sigma + eps) over all ranks' trained tokens, fp64 [R].

    Args:
        values_R: Values to normalise.
        mask_R: True where the token counts; the result is 0 elsewhere.
        reduce: Elementwise sum over the data-parallel ranks; called twice.
        std: Kind of sigma; "none": only the mean is subtracted.
        eps: Number added to sigma.
        under_root: True if `eps` is added to the variance instead: sqrt(sigma^2 + eps), as in verl's `masked_whiten`.

    Source: REINFORCE++, arXiv 2501.03262, section 3.
    """
    mask_R = mask_R.double()
    values_R = values_R.double()
    total, count = reduce(torch.stack([(values_R * mask_R).sum(), mask_R.sum()])).unbind()
    mean = total / count.clamp(min=1)
    centred_R = (values_R - mean) * mask_R
    # Equal values may differ from their mean by rounding; a small sigma + eps would scale that up.
    centred_R = torch.where(centred_R.abs() <= ROUNDING * mean.abs(), 0.0, centred_R)
    square_sum = reduce(centred_R.square().sum().reshape(1))[0]
    if std == "none":
        return centred_R
    dof = count if std == "population" else count - 1
    variance = square_sum / dof.clamp(min=1)
    sigma = (variance + eps).sqrt() if under_root else variance.sqrt() + eps
    return torch.where(centred_R == 0, 0.0, centred_R / sigma)
