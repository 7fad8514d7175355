"""Benchmarks multi-turn episodes with slow tools: tokens per second, relative to those with instant tools.

    python tools/bench_episodes.py                            # some minutes on two cores
    python tools/bench_episodes.py --conversations 64 --rows 32 --repeats 5
    python tools/bench_episodes.py --ways native --step-s 0.02     # a busy machine, or steps as long as a GPU's

The engine samples as in training, and environments answer in worker processes. Each answer takes `--sleep-s` (0.5) or
no time, with equal probability, determined by its position in the episode: all variants sample the same tokens. Each
variant is a process with the same number of threads; they alternate, and medians are compared. A model with random
weights ends its turns by chance, after 96 tokens on average; an episode has 4 turns.

Prints one JSON line:

    ratio            tokens/s of the native engine with tools that sleep, over those with instant tools
    rounds_ratio     the same if all turns of a round are waited for, as in engines that work in rounds
    ways             variant -> its times and tokens_per_s; cores, the CPU cores that it kept busy
    waited_s         time per call in which the native engine, with tools that sleep, had nothing to sample because
                     answers were missing. The number of decode steps is the same, so that on an idle machine
                     ratio = 1 - waited_s / s; other load disturbs the ratio, but not this time
    tokens, turns    totals over all episodes
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench.alternate import Action, take_turns
from bench.measure import add_device, commit, device_name, spread
from torch import Tensor

from mrl.config.config import AgentConfig, MultiTurnConfig, RolloutConfig
from mrl.data.tokenizer import CharTokenizer
from mrl.distributed import launch
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.engines.native.engine import NativeEngine
from mrl.models.hf_config import arch_from_config
from mrl.resharding.dtypes import allocate
from mrl.resharding.random_init import random_init
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from mrl.rollout.episodes.episodes import Episodes
from mrl.types import Prompt

TURNS = 4
TURN_TOKENS = 96
"""Mean length of a turn, tokens."""
LONGEST = 2048
PROMPT_LEN = 16
ALPHABET = "".join(map(chr, range(32, 128)))
MODEL = {
    "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": PROMPT_LEN + LONGEST,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
"""config.json of the model, without vocab_size."""
WAYS = ("native", "rounds")


SLEEPS = """
import random, time

from mrl.environments.base import Environment, Observation


class Sleeps(Environment):
    def __init__(self, sleep_s, num_turns):
        self.sleep_s, self.left = sleep_s, num_turns

    def reset(self, seed, row):
        self.random = random.Random(seed)
        return Observation()

    def step(self, action):
        self.left -= 1
        if self.random.random() < 0.5:
            time.sleep(self.sleep_s)
        return Observation.user(" [and then?] ") if self.left else Observation(terminated=True)
