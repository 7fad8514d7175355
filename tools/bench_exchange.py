"""Benchmarks the dispatch of samples (`pack`) on one rank of a large job: time, and peak memory over its batch.

    python tools/bench_exchange.py                                # 67 M tokens, 256 ranks
    python tools/bench_exchange.py --million-tokens 8 16 32 67 --layers 94 --top-k 8

The job is simulated: one process is rank 0 of `--ranks` in torch's fake process group, whose collectives move nothing;
sample table, rollouts, plan, staging and batch are real. Rank 0 is the first of an engine's replica, so it sends and
receives. The peak is the growth of the process during `pack`, beyond the rollouts (VmHWM, reset before); `ratio`
divides it by the bytes of the batch. Each number of tokens is a separate process and prints one JSON line, with the CPU
time per token of this rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.measure import commit, device_name
from torch.testing._internal.distributed.fake_pg import FakeStore

from mrl.distributed.groups import ProcessGroups
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dtypes import expert_index_dtype
from mrl.rollout.dispatch import StageRoutingFormat, dispatch_samples
from mrl.types import Prompt, Rollout, RolloutBatch, SampleTable

TP, PP, REPLICA = 4, 8, 32
"""Layout of configs/dapo_qwen3-235b-a22b_32x8_tp4pp8ep8.yaml, but with engines of 32 ranks."""
SAMPLES = 16
PROMPT_LEN = 1024
NUM_EXPERTS = 128


def main() -> None:
    """Parses the command line and prints a JSON line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million-tokens", type=float, nargs="+", default=[67.0], help="tokens of the job")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--sample-tokens", type=int, default=8192, help="mean length of prompt and response")
    parser.add_argument("--layers", type=int, default=0, help="layers with a routing record; 0: none")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(run(args, args.million_tokens[0])), flush=True)
        return
    for count in args.million_tokens:
        options = {"million-tokens": count, "ranks": args.ranks, "sample-tokens": args.sample_tokens}
        options |= {"layers": args.layers, "top-k": args.top_k}
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, __file__, "--alone", *given], check=True)


def run(args: argparse.Namespace, million_tokens: float) -> dict[str, Any]:
    """Measures one number of tokens in this process."""
    grid = ParallelLayout(args.ranks, tp=TP, pp=PP, rollout_tp=REPLICA)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    vars(dist)["all_to_all_single"] = moves_nothing  # the fake group rejects a round in which rank 0 only receives
    own = dist.new_group([0])
    shared = {"tp": dist.new_group(list(range(TP))), "pp": dist.new_group(list(range(0, args.ranks, args.ranks // PP)))}
    groups = ProcessGroups(0, grid, cp=own, dp=own, dp_cp=own, rollout_tp=own, **shared)
    table = make_table(round(million_tokens * 1e6), args.sample_tokens, grid)
    rollouts = held_by_first_rank(table, args.layers, args.top_k)
    per_stage = -(-args.layers // PP)
    layers = [range(first, min(first + per_stage, args.layers)) for first in range(0, args.layers, max(1, per_stage))]
    dtype = expert_index_dtype(NUM_EXPERTS)
    routing = StageRoutingFormat(args.layers, args.top_k, dtype, layers) if args.layers else None
    gc.collect()
    before = forget_peak()
    began = time.process_time()
    packed = dispatch_samples(
        rollouts, table, groups, len(set(table["uid"].tolist())), keep_groups=True, routing=routing
    )
    seconds = time.process_time() - began
    grown = memory("VmHWM") - before
    batch = packed.batch
    tokens = batch.tokens_P.numel()
    return {
        "bench": "exchange",
        "ranks": args.ranks,
        "million_tokens": million_tokens,
        "samples": len(table),
        "layers": args.layers,
        "tokens_of_rank": tokens,
        "samples_bytes": size_of(batch),
        "peak_bytes": grown,
        "ratio": round(grown / size_of(batch), 3),
        "cpu_s": round(seconds, 3),
        "ns_per_token": round(1e9 * seconds / max(1, tokens), 1),
        "device": device_name(),
        "commit": commit(),
    }


def moves_nothing(*tensors_and_sizes: Any) -> None:
    """Replaces a collective."""


def make_table(tokens: int, sample_tokens: int, grid: ParallelLayout) -> SampleTable:
    """Returns a table of samples with `tokens` tokens in total; prompts are distributed round-robin over replicas."""
    prompts = max(grid.num_replicas, tokens // (sample_tokens * SAMPLES))
    generator = torch.Generator().manual_seed(0)
    count = prompts * SAMPLES
    mean = max(2, tokens // count - PROMPT_LEN)
    rows = torch.zeros(count, len(SampleTable.FACTS), dtype=torch.float64)
    uid = torch.arange(count) // SAMPLES
    values = {
        "rank": uid % grid.num_replicas * grid.rollout_size,
        "uid": uid,
        "sample_index": torch.arange(count) % SAMPLES,
        "prompt_len": torch.full((count,), PROMPT_LEN),
        "response_len": torch.randint(mean // 2, mean + mean // 2, (count,), generator=generator),
    }
    for name, value in values.items():
        rows[:, SampleTable.FACTS.index(name)] = value.double()
    return SampleTable(SampleTable.FACTS, rows)


def held_by_first_rank(table: SampleTable, layers: int, top_k: int) -> list[Rollout]:
    """Returns the rollouts of rank 0's engine; their routing records share the memory of one token."""
    choice = torch.zeros(1, layers, top_k, dtype=expert_index_dtype(NUM_EXPERTS))
    found = []
    names = ("rank", "uid", "sample_index", "prompt_len", "response_len")
    columns = (table[name].long().tolist() for name in names)
    for rank, uid, sample, prompt_len, response_len in zip(*columns, strict=True):
        if rank == 0:
            prompt = Prompt(uid, tuple(range(prompt_len)), "")
            ids, logprobs = list(range(1000, 1000 + response_len)), [-0.5] * response_len
            record = choice.expand(prompt_len + response_len, layers, top_k) if layers else None
            found.append(Rollout(prompt, sample, ids, logprobs, "stop", 0, routed_experts=record))
    return found


def size_of(batch: RolloutBatch) -> int:
    """Returns the bytes of all tensors of a batch."""
    tensors = (getattr(batch, item.name) for item in fields(batch))
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def forget_peak() -> int:
    """Resets the peak memory and returns the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str) -> int:
    """Returns the bytes in a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
