"""The check of `rollout.quantization=fp8`: does the engine multiply with what values and scales stand for?"""

from __future__ import annotations

from acceptance import answers
from acceptance.fixture import Bench
from acceptance.result import CheckError, Facts

AS_MUCH = 2.0
"""TensorRT-LLM rounds activations to FP8 as well, to as many bits as the weights: that moves about as much as rounding
the weights does, and a scale in the wrong place moves far more."""


def fp8(bench: Bench) -> Facts:
    """(x) Refits in FP8, and samples scored by the actor under what FP8 stands for, and under its own weights."""
    _, facts = answers.come_back(bench)
    rollouts = answers.sampled(bench)
    engine, own = answers.told(rollouts), answers.scores(bench, rollouts)
    with bench.rounded_weights():
        meant = answers.scores(bench, rollouts)
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
            f"the weights themselves moves {weights:.3g}. Are the scales where the engine looks for them?",
            facts,
        )
    return facts
