"""Check of `rollout.quantization=fp8`: the engine must compute with the weights that values and scales represent."""

from __future__ import annotations

from acceptance import comparisons
from acceptance.fixture import Bench
from acceptance.result import CheckError, Facts

AS_MUCH = 2.0
"""Allowed difference, in multiples of the effect of rounding the weights. TensorRT-LLM also rounds activations to FP8,
which has about the same effect; a misplaced scale has a far larger one.
"""


def fp8(bench: Bench) -> Facts:
    """Syncs weights in FP8, and scores samples by the actor with the dequantised weights and with its own."""
    _, facts = comparisons.check_weight_syncs(bench)
    rollouts = comparisons.sample(bench)
    engine, own = comparisons.engine_logprobs(rollouts), comparisons.actor_logprobs(bench, rollouts)
    with bench.rounded_weights():
        meant = comparisons.actor_logprobs(bench, rollouts)
    weights = float((own - meant).abs().mean())
    facts |= comparisons.difference_facts(bench, (engine - meant).abs()) | {
        "mean difference that rounding the weights makes, nats": weights,
        "mean difference from the actor's own weights, nats": float((engine - own).abs().mean()),
        "mean weight that corrects a token": float((own - engine).exp().mean()),
    }
    mean = float((engine - meant).abs().mean())
    if not mean <= comparisons.MEAN_NATS + AS_MUCH * weights:
        raise CheckError(
            f"engine and actor differ by {mean:.3g} nats on average under the dequantised FP8 weights; rounding the "
            f"weights alone makes a difference of {weights:.3g}. Are the scales in the right place?",
            facts,
        )
    return facts
