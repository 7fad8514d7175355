"""The least that a step of GRPO takes on a device: its matrix products at the rate of a square product.

Owns how many there are in a step of mrl and of TRL, and the clock of a benchmark that may run beside other work. The
step itself is measured by `tools/bench_step.py` and `tools/profile_step.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """A model and a batch.

    Attributes:
        num_layers: Of the model; it is a qwen2 with two KV heads and an output weight of its own.
        hidden: Hidden size; the MLP is 2.75 times as wide.
        heads: Attention heads.
        vocabulary: Tokens.
        prompts: Prompts per iteration.
        samples: Responses to each.
        prompt_len: Tokens of every prompt.
        response_len: Tokens of every response.
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
    """Seconds: of the clock, or of the processor where one thread computes."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def products(shape: Shape) -> dict[str, float]:
    """FLOP of the matrix products, attention's included, of a step of each, as each of them works.

    A product has two FLOP for each pair of a number of a weight and a row, and twice as many again in the backward. mrl
    computes a prompt once for all its samples, in rollouts and in updates, and TRL for each of them. No last token is
    fed, but in TRL's updates.
    """
    hidden, prompts, samples = shape.hidden, shape.prompts, shape.prompts * shape.samples
    prompt_len, response_len = shape.prompt_len, shape.response_len
    keys = 2 * 2 * hidden // shape.heads
    layer = hidden * (2 * hidden + keys) + 3 * hidden * (hidden * 11 // 4)
    head = hidden * shape.vocabulary

    def forward(tokens: int, pairs: int, scored: int) -> float:
        """Of tokens, of pairs of a query and a key, and of tokens whose distribution is wanted."""
        return float(shape.num_layers * (2 * layer * tokens + 4 * hidden * pairs) + 2 * head * scored)

    def pairs(first: int, last: int) -> int:
        """Of the queries at these positions, the last one not included, and the keys up to their own."""
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
    """How far from its own products each is, and TRL from mrl's.

    Args:
        shape: Model and batch.
        medians_s: Time of a step of each, or of mrl alone.
        rate: FLOP per second.
    """
    floors = {name: flop / rate for name, flop in products(shape).items()}
    at_most = {"ratio_at_most": round(medians_s["trl"] / floors["mrl"], 2)} if "trl" in medians_s else {}
    return {
        "times_floor": {name: round(taken / floors[name], 2) for name, taken in medians_s.items()},
        **at_most,
        "floor_s": {name: round(floor_s, 4) for name, floor_s in floors.items()},
        "matmul_gflop_per_s": round(rate / 1e9, 1),
    }
