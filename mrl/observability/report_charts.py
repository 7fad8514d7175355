"""Charts of the report: which metrics each chart shows, and its title and legends."""

from __future__ import annotations

from mrl.types import EPISODE_ENDS

ACCURACY = "val/accuracy"

Drawing = tuple[str, tuple[tuple[str, str], ...]]
"""Chart title, and (legend, metric) of each line."""

LEARNING: tuple[Drawing, ...] = (
    ("Reward", (("mean", "critic/score/mean"), ("shaped mean", "critic/rewards/mean"))),
    ("Held-out accuracy", (("accuracy", ACCURACY),)),
    ("Preference accuracy", (("accuracy", "rewards/accuracies"),)),
    ("Implicit rewards of pairs", (("chosen", "rewards/chosen"), ("rejected", "rewards/rejected"))),
    ("Response length, tokens", (("mean", "response_length/mean"), ("max", "response_length/max"))),
    (
        "Zero-variance groups and truncated responses, fraction",
        (("groups with equal rewards", "group/zero_variance_frac"), ("truncated", "response_length/clip_ratio")),
    ),
)
EPISODES: tuple[Drawing, ...] = (
    ("Policy turns per episode", (("mean", "num_turns/mean"), ("max", "num_turns/max"))),
    ("Tool calls per episode", (("mean", "tool_calls/mean"), ("max", "tool_calls/max"))),
    (
        "Sampled tokens and unparsed tool calls, fraction",
        (("sampled tokens", "episode/sampled_frac"), ("unparsed tool calls", "tool_calls/unread_frac")),
    ),
    (
        "End reasons of episodes, fraction",
        tuple((end.replace("_", " "), f"episode/{end}_frac") for end in EPISODE_ENDS),
    ),
)
POLICY: tuple[Drawing, ...] = (
    ("KL to the sampling policy (ppo_kl)", (("ppo_kl", "actor/ppo_kl"),)),
    ("KL to the reference", (("kl_loss", "actor/kl_loss"), ("in reward", "actor/reward_kl_penalty"))),
    ("Distillation loss per token, nats", (("mean absolute value", "distillation/abs_loss"),)),
    ("Entropy, nats", (("entropy", "actor/entropy"),)),
    ("Gradient norm", (("before clipping", "actor/grad_norm"),)),
    ("Clipped tokens, fraction", (("upper", "actor/pg_clipfrac"), ("lower (dual)", "actor/pg_clipfrac_lower"))),
    ("Loss", (("policy gradient", "actor/pg_loss"), ("total", "actor/loss"))),
    ("Critic loss", (("value loss", "critic/vf_loss"),)),
    ("Explained variance of the critic", (("explained", "critic/vf_explained_var"),)),
)
MISMATCH: tuple[Drawing, ...] = (
    (
        "|p engine - p actor|",
        (("max", "training/rollout_probs_diff_max"), ("mean", "training/rollout_probs_diff_mean")),
    ),
    ("Correlation of engine and actor probabilities", (("pearson", "training/rollout_actor_probs_pearson_corr"),)),
    ("KL(engine, actor), nats", (("k3 estimate", "rollout_corr/k3_kl"), ("mean log-ratio", "rollout_corr/kl"))),
)
_AGE = "training/off_policy/"
AGES: tuple[Drawing, ...] = (
    (
        "Staleness of the samples, steps",
        (
            ("oldest token, max", f"{_AGE}trajectory_staleness_worst/max"),
            ("oldest token, mean", f"{_AGE}trajectory_staleness_worst/mean"),
            ("newest token, mean", f"{_AGE}trajectory_staleness/mean"),
        ),
    ),
    (
        "Mean staleness of the oldest token by response length, steps",
        (
            ("longer half of the responses", f"{_AGE}long_response_staleness"),
            ("shorter half", f"{_AGE}short_response_staleness"),
        ),
    ),
    (
        "Policy versions per response",
        (("max", f"{_AGE}trajectory_spans/max"), ("mean", f"{_AGE}trajectory_spans/mean")),
    ),
    (
        "Groups",
        (
            ("carried over with samples", "rollout/num_carried_groups"),
            ("restarted because too stale", "rollout/num_restarted_groups"),
        ),
    ),
    (
        "Samples trained by the step that requested them, fraction by length",
        tuple(
            (name, f"rollout/accepted_at_once/quarter_{number}")
            for number, name in enumerate(("shortest quarter", "second", "third", "longest quarter"), 1)
        ),
    ),
    (
        "Mean length over the run, tokens",
        (
            ("started samples", "rollout/begun_mean_length"),
            ("trained samples", "rollout/accepted_mean_length"),
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
