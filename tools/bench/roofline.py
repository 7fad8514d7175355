"""Lower bound of a GRPO step's time on a device: its matrix products at the rate of a square GEMM.

Counts the products of a step of mrl and of TRL. `tools/bench_step.py` and `tools/profile_step.py` measure the step
itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and a batch.

    Attributes:
        num_layers: Layers of the model, a qwen2 with two KV heads and untied embeddings.
        hidden: Hidden size; the MLP is 2.75 times as wide.
        heads: Attention heads.
        vocabulary: Vocabulary size.
        prompts: Prompts per iteration.
        samples: Responses per prompt.
        prompt_len: Length of every prompt, tokens.
        response_len: Length of every response, tokens.
    """

    num_layers: int
    hidden: int
    heads: int
    vocabulary: int
    prompts: int
    samples: int
    prompt_len: int
    response_len: int


def now() -> float:
    """Returns seconds of the wall clock, or of CPU time if only one thread computes."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def products(shape: Shape) -> dict[str, float]:
    """Returns the FLOP of a step's matrix products in mrl and in TRL, including attention.

    A product has two FLOP per weight and token, and twice as many again in the backward pass. mrl computes a prompt
    once for all its samples, in rollouts and in updates; TRL once per sample. The last token is not fed, except in
    TRL's updates.
    """
    hidden, prompts, samples = shape.hidden, shape.prompts, shape.prompts * shape.samples
    prompt_len, response_len = shape.prompt_len, shape.response_len
    keys = 2 * 2 * hidden // shape.heads
    layer = hidden * (2 * hidden + keys) + 3 * hidden * (hidden * 11 // 4)
    head = hidden * shape.vocabulary

    def forward(tokens: int, pairs: int, scored: int) -> float:
        """Returns the FLOP of `tokens` inputs, query-key `pairs`, and `scored` output distributions."""
        return float(shape.num_layers * (2 * layer * tokens + 4 * hidden * pairs) + 2 * head * scored)

    def pairs(first: int, last: int) -> int:
        """Returns the causal query-key pairs of queries at positions [first, last)."""
        return (last * (last + 1) - first * (first + 1)) // 2

    fed = prompt_len + response_len - 1
    shared = forward(
        prompts * prompt_len + samples * (response_len - 1),
        prompts * pairs(0, prompt_len) + samples * pairs(prompt_len, fed),
        samples * response_len,
    )
    sampled = forward(samples * fed, samples * pairs(0, fed), samples * response_len)
    trained = forward(samples * (fed + 1), samples * pairs(0, fed + 1), samples * (response_len + 1))
    return {"mrl": 4 * shared, "trl": sampled + 3 * trained}


def limits(shape: Shape, medians_s: Mapping[str, float], rate: float) -> dict[str, Any]:
    """Returns each program's time relative to its lower bound, and TRL's time relative to mrl's bound.

    Args:
        shape: Model and batch.
        medians_s: Median time of a step of "mrl", and optionally of "trl", seconds.
        rate: GEMM rate, FLOP per second.
    """
    floors = {name: flop / rate for name, flop in products(shape).items()}
    at_most = {"ratio_at_most": round(medians_s["trl"] / floors["mrl"], 2)} if "trl" in medians_s else {}
    return {
        "times_floor": {name: round(taken / floors[name], 2) for name, taken in medians_s.items()},
        **at_most,
        "floor_s": {name: round(floor_s, 4) for name, floor_s in floors.items()},
        "matmul_gflop_per_s": round(rate / 1e9, 1),
    }
