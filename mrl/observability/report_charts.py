"""Which metrics the report draws together, and what it calls them.

Owns these tables; `report.py` draws them.
"""

from __future__ import annotations

from mrl.types import EPISODE_ENDS

ACCURACY = "val/accuracy"

Drawing = tuple[str, tuple[tuple[str, str], ...]]
"""Title, and (legend, metric) of each line."""

LEARNING: tuple[Drawing, ...] = (
    ("Reward", (("mean", "critic/score/mean"), ("shaped mean", "critic/rewards/mean"))),
    ("Held-out accuracy", (("accuracy", ACCURACY),)),
    ("Pairs whose better response is preferred, fraction", (("accuracy", "rewards/accuracies"),)),
    ("Implicit rewards of pairs", (("better", "rewards/chosen"), ("worse", "rewards/rejected"))),
    ("Response length, tokens", (("mean", "response_length/mean"), ("max", "response_length/max"))),
    (
        "Groups and cut responses, fraction",
        (("groups with equal rewards", "group/zero_variance_frac"), ("responses cut", "response_length/clip_ratio")),
    ),
)
EPISODES: tuple[Drawing, ...] = (
    ("Turns of the policy", (("mean", "num_turns/mean"), ("max", "num_turns/max"))),
    ("Tool calls of an episode", (("mean", "tool_calls/mean"), ("max", "tool_calls/max"))),
    (
        "Fractions",
        (("sampled, of response tokens", "episode/sampled_frac"), ("unread, of tool calls", "tool_calls/unread_frac")),
    ),
    ("Why episodes ended, fraction", tuple((end.replace("_", " "), f"episode/{end}_frac") for end in EPISODE_ENDS)),
)
POLICY: tuple[Drawing, ...] = (
    ("KL to the policy that sampled (ppo_kl)", (("ppo_kl", "actor/ppo_kl"),)),
    ("KL to the reference", (("kl_loss", "actor/kl_loss"), ("in reward", "actor/reward_kl_penalty"))),
    ("Distance to the teachers, nats", (("mean of a token", "distillation/abs_loss"),)),
    ("Entropy, nats", (("entropy", "actor/entropy"),)),
    ("Gradient norm", (("before clipping", "actor/grad_norm"),)),
    ("Clipped tokens, fraction", (("upper", "actor/pg_clipfrac"), ("lower (dual)", "actor/pg_clipfrac_lower"))),
    ("Loss", (("policy gradient", "actor/pg_loss"), ("total", "actor/loss"))),
    ("Loss of the critic", (("value loss", "critic/vf_loss"),)),
    ("Variance of the returns that the critic explains, fraction", (("explained", "critic/vf_explained_var"),)),
)
MISMATCH: tuple[Drawing, ...] = (
    (
        "|p engine - p actor|",
        (("max", "training/rollout_probs_diff_max"), ("mean", "training/rollout_probs_diff_mean")),
    ),
    ("Correlation of the two", (("pearson", "training/rollout_actor_probs_pearson_corr"),)),
    ("KL of the actor to what sampled, nats", (("k3", "rollout_corr/k3_kl"), ("mean difference", "rollout_corr/kl"))),
)
_AGE = "training/off_policy/"
AGES: tuple[Drawing, ...] = (
    (
        "Age of the samples, steps",
        (
            ("oldest token, max", f"{_AGE}trajectory_staleness_worst/max"),
            ("oldest token, mean", f"{_AGE}trajectory_staleness_worst/mean"),
            ("newest token, mean", f"{_AGE}trajectory_staleness/mean"),
        ),
    ),
    (
        "Oldest token by length, mean age, steps",
        (
            ("longer half of the responses", f"{_AGE}long_response_staleness"),
            ("shorter half", f"{_AGE}short_response_staleness"),
        ),
    ),
    (
        "Versions that sampled a response",
        (("max", f"{_AGE}trajectory_spans/max"), ("mean", f"{_AGE}trajectory_spans/mean")),
    ),
    (
        "Groups",
        (
            ("in flight with samples", "rollout/num_carried_groups"),
            ("begun again, too old", "rollout/num_restarted_groups"),
        ),
    ),
    (
        "Taken by the step for which they began, fraction of the samples by length",
        tuple(
            (name, f"rollout/accepted_at_once/quarter_{number}")
            for number, name in enumerate(("shortest quarter", "second", "third", "longest quarter"), 1)
        ),
    ),
    (
        "Mean length over the run, tokens",
        (
            ("of what was begun", "rollout/begun_mean_length"),
            ("of what was taken", "rollout/accepted_mean_length"),
        ),
    ),
)
SPEED: tuple[Drawing, ...] = (
    ("Tokens per second and rank", (("throughput", "perf/throughput"),)),
    ("Response tokens per second, generation", (("tokens/s", "perf/gen_tokens_per_s"),)),
    ("Model FLOPs utilisation", (("update", "perf/mfu/actor"),)),
    (
        "Memory, GiB",
        (("host", "perf/cpu_memory_used_gb"), ("device, peak", "perf/max_memory_allocated_gb")),
    ),
)
