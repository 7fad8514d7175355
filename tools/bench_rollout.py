"""Benchmarks rollout engines against transformers' `generate`: same weights, prompts and lengths, in one run.

    python tools/bench_rollout.py                     # both models, all dtypes
    python tools/bench_rollout.py --model small --dtype bfloat16 --repeats 7
    python tools/bench_rollout.py --model small --engines native vllm vllm_packed vllm_own
    python tools/bench_rollout.py --model tiny --repeats 1        # a smoke test
    python tools/bench_rollout.py --device cuda --model large

All sample from the full softmax (temperature 1, no truncation, no end token), 64 new tokens per prompt; the engines of
mrl and vLLM return log-probabilities. All read one Hugging Face folder of random weights. Each runs in its own process
with the same number of threads; they alternate, and medians are compared:

    native          rollout.name=native
    vllm            rollout.name=vllm: unpacked matrices, so that a weight sync can write into them; a seed per sample
    vllm_packed     vLLM with the same arguments and requests, but weights from its own loader, packed for its kernels
    vllm_own        vLLM with its defaults: own processes, torch.compile, no seeds (takes minutes to start)
    native_eager    on a GPU: the native engine without CUDA graphs

Prints one JSON line per model and dtype:

    ratio           transformers' median time over the native engine's
    engines         name -> its times; tokens_per_s; ratio, transformers' median time over its own; times_floor, its
                    time over the floor; cores, the CPU cores that it kept busy; processor_s, its CPU time, which with
                    one thread (--num-threads 1) does not depend on other load
    floor_s         lower bound for any loop over forwards: for each forward the larger of (weight bytes / memory
                    bandwidth) and (FLOPs / matrix rate), both rates measured in the same run
    refittable_price    vllm's median time over vllm_packed's
    graphs_ratio    on a GPU: the native engine's median time without CUDA graphs over that with them
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.alternate import Action, Turns, take_turns
from bench.measure import add_device, commit, device_name, matrix_rate, memory_bandwidth, spread

from mrl.checkpoint.formats.hf import HfTarget, load_from_hf
from mrl.config.config import RolloutConfig
from mrl.config.registry import find
from mrl.distributed import launch
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.engines.vllm.package_signature import installed
from mrl.models.base import ArchSpec
from mrl.models.hf_config import arch_from_config, arch_from_folder
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt

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
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 199,
        "hidden_size": 128,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
}
BATCH = {"small": 32, "large": 8, "tiny": 4}
DTYPES = {"small": ("float32", "bfloat16"), "large": ("bfloat16",), "tiny": ("float32", "bfloat16")}
ENGINES = ("native", "vllm", "vllm_packed", "vllm_own", "native_eager")
DEFAULT_ENGINES = {"cpu": ENGINES[:3], "cuda": (*ENGINES[:3], "native_eager")}
PEER = "transformers"
CACHE_SHARE = 0.2
"""Share of free memory for the KV cache of each engine."""


@dataclass(frozen=True)
class Work:
    """Work of each engine.

    Attributes:
        folder: Hugging Face folder of the model.
        dtype: Dtype of the weights.
        prompts: Token ids, all of one length.
        device: Device of the engine.
    """

    folder: Path
    dtype: torch.dtype
    prompts: tuple[tuple[int, ...], ...]
    device: torch.device

    @property
    def samples(self) -> list[Prompt]:
        """Prompts in the form of mrl's engines."""
        return [Prompt(uid=number, prompt_ids=ids, text="") for number, ids in enumerate(self.prompts)]

    def spec(self, name: str, *, eager: bool = False) -> EngineSpec:
        """Returns the spec of one of mrl's engines."""
        config = RolloutConfig(
            name=name,
            prompt_length=PROMPT_LEN,
            response_length=NEW_TOKENS,
            gpu_memory_utilization=CACHE_SHARE,
            enable_prefix_caching=False,  # every call has the same prompts
            enforce_eager=eager,
        )
        return EngineSpec(
            config=config,
            arch=arch_from_folder(self.folder),
            tp_group=None,
            device=self.device,
            dtype=self.dtype,
            decode=str,
            write_model_folder=lambda _: self.folder,
            timeout_s=60.0,
            trains_on_logprobs=False,
        )


SAMPLING = SamplingConfig(n=1, max_tokens=NEW_TOKENS, ignore_eos=True)


