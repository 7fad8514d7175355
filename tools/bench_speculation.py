"""Benchmarks n-gram speculative decoding of the native engine on a CPU: tokens per second with and without drafts.

    python tools/bench_speculation.py                         # a model of 8 layers x 512; float32 and bfloat16
    python tools/bench_speculation.py --dtype float32 --rows 1 8 --num-threads 1
    python tools/bench_speculation.py --trained --num-threads 1    # trains for about a minute first

Models of the same size with constructed, not trained, weights: the time of a step does not depend on the weights.

    repeats    each token has a most likely successor (the output matrix has the token's own embedding in its row), in
               cycles of 8; occasionally another token follows and starts another cycle. So the text repeats itself with
               breaks, like copied or tabular text; `follows_frac` is the share of likely successors
    random     any token may follow any other: nothing can be drafted
    copies     with --trained: a trained model. A model of 2 layers x 128 is trained by `mrl train` (sft) to repeat a
               word of 8 random characters; its weights are then embedded into the larger shape, padded with 0, so that
               it computes the same at the cost of a larger model (`widened`). `follows_frac` is the share of tokens
               that equal the token 8 positions before

The engine gets only `rollout.speculative`; it finds drafts in prompts, 32 tokens of such text, and in its own samples.
Both engines sample the same prompts with the same seed at temperature 1, alternately, and every token and
log-probability must be equal bit for bit. Prints one JSON line per dtype:

    cases      text and number of concurrent rows -> ratio, the median time without drafts over that with them;
               processor_ratio, the same in CPU time, which does not depend on other load; drafted_frac, drafted tokens
               per sampled token; accepted_frac, the share of drafted tokens that were accepted; tokens_per_step, per
               row; tokens_per_s with drafts; tokens_per_processor_s with and without them
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench.measure import commit, device_name
from safetensors.torch import load_file

from mrl.config.config import RolloutConfig, SpeculativeConfig
from mrl.distributed import launch
from mrl.engines.base import EngineSpec, SamplingConfig
from mrl.engines.native.engine import NativeEngine
from mrl.models.base import ArchSpec
from mrl.models.hf_config import arch_from_config
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.random_init import random_init
from mrl.resharding.regions import full_region, slices
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt, Rollout

PROMPT_LEN = 32
CYCLE = 8
LIKELY = 0.995
"""Approximate share of tokens that are the most likely successor."""

MODELS: dict[str, dict[str, Any]] = {
    "small": {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
}
SHARED: dict[str, Any] = {
    "model_type": "qwen2",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TEXTS = ("repeats", "random")
COPIES = "copies"

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+#"
COPYING = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"num_attention_heads": 16, "num_key_value_heads": 4}
"""Shape into which a trained model is embedded; its heads have the same size, 32."""
TRAINING, LEARNED_LEN = {"train.num_steps": 120, "train.batch_size": 40}, 128
SHAPE = {
    name: SHARED[name] for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta")
}
BARRED, TINY = -1e4, 1e-3
"""Approximate logit of tokens that the trained model does not have, and the hidden value that produces it."""


def main() -> None:
    """Parses the command line and prints a JSON line per dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32], help="concurrent samples, 4 per prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trained", action="store_true", help="only the text of a trained model")
    args = parser.parse_args()
    if args.trained and args.model != "small":
        parser.error("--trained goes with --model small")
    with tempfile.TemporaryDirectory() as folder:
        weights = trained(Path(folder), args.num_threads) if args.trained else None
        launch.init_distributed("cpu", num_threads=args.num_threads)
        for dtype in args.dtype:
            found = run_case(args.model, dtype, args.rows, args.new_tokens, args.repeats, weights)
            print(json.dumps(found), flush=True)
        launch.shutdown_distributed()


