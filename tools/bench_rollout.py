"""Speed of the native engine against transformers' `generate`: same weights, prompts and lengths, in one run.

    python tools/bench_rollout.py                     # both models, all dtypes
    python tools/bench_rollout.py --model small --dtype bfloat16 --repeats 7

Both sample from the whole softmax (temperature 1, no truncation, no end token) for 64 new tokens. The two alternate,
and medians are compared. One JSON line for each model and dtype:

    ratio           transformers' median time over the engine's
    floor_s         what no loop over forwards beats here: for each forward the larger of (stored weight bytes / memory
                    bandwidth) and (FLOPs / matrix rate), both rates measured in the same run
    times_floor     the engine's median time over the floor
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from mrl.config import RolloutConfig
from mrl.engines.base import EngineSpec, SamplingConfig, WeightSlice
from mrl.engines.native.engine import NativeEngine
from mrl.models.base import ArchSpec
from mrl.models.hf_config import arch_from_config, family_of
from mrl.observe.benchmark import commit, device_name, spread
from mrl.types import Prompt
from mrl.weights.hf import hf_layout
from mrl.weights.init import random_init
from mrl.weights.regions import slices

NEW_TOKENS = 64
PROMPT_LEN = 32

MODELS: dict[str, dict[str, Any]] = {
    "small": {
        "model_type": "qwen2",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "large": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
BATCH = {"small": 32, "large": 8}
DTYPES = {"small": ("float32", "bfloat16"), "large": ("bfloat16",)}


def main() -> None:
    """Parses the command line, runs each case and prints its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), nargs="*", default=["small", "large"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*", help="default: those of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    transformers.logging.set_verbosity_error()
    for model in args.model:
        for dtype in args.dtype or DTYPES[model]:
            print(json.dumps(run_case(model, dtype, args.repeats)), flush=True)


def run_case(model: str, dtype_name: str, repeats: int) -> dict[str, Any]:
    """One comparison."""
    dtype = getattr(torch, dtype_name)
    arch = arch_from_config(MODELS[model])
    batch = BATCH[model]
    weights = {name: torch.zeros(s.shape, dtype=dtype) for name, s in hf_layout(arch, dtype_name).items()}
    random_init(arch, hf_layout(arch, dtype_name), weights, seed=0)
    generator = torch.Generator().manual_seed(0)
    prompts_BT = torch.randint(0, arch.vocab_size, (batch, PROMPT_LEN), generator=generator)
    native = native_runner(arch, weights, dtype, prompts_BT)
    peer = transformers_runner(arch, weights, dtype, prompts_BT)
    native(), peer()  # warm-up
    times: dict[str, list[float]] = {"native": [], "transformers": []}
    for _ in range(repeats):
        for name, runner in (("native", native), ("transformers", peer)):
            began = time.perf_counter()
            runner()
            times[name].append(time.perf_counter() - began)
    ours, theirs = statistics.median(times["native"]), statistics.median(times["transformers"])
    limits = floor(arch, dtype, batch)
    return {
        "bench": "rollout",
        "model": f"{arch.num_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size}",
        "dtype": dtype_name,
        "batch": batch,
        "prompt_len": PROMPT_LEN,
        "new_tokens": NEW_TOKENS,
        "peer": "transformers generate, default attention and cache",
        "ratio": round(theirs / ours, 2),
        "native_s": spread(times["native"]),
        "transformers_s": spread(times["transformers"]),
        "tokens_per_s": round(batch * NEW_TOKENS / ours),
        **limits,
        "times_floor": round(ours / limits["floor_s"], 2),
        "device": device_name(),
        "num_threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
    }


def native_runner(
    arch: ArchSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype, prompts_BT: torch.Tensor
) -> Callable[[], None]:
    """The engine, refitted with the weights."""
    config = RolloutConfig(prompt_length=PROMPT_LEN, response_length=NEW_TOKENS, gpu_memory_utilization=0.2)
    engine = NativeEngine(
        EngineSpec(
            config=config,
            arch=arch,
            tp_group=None,
            device=torch.device("cpu"),
            dtype=dtype,
            decode=str,
            model_folder=Path,
            timeout_s=60.0,
            trains_on_logprobs=False,
        )
    )
    engine.begin_update()
    for name, stored in engine.layout().items():
        pieces = [WeightSlice(name, piece.dst, weights[piece.hf_name][slices(piece.src)]) for piece in stored.pieces]
        engine.update_weights(pieces)
    engine.finish_update(0)
    prompts = [Prompt(uid=i, prompt_ids=tuple(row), text="") for i, row in enumerate(prompts_BT.tolist())]
    sampling = SamplingConfig(n=1, max_tokens=NEW_TOKENS, ignore_eos=True)

    def run() -> None:
        rollouts = engine.generate(prompts, sampling)
        if any(len(rollout.response_ids) != NEW_TOKENS for rollout in rollouts):
            raise RuntimeError("a response of the engine is short")

    return run


def transformers_runner(
    arch: ArchSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype, prompts_BT: torch.Tensor
) -> Callable[[], None]:
    """The peer: Transformers with the same weights, its default attention and cache."""
    settings = family_of(arch).arch_to_hf(arch)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    found = model.load_state_dict(weights, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers has other weights than the engine: {found}")
    model.tie_weights()
    mask_BT = torch.ones_like(prompts_BT)

    def run() -> None:
        tokens = model.generate(
            prompts_BT,
            attention_mask=mask_BT,
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        if tokens.size(1) != PROMPT_LEN + NEW_TOKENS:
            raise RuntimeError("a response of transformers is short")

    return run


def floor(arch: ArchSpec, dtype: torch.dtype, batch: int) -> dict[str, float]:
    """Memory bandwidth, matrix rate (the better of fp32 and `dtype`), and the time that they allow for a whole call."""
    shapes = {name: stored.shape for name, stored in hf_layout(arch, "float32").items()}
    layers = sum(shape[0] * shape[1] for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    head = arch.vocab_size * arch.hidden_size
    bandwidth = measure_bandwidth()
    rate = max(measure_matmul(torch.float32), measure_matmul(dtype))

    def forward_s(tokens: int) -> float:
        """One forward of `tokens` tokens, of which `batch` go through the output matrix."""
        return max((layers + head) * dtype.itemsize / bandwidth, 2 * (layers * tokens + head * batch) / rate)

    return {
        "memory_gb_per_s": round(bandwidth / 1e9, 1),
        "matmul_gflop_per_s": round(rate / 1e9, 1),
        "floor_s": round(forward_s(batch * PROMPT_LEN) + (NEW_TOKENS - 1) * forward_s(batch), 4),
    }


def measure_bandwidth() -> float:
    """Bytes per second of reading 512 MB."""
    buffer = torch.ones(128 * 2**20)
    return buffer.numel() * 4 / best_time(lambda: buffer.sum())


def measure_matmul(dtype: torch.dtype) -> float:
    """FLOP per second of a [1024, 1024] product."""
    a = torch.randn(1024, 1024).to(dtype)
    return 2 * 1024**3 / best_time(lambda: a @ a)


def best_time(function: Callable[[], object], repeats: int = 5) -> float:
    """Shortest of a few calls, s."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times[1:])


if __name__ == "__main__":
    main()