def main() -> None:
    """Parses the command line and prints a JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), nargs="*", default=["small", "large"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*", help="default: depends on the model")
    parser.add_argument("--engines", choices=ENGINES, nargs="*", help="default: all but vllm_own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    add_device(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    engines = args.engines or DEFAULT_ENGINES[args.device]
    for model in args.model:
        for dtype in args.dtype or DTYPES[model]:
            found = run_case(model, dtype, engines, args.repeats, torch.device(args.device))
            print(json.dumps(found), flush=True)


def run_case(model: str, dtype_name: str, engines: Sequence[str], repeats: int, device: torch.device) -> dict[str, Any]:
    """Compares the engines on one model and dtype; engines that are not installed are listed."""
    dtype = getattr(torch, dtype_name)
    arch = arch_from_config(MODELS[model])
    batch = BATCH[model]
    there = [name for name in engines if not name.startswith("vllm") or installed()]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, arch.vocab_size, (batch, PROMPT_LEN), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as name:
        write_random(Path(name), arch, dtype_name)
        work = Work(Path(name), dtype, tuple(map(tuple, prompts)), device)
        makers = {each: functools.partial(RUNNERS[each], work) for each in (*there, PEER)}
        turns = take_turns(makers, repeats, device, torch.get_num_threads())
    limits = floor(arch, dtype, batch, device)
    return {
        "bench": "rollout",
        "model": f"{arch.num_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size}",
        "dtype": dtype_name,
        "batch": batch,
        "prompt_len": PROMPT_LEN,
        "new_tokens": NEW_TOKENS,
        "peer": "transformers generate, default attention and cache",
        **ratios(turns),
        "engines": {
            **{name: figures(turns, name, batch, limits["floor_s"]) for name in turns},
            **{name: "not installed" for name in engines if name not in there},
        },
        **limits,
        "device": device_name(device.type),
        "num_threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "vllm": installed()},
        "commit": commit(),
    }


def ratios(turns: Mapping[str, Turns]) -> dict[str, float]:
    """Returns the ratios of median times for the pairs that ran."""
    pairs = {
        "ratio": (PEER, "native"),
        "refittable_price": ("vllm", "vllm_packed"),
        "graphs_ratio": ("native_eager", "native"),
    }
    return {
        name: round(turns[one].median_s / turns[other].median_s, 2)
        for name, (one, other) in pairs.items()
        if one in turns and other in turns
    }


def figures(turns: Mapping[str, Turns], name: str, batch: int, floor_s: float) -> dict[str, Any]:
    """Returns the measurements of one engine."""
    own = turns[name]
    return {
        "s": spread(own.wall_s),
        "tokens_per_s": round(batch * NEW_TOKENS / own.median_s),
        "ratio": round(turns[PEER].median_s / own.median_s, 2),
        "times_floor": round(own.median_s / floor_s, 2),
        "cores": round(own.cores, 2),
        "processor_s": spread(own.processor_s),
    }


def write_random(folder: Path, arch: ArchSpec, dtype: str) -> None:
    """Writes a Hugging Face folder of random weights."""
    target = HfTarget(arch, dtype, max_file_bytes=sys.maxsize)
    (file,) = target.files
    weights = allocate(file.layout)
    random_init(arch, file.layout, weights, seed=0)
    target.finish(folder, {file.name: target.write(folder / file.name, file, weights.items())})


@contextmanager
def engine_runner(work: Work, kind: str, *, eager: bool = False) -> Iterator[Action]:
    """Starts one of mrl's engines, syncs the weights, and yields a function that runs one call."""
    launch.init_distributed(work.device.type, num_threads=torch.get_num_threads())
    engine: RolloutEngine = find("engines", kind, "ENGINE")(work.spec(kind, eager=eager))
    layout = engine.layout()
    weights = allocate(layout, work.device)
    load_from_hf(work.folder, engine.spec.arch, layout, weights)
    engine.begin_update()
    engine.update_weights([WeightSlice(name, full_region(value.shape), value) for name, value in weights.items()])
    engine.finish_update(0)
    del weights

    def run() -> None:
        for rollout in engine.generate(work.samples, SAMPLING):
            check_length(len(rollout.response_ids))

    yield run
    engine.close()
    launch.shutdown_distributed()