def run_case(
    model: str,
    dtype: str,
    rows: Sequence[int],
    new_tokens: int,
    repeats: int,
    learned: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Measures one dtype; `learned` has the weights of a trained model, whose text is then the only one."""
    arch = arch_from_config({**SHARED, **MODELS[model], **({} if learned is None else WIDE)})
    cases: dict[str, dict[str, float]] = {}
    for text in TEXTS if learned is None else (COPIES,):
        sizes = max(rows), new_tokens
        engines = [engine_of(arch, dtype, text, method, *sizes, learned) for method in (None, "ngram")]
        cases |= {f"{text}, {count} rows": compare(arch, text, engines, count, new_tokens, repeats) for count in rows}
        for engine in engines:
            engine.close()
    return {
        "bench": "speculation",
        "model": f"{arch.num_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size}",
        "dtype": dtype,
        "new_tokens": new_tokens,
        "speculative": {"num_speculative_tokens": SpeculativeConfig.num_speculative_tokens},
        "cases": cases,
        "device": device_name("cpu"),
        "num_threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
        "commit": commit(),
    }


def followers(vocab_size: int) -> torch.Tensor:
    """Returns the most likely successor of each token: the next of its cycle."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    cycles = order[: vocab_size // CYCLE * CYCLE].view(-1, CYCLE)
    follows = torch.arange(vocab_size)
    follows[cycles] = cycles.roll(-1, 1)
    return follows


def trained(folder: Path, num_threads: int, more: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Trains a small model to repeat a word and returns its weights; `more` are overrides of the run."""
    numbers, word_len = random.Random(0), CYCLE
    with open(folder / "words.jsonl", "w", encoding="utf-8") as file:
        for _ in range(TRAINING["train.num_steps"] * TRAINING["train.batch_size"]):
            text = "".join(numbers.choices(CHARACTERS[:-1], k=word_len)) * ((PROMPT_LEN + LEARNED_LEN) // word_len)
            row = {"prompt": text[:PROMPT_LEN], "response": text[PROMPT_LEN:]}
            file.write(json.dumps(row) + "\n")
    settings = {
        "run": {"output_dir": str(folder / "run"), "num_threads": num_threads, "device": "cpu"},
        "model": {
            "preset": "qwen2_tiny",
            "overrides": {**SHAPE, **COPYING},
            "tokenizer": f"char:{CHARACTERS}",
            "dtype": "float32",
        },
        "algorithm": {"name": "sft"},
        "data": {"train_files": [str(folder / "words.jsonl")], "response_key": "response", "answer_key": ""},
        "actor": {"lr": 3e-3, "lr_warmup_steps": 20, "max_tokens_per_microbatch": 2048},
        "rollout": {"prompt_length": PROMPT_LEN, "response_length": LEARNED_LEN + 1},
        "checkpoint": {"interval": 0, "export_hf": True},
        "observe": {"console": "off", "tensorboard": False, "report": False},
    }
    config = folder / "config.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    words = [f"{key}={value}" for key, value in TRAINING.items()]
    subprocess.run([sys.executable, "-m", "mrl", "train", str(config), *words, *more], check=True)
    (weights,) = (folder / "run" / "checkpoints").glob("step-*[!0]*/hf/model.safetensors")
    found: dict[str, torch.Tensor] = load_file(weights)
    return found


def widened(learned: Mapping[str, torch.Tensor], arch: ArchSpec) -> dict[str, torch.Tensor]:
    """Embeds a model into a larger shape with heads of the same size, padded with 0.

    Its hidden states are the first elements of the larger ones. Norm weights are rescaled, since a norm divides by the
    root of a mean over more elements. Tokens that the small model does not have are suppressed by one more hidden
    element, too small to affect a norm, that every token's embedding has and no layer changes.
    """
    hidden, small = arch.hidden_size, learned["model.norm.weight"].numel()
    ratio, heads = math.sqrt(small / hidden), torch.arange(COPYING["num_attention_heads"])
    # query heads per KV head; the larger model has more
    groups = COPYING["num_attention_heads"] // SHARED["num_key_value_heads"]
    heads = heads // groups * (arch.num_heads // arch.num_kv_heads) + heads % groups
    queries = (heads[:, None] * arch.head_dim + torch.arange(arch.head_dim)).flatten()
    found = {name: torch.zeros(stored.shape) for name, stored in hf_layout(arch, "float32").items()}
    for name, value in learned.items():
        index = [torch.arange(length) for length in value.shape]
        if "q_proj" in name:
            index[0] = queries
        elif "o_proj" in name:
            index[1] = queries
        found[name][torch.meshgrid(*index, indexing="ij")] = value * ratio if "norm" in name else value
    found["lm_head.weight"].copy_(found["model.embed_tokens.weight"])  # in the small model they are one
    found["model.embed_tokens.weight"][:, small] = TINY
    found["model.norm.weight"][small] = ratio / TINY
    found["lm_head.weight"][len(CHARACTERS) :, small] = BARRED
    return found


def engine_of(
    arch: ArchSpec,
    dtype: str,
    text: str,
    method: Any,
    num_rows: int,
    new_tokens: int,
    learned: Mapping[str, torch.Tensor] | None = None,
) -> NativeEngine:
    """Returns an engine with the weights of a text."""
    config = RolloutConfig(
        prompt_length=PROMPT_LEN,
        response_length=new_tokens,
        max_num_seqs=num_rows,
        gpu_memory_utilization=0.2,
        speculative=SpeculativeConfig(method=method),
    )
    spec = EngineSpec(
        config=config,
        arch=arch,
        tp_group=None,
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype),
        decode=str,
        write_model_folder=lambda _: Path(),  # this engine reads no files
        timeout_s=60.0,
        trains_on_logprobs=False,
    )
    engine = NativeEngine(spec)
    layout = engine.layout()
    weights = allocate(layout)
    if learned is None:
        random_init(arch, layout, weights, seed=0)
    else:
        wide = widened(learned, arch)
        for name, stored in layout.items():
            for piece in stored.pieces:
                weights[name][slices(piece.dst)] = wide[piece.hf_name][slices(piece.src)]
    if text == "repeats":
        embed = weights["embed"]
        embed.copy_(torch.randn(embed.shape, generator=torch.Generator().manual_seed(1)))  # above what layers add
        logit = math.log(arch.vocab_size * LIKELY / (1 - LIKELY))
        weights["lm_head"][followers(arch.vocab_size)] = embed * (logit / arch.hidden_size)
    engine.begin_update()
    engine.update_weights([WeightSlice(name, full_region(value.shape), value) for name, value in weights.items()])
    engine.finish_update(0)
    return engine


def compare(
    arch: ArchSpec, text: str, engines: Sequence[NativeEngine], num_rows: int, new_tokens: int, repeats: int
) -> dict[str, float]:
    """Compares the engines without and with drafts.

    Raises:
        RuntimeError: Their tokens or log-probabilities differ.
    """
    num_prompts = -(-num_rows // 4)
    prompts = [Prompt(uid, tuple(ids), "") for uid, ids in enumerate(prompts_of(arch, text, num_prompts))]
    sampling = SamplingConfig(n=num_rows // num_prompts, max_tokens=new_tokens, ignore_eos=True)
    times: list[list[tuple[float, float]]] = [[], []]
    for _ in range(1 + repeats):
        rollouts = []
        for engine, taken in zip(engines, times, strict=True):
            began = time.perf_counter(), time.process_time()
            rollouts.append(engine.generate(prompts, sampling))
            taken.append((time.perf_counter() - began[0], time.process_time() - began[1]))
        if [bits(each) for each in rollouts[0]] != [bits(each) for each in rollouts[1]]:
            raise RuntimeError(f"tokens or log-probabilities of {num_rows} rows differ with drafts")
    # the first of each warms up
    plain_s, drafted_s = (statistics.median(wall for wall, _ in one[1:]) for one in times)
    plain_cpu_s, drafted_cpu_s = (statistics.median(processor for _, processor in one[1:]) for one in times)
    stats = engines[1].stats()
    drafted = max(stats["drafted_tokens"], 1.0)
    return {
        "ratio": round(plain_s / drafted_s, 2),
        "processor_ratio": round(plain_cpu_s / drafted_cpu_s, 2),
        "follows_frac": copied_frac(rollouts[0])
        if text == COPIES
        else follows_frac(rollouts[0], followers(arch.vocab_size)),
        "drafted_frac": round(stats["drafted_tokens"] / stats["decode_tokens"], 3),
        "accepted_frac": round(stats["accepted_tokens"] / drafted, 3),
        "tokens_per_step": round((new_tokens - 1) / stats["decode_steps"], 2),
        "tokens_per_s": round(len(prompts) * sampling.n * new_tokens / drafted_s),
        "tokens_per_processor_s": round(len(prompts) * sampling.n * new_tokens / drafted_cpu_s),
        "tokens_per_processor_s_without": round(len(prompts) * sampling.n * new_tokens / plain_cpu_s),
    }


def prompts_of(arch: ArchSpec, text: str, count: int) -> list[list[int]]:
    """Returns prompts of a text."""
    most = len(CHARACTERS) - 1 if text == COPIES else arch.vocab_size
    ids_BT = torch.randint(0, most, (count, PROMPT_LEN), generator=torch.Generator().manual_seed(count))
    if text == COPIES:
        ids_BT = ids_BT[:, :CYCLE].repeat(1, PROMPT_LEN // CYCLE)
    if text == "repeats":
        follows = followers(arch.vocab_size)
        for place in range(1, PROMPT_LEN):
            ids_BT[:, place] = follows[ids_BT[:, place - 1]]
    found: list[list[int]] = ids_BT.tolist()
    return found


def bits(rollout: Rollout) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Returns the values that must be equal."""
    return tuple(rollout.response_ids), tuple(rollout.rollout_logprobs)


def follows_frac(rollouts: Sequence[Rollout], follows: torch.Tensor) -> float:
    """Returns the share of tokens that are the most likely successor of the previous one."""
    ids_BT = torch.tensor([rollout.response_ids for rollout in rollouts])
    return round(float((follows[ids_BT[:, :-1]] == ids_BT[:, 1:]).float().mean()), 3)


def copied_frac(rollouts: Sequence[Rollout]) -> float:
    """Returns the share of tokens that equal the token one word before."""
    ids_BT = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids] for rollout in rollouts])
    return round(float((ids_BT[:, PROMPT_LEN - CYCLE : -CYCLE] == ids_BT[:, PROMPT_LEN:]).float().mean()), 3)


if __name__ == "__main__":
    main()