"""
"""Source file of the environment, which imports no torch; its answers do not depend on the sleep."""


@dataclass(frozen=True)
class Work:
    """Work of each variant.

    Attributes:
        conversations: Number of episodes.
        rows: Sequences that the engine decodes at a time.
        sleep_s: Sleep of every second answer, s.
        step_s: Minimum time of a decode step, s.
        device: "cpu" or "cuda".
    """

    conversations: int
    rows: int
    sleep_s: float
    step_s: float
    device: str


def main() -> None:
    """Parses the command line and prints the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--rows", type=int, default=16, help="rollout.max_num_seqs")
    parser.add_argument("--sleep-s", type=float, default=0.5)
    parser.add_argument("--step-s", type=float, default=0.0, help="minimum time of a decode step, s")
    parser.add_argument("--ways", choices=WAYS, nargs="*", default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    add_device(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    work = Work(args.conversations, args.rows, args.sleep_s, args.step_s, args.device)
    print(json.dumps(measured(work, args.ways, args.repeats)), flush=True)


def measured(work: Work, ways: list[str], repeats: int, model: Mapping[str, Any] = MODEL) -> dict[str, Any]:
    """Measures all variants and returns the result."""
    with tempfile.TemporaryDirectory() as name:
        source, results = Path(name, "sleeps.py"), Path(name, "results.jsonl")
        source.write_text(SLEEPS, encoding="utf-8")
        makers = {
            f"{way}, tools {how}": functools.partial(
                runner, replace(work, sleep_s=sleep_s), way, dict(model), source, results
            )
            for way in ways
            for how, sleep_s in (("at once", 0.0), ("that sleep", work.sleep_s))
        }
        times = take_turns(makers, repeats, torch.device(work.device), torch.get_num_threads())
        calls = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    counts = {tuple(call["counts"]) for call in calls}
    if len(counts) != 1:
        raise RuntimeError(f"the variants sampled different tokens: {sorted(counts)}")
    tokens, turns, _ = counts.pop()
    waited = [call["waited_s"] for call in calls if call["sleep_s"] and call["waited_s"] is not None]
    ratios = {
        name: round(times[f"{way}, tools at once"].median_s / times[f"{way}, tools that sleep"].median_s, 3)
        for name, way in (("ratio", "native"), ("rounds_ratio", "rounds"))
        if way in ways
    }
    return {
        "bench": "episodes",
        **ratios,
        "conversations": work.conversations,
        "rows": work.rows,
        "sleep_s": work.sleep_s,
        "step_s": work.step_s,
        "waited_s": spread(waited) if waited else None,
        "tokens": tokens,
        "turns": turns,
        "ways": {
            name: {
                "s": spread(each.wall_s),
                "tokens_per_s": round(tokens / each.median_s),
                "cores": round(each.cores, 2),
            }
            for name, each in times.items()
        },
        "device": device_name(work.device),
        "num_threads": torch.get_num_threads(),
        "commit": commit(),
    }


def make_engine(work: Work, way: str, model: Mapping[str, Any], source: Path) -> NativeEngine:
    """Returns an engine with random weights, patched for the variant."""
    config = RolloutConfig(
        prompt_length=PROMPT_LEN,
        response_length=LONGEST,
        max_num_seqs=work.rows,
        gpu_memory_utilization=0.2,
        multi_turn=MultiTurnConfig(enable=True),
        agent=AgentConfig(
            environment=f"{source}:Sleeps",
            environment_kwargs={"sleep_s": work.sleep_s, "num_turns": TURNS},
            num_workers=work.rows,
        ),
    )
    arch = arch_from_config({**model, "vocab_size": len(ALPHABET)})
    engine = NativeEngine(
        EngineSpec(
            config=config, arch=arch, tp_group=None, device=torch.device(work.device), dtype=torch.float32,
            decode=str, write_model_folder=lambda _: Path(), timeout_s=60.0, trains_on_logprobs=False,
        )
    )  # fmt: skip
    layout = engine.layout()
    weights = allocate(layout, engine.spec.device)
    random_init(arch, layout, weights, seed=0)
    engine.begin_update()
    engine.update_weights([WeightSlice(name, full_region(value.shape), value) for name, value in weights.items()])
    engine.finish_update(0)
    decode = engine._decode_eagerly

    def step(batch: int, length: int) -> Tensor:
        ends = time.perf_counter() + work.step_s
        logits_BV = decode(batch, length)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return logits_BV

    changed: dict[str, Any] = {"_decode_eagerly": step} if work.step_s else {}
    changed |= (
        {"generate_multi_turn": functools.partial(RolloutEngine.generate_multi_turn, engine)} if way == "rounds" else {}
    )
    vars(engine).update(changed)
    return engine


@contextmanager
def runner(work: Work, way: str, model: Mapping[str, Any], source: Path, results: Path) -> Iterator[Action]:
    """Starts an engine and the environments' workers, and yields a function that runs all episodes.

    Args:
        work: Work to do.
        way: Variant, one of `WAYS`.
        model: config.json of the model, without vocab_size.
        source: Source file of the environment.
        results: File that receives a JSON line per call: tokens, turns, a checksum of the tokens, and the waiting time.
    """
    launch.init_distributed(work.device, num_threads=torch.get_num_threads())
    tokenizer, engine = CharTokenizer(ALPHABET), make_engine(work, way, model, source)
    episodes = Episodes(engine.spec.config, tokenizer, [], None, abort_requested=lambda: False)
    texts = [f"Question {number}" for number in range(work.conversations)]
    prompts = [Prompt(number, tuple(tokenizer.encode(text)), "", question=text) for number, text in enumerate(texts)]
    ends = tuple(range(len(ALPHABET) - len(ALPHABET) // TURN_TOKENS, len(ALPHABET)))

    def run() -> None:
        found = episodes.run(engine, prompts, SamplingConfig(n=1, max_tokens=LONGEST, stop_token_ids=ends))
        talks = [one.episode for one in found if one.episode is not None]
        if failed := [one for one in talks if one.error]:
            raise RuntimeError(f"an episode failed: {failed[0]}")
        ids = [one.response_ids for one in found]
        counts = [sum(map(len, ids)), sum(one.num_turns for one in talks), zlib.crc32(json.dumps(ids).encode())]
        line = {"counts": counts, "sleep_s": work.sleep_s, "waited_s": engine.stats().get("waited_s")}
        with results.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")

    yield run
    episodes.close()
    engine.close()
    launch.shutdown_distributed()


if __name__ == "__main__":
    main()