@contextmanager
def packed_runner(work: Work) -> Iterator[Action]:
    """Starts vLLM as mrl's engine does, but with weights that vLLM's own loader packed."""
    from mrl.engines.vllm import llm_runtime
    from mrl.engines.vllm.process_state import process_state_restored, rng_state_restored
    from mrl.engines.vllm.sampling import arguments

    launch.init_distributed(work.device.type, num_threads=torch.get_num_threads())
    spec = work.spec("vllm")
    with process_state_restored(work.device):
        version = llm_runtime.find_version()
        from vllm import LLM, SamplingParams

        given = llm_runtime.arguments(spec, cache_bytes(spec), version)
        llm = LLM(str(work.folder), **{**given, "load_format": "auto"})
    asked = [SamplingParams(**arguments(SAMPLING, prompt, 0)) for prompt in work.samples]
    with rng_state_restored(work.device):
        yield lambda: check_outputs(llm.generate(token_prompts(work), asked, use_tqdm=False))


@contextmanager
def own_runner(work: Work) -> Iterator[Action]:
    """Starts vLLM with its defaults, bound to as many cores as the others may use."""
    cores = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}  # its default leaves one core to the scheduler
    launch.set_env({}, unless_set={**bound, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    from vllm import LLM, SamplingParams

    spec = work.spec("vllm")
    llm = LLM(
        str(work.folder),
        dtype=spec.dtype_name,
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=spec.config.max_sequence_length,
        max_num_seqs=spec.config.max_num_seqs,
        max_num_batched_tokens=spec.config.max_num_batched_tokens,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=cache_bytes(spec),
        logprobs_mode="processed_logprobs",
    )
    asked = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
    yield lambda: check_outputs(llm.generate(token_prompts(work), asked, use_tqdm=False))


def cache_bytes(spec: EngineSpec) -> int:
    """Returns the size of the KV cache that mrl gives vLLM."""
    from mrl.engines._kv_budget import kv_budget
    from mrl.engines.vllm.kv_cache import kv_cache

    budget = kv_budget(spec.device, spec.config.gpu_memory_utilization, None)
    return kv_cache(spec.config, spec.arch, spec.dtype.itemsize).within(budget, spec.config)


def token_prompts(work: Work) -> list[Any]:
    """Returns the prompts in vLLM's form."""
    return [{"prompt_token_ids": list(ids)} for ids in work.prompts]


def check_outputs(outputs: Sequence[Any]) -> None:
    """Checks that every response of vLLM is complete and has its log-probabilities."""
    for output in outputs:
        check_length(len(output.outputs[0].token_ids))
        check_length(len(output.outputs[0].logprobs))


def check_length(found: int) -> None:
    """Raises RuntimeError for a response that ended early."""
    if found != NEW_TOKENS:
        raise RuntimeError(f"a response has {found} tokens, expected {NEW_TOKENS}")


@contextmanager
def transformers_runner(work: Work) -> Iterator[Action]:
    """Loads the model in transformers, with default attention and cache, and yields a function that runs one call."""
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(work.folder, dtype=work.dtype).to(work.device).eval()
    prompts_BT = torch.tensor(work.prompts, device=work.device)
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
        check_length(tokens.size(1) - PROMPT_LEN)

    yield run


RUNNERS: dict[str, Callable[..., AbstractContextManager[Action]]] = {
    "native": functools.partial(engine_runner, kind="native"),
    "native_eager": functools.partial(engine_runner, kind="native", eager=True),
    "vllm": functools.partial(engine_runner, kind="vllm"),
    "vllm_packed": packed_runner,
    "vllm_own": own_runner,
    PEER: transformers_runner,
}


def floor(arch: ArchSpec, dtype: torch.dtype, batch: int, device: torch.device) -> dict[str, float]:
    """Returns memory bandwidth, matrix rate (the better of fp32 and `dtype`), and the lower bound of a call's time."""
    shapes = {name: stored.shape for name, stored in hf_layout(arch, "float32").items()}
    layers = sum(shape[0] * shape[1] for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
    head = arch.vocab_size * arch.hidden_size
    bandwidth = memory_bandwidth(device)
    rate = max(matrix_rate(torch.float32, device), matrix_rate(dtype, device))

    def forward_s(tokens: int) -> float:
        """Returns the time of a forward of `tokens` tokens, of which `batch` pass through the output matrix."""
        return max((layers + head) * dtype.itemsize / bandwidth, 2 * (layers * tokens + head * batch) / rate)

    return {
        "memory_gb_per_s": round(bandwidth / 1e9, 1),
        "matmul_gflop_per_s": round(rate / 1e9, 1),
        "floor_s": float(f"{forward_s(batch * PROMPT_LEN) + (NEW_TOKENS - 1) * forward_s(batch):.4g}"),
    }


if __name__ == "__main__":
    main()
