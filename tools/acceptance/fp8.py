"""Check of `rollout.quantization=fp8`: the engine computes with the values that FP8 weights and scales represent."""

from __future__ import annotations

from acceptance import answers
from acceptance.fixture import Bench
from acceptance.result import CheckError, Facts

AS_MUCH = 2.0
"""Allowed factor: TensorRT-LLM also rounds activations to FP8, with as many bits as the weights, which changes
log-probabilities about as much as rounding the weights; a misplaced scale changes them far more.
"""


def fp8(bench: Bench) -> Facts:
    """Syncs weights in FP8 and compares log-probabilities with the actor's, with rounded and own weights."""
    _, facts = answers.come_back(bench)
    rollouts = answers.sampled(bench)
    engine, own = answers.engine_logprobs(rollouts), answers.actor_logprobs(bench, rollouts)
    with bench.rounded_weights():
        meant = answers.actor_logprobs(bench, rollouts)
    weights = float((own - meant).abs().mean())
    facts |= answers.difference(bench, (engine - meant).abs()) | {
        "mean difference that rounding the weights makes, nats": weights,
        "mean difference from the actor's own weights, nats": float((engine - own).abs().mean()),
        "mean weight that corrects a token": float((own - engine).exp().mean()),
    }
    mean = float((engine - meant).abs().mean())
    if not mean <= answers.MEAN_NATS + AS_MUCH * weights:
        raise CheckError(
            f"engine and actor differ by {mean:.3g} nats on average under the weights that FP8 stands for; rounding "
            f"the weights alone makes a difference of {weights:.3g}. Check that the engine finds the scales.",
            facts,
        )
    return facts
