"""Speed of the native engine against transformers' `generate`: same weights, prompts and lengths, in one run.

    python tools/bench_rollout.py                     # both models, all dtypes
    python tools/bench_rollout.py --model small --dtype bfloat16 --repeats 7
    python tools/bench_rollout.py --device cuda --model large

Both sample from the whole softmax (temperature 1, no truncation, no end token) for 64 new tokens. The two alternate,
and medians are compared. One JSON line for each model and dtype:

    ratio           transformers' median time over the engine's
    floor_s         what no loop over forwards beats here: for each forward the larger of (stored weight bytes / memory
                    bandwidth) and (FLOPs / matrix rate), both rates measured in the same run
    times_floor     the engine's median time over the floor
    graphs_ratio    on a GPU: the engine's median time without CUDA graphs over that with them
"""

from __future__ import annotations

import argparse
import json
import statistics
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
from mrl.observe.benchmark import (
    add_device,
    commit,
    device_name,
    matrix_rate,
    memory_bandwidth,
    seconds,
    spread,
)
from mrl.types import Prompt
from mrl.weights.hf import hf_layout
from mrl.weights.init import random_init
from mrl.weights.regions import slices
from mrl.weights.tensors import allocate

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
    add_device(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    transformers.logging.set_verbosity_error()
    for model in args.model:
        for dtype in args.dtype or DTYPES[model]:
            print(json.dumps(run_case(model, dtype, args.repeats, torch.device(args.device))), flush=True)


def run_case(model: str, dtype_name: str, repeats: int, device: torch.device) -> dict[str, Any]:
    """One comparison."""
    dtype = getattr(torch, dtype_name)
    arch = arch_from_config(MODELS[model])
    batch = BATCH[model]
    weights = allocate(hf_layout(arch, dtype_name), device)
    random_init(arch, hf_layout(arch, dtype_name), weights, seed=0)
    generator = torch.Generator().manual_seed(0)
    prompts_BT = torch.randint(0, arch.vocab_size, (batch, PROMPT_LEN), generator=generator).to(device)
    runners = {
        "native": native_runner(arch, weights, dtype, prompts_BT),
        "transformers": transformers_runner(arch, weights, dtype, prompts_BT),
    }
    if device.type == "cuda":
        runners["native_eager"] = native_runner(arch, weights, dtype, prompts_BT, eager=True)
    for runner in runners.values():
        runner()  # warm-up
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, runner in runners.items():
            times[name].append(seconds(runner, device))
    ours, theirs = statistics.median(times["native"]), statistics.median(times["transformers"])
    limits = floor(arch, dtype, batch, device)
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
        **_eager(times),
        **limits,
        "times_floor": round(ours / limits["floor_s"], 2),
        "device": device_name(device.type),
        "num_threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit(),
    }


def _eager(times: dict[str, list[float]]) -> dict[str, Any]:
    """What CUDA graphs gain, where there are any."""
    if "native_eager" not in times:
        return {}
    ratio = statistics.median(times["native_eager"]) / statistics.median(times["native"])
    return {"native_eager_s": spread(times["native_eager"]), "graphs_ratio": round(ratio, 2)}


def native_runner(
    arch: ArchSpec,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    prompts_BT: torch.Tensor,
    *,
    eager: bool = False,
) -> Callable[[], None]:
    """The engine, refitted with the weights."""
    config = RolloutConfig(
        prompt_length=PROMPT_LEN, response_length=NEW_TOKENS, gpu_memory_utilization=0.2, enforce_eager=eager
    )
    engine = NativeEngine(
        EngineSpec(
            config=config,
            arch=arch,
            tp_group=None,
            device=prompts_BT.device,
            dtype=dtype,
            decode=str,
            model_folder=lambda _: Path(),
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
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).to(prompts_BT.device).eval()
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


def floor(arch: ArchSpec, dtype: torch.dtype, batch: int, device: torch.device) -> dict[str, float]:
    """Memory bandwidth, matrix rate (the better of fp32 and `dtype`), and the time that they allow for a whole call."""
    shapes = {name: stored.shape for name, stored in hf_layout(arch, "float32").items()}
    layers = sum(shape[0] * shape[1] for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    head = arch.vocab_size * arch.hidden_size
    bandwidth = memory_bandwidth(device)
    rate = max(matrix_rate(torch.float32, device), matrix_rate(dtype, device))

    def forward_s(tokens: int) -> float:
        """One forward of `tokens` tokens, of which `batch` go through the output matrix."""
        return max((layers + head) * dtype.itemsize / bandwidth, 2 * (layers * tokens + head * batch) / rate)

    return {
        "memory_gb_per_s": round(bandwidth / 1e9, 1),
        "matmul_gflop_per_s": round(rate / 1e9, 1),
        "floor_s": float(f"{forward_s(batch * PROMPT_LEN) + (NEW_TOKENS - 1) * forward_s(batch):.4g}"),
    }


if __name__ == "__main__":
    main()
