"""Profiles a rollout of the native engine on a CPU: time in matrix products, other kernels, and the host.

    python tools/profile_rollout.py                          # the small model, fp32 and bf16
    python tools/profile_rollout.py --model large --dtype bfloat16

The work is that of `tools/bench_rollout.py`, on one thread, measured in CPU time, so that other load does not count.
Prints one JSON line per dtype:

    processor_s     CPU time of one call: 32 prompts (8 of the large model) and 64 new tokens for each
    times_floor     CPU time over that of the products alone at matmul_gflop_per_s
    shares          its parts: products by matrix, `head` the output matrix, `mlp` gate_up, gate and down in one call;
                    norm, rotate, gate, attend (of decoding) and sample as in `mrl/engines/native/torch_ops.py`; host,
                    the rest: Python, attention of prompts, stops
    products_frac   share of all products
    product_gflop_per_s  rate in the products, and matmul_gflop_per_s, that of a product of two squares in this run
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.measure import PartTimes, commit, device_name, matrix_rate
from bench_rollout import BATCH, DTYPES, MODELS, NEW_TOKENS, PROMPT_LEN, Work, engine_runner, write_random

from mrl.engines.native.cpu_ops import Compiled
from mrl.engines.native.packed_linear import Linear
from mrl.engines.native.torch_ops import Operations
from mrl.models.hf_config import arch_from_config
from mrl.models.kernels.bindings import Library

BETWEEN = ("norm", "gate", "sample")
INSIDE = {"rotation": "rotate", "decode_attention": "attend"}
"""Methods that return the function to time."""
CPU = torch.device("cpu")


class Clock(PartTimes):
    """Timer of the engine's products and operations; counts the products' FLOP."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def attach(self, names: dict[tuple[int, ...], str]) -> None:
        """Wraps every product and operation of this process; products are named by the shape of their weight."""
        product = Linear.__call__

        def multiply(linear: Linear, x_PI: torch.Tensor) -> torch.Tensor:
            weight, _ = linear._stored
            self.flops += 2.0 * weight.numel() * x_PI.size(0)
            found: torch.Tensor = self.timed(names[tuple(weight.shape)], product)(linear, x_PI)
            return found

        mlp = Library.mlp

        def multiply_both(library: Library, x_PH: torch.Tensor, *given: Any) -> torch.Tensor:
            self.flops += 2.0 * 3 * given[-1] * x_PH.numel()
            found: torch.Tensor = self.timed("mlp", mlp)(library, x_PH, *given)
            return found

        Linear.__call__ = multiply  # type: ignore[method-assign,assignment]
        Library.mlp = multiply_both  # type: ignore[method-assign,assignment]
        for kind in (Operations, Compiled):
            for name in BETWEEN:
                setattr(kind, name, self.timed(name, getattr(kind, name)))
            for name, part in INSIDE.items():
                setattr(kind, name, self._inside(part, getattr(kind, name)))

    def _inside(self, part: str, method: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        return lambda *given: self.timed(part, method(*given))


def main() -> None:
    """Parses the command line and prints a JSON line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*", help="default: depends on the model")
    parser.add_argument("--eager", action="store_true", help="PyTorch's operators between products")
    args = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    arch = arch_from_config(MODELS[args.model])
    heads = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    inner = MODELS[args.model]["intermediate_size"]
    clock.attach(
        {
            (arch.hidden_size, arch.num_heads * arch.head_dim): "o",
            (heads, arch.hidden_size): "qkv",
            (2 * inner, arch.hidden_size): "gate_up",
            (arch.hidden_size, inner): "down",
            (arch.vocab_size, arch.hidden_size): "head",
        }
    )
    for dtype in args.dtype or DTYPES[args.model]:
        with tempfile.TemporaryDirectory() as name:
            write_random(Path(name), arch, dtype)
            print(json.dumps(profile(args.model, dtype, Path(name), clock, eager=args.eager)), flush=True)


def profile(model: str, dtype: str, folder: Path, clock: Clock, *, eager: bool) -> dict[str, Any]:
    """Profiles one call after a warm-up call."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, MODELS[model]["vocab_size"], (BATCH[model], PROMPT_LEN), generator=generator).tolist()
    work = Work(folder, getattr(torch, dtype), tuple(map(tuple, prompts)), CPU)
    with engine_runner(work, "native", eager=eager) as run:
        run()
        clock.seconds.clear()
        clock.flops = 0.0
        began = time.thread_time()
        run()
        total_s = time.thread_time() - began
    parts = dict(clock.seconds)
    products = sum(seconds for name, seconds in parts.items() if name not in (*BETWEEN, *INSIDE.values()))
    parts["host"] = total_s - sum(parts.values())
    rate = matrix_rate(getattr(torch, dtype), CPU, time.thread_time)
    return {
        "profile": "rollout",
        "model": model,
        "dtype": dtype,
        "batch": BATCH[model],
        "new_tokens": NEW_TOKENS,
        "processor_s": round(total_s, 3),
        "times_floor": round(total_s * rate / clock.flops, 2),
        "shares": {name: round(seconds / total_s, 3) for name, seconds in sorted(parts.items(), key=lambda x: -x[1])},
        "products_frac": round(products / total_s, 3),
        "product_gflop_per_s": round(clock.flops / products / 1e9, 1),
        "matmul_gflop_per_s": round(rate / 1e9, 1),
        "operations": "PyTorch's" if eager else "compiled",
        "device": device_name(),
        "num_threads": 1,
        "torch": torch.__version__,
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
