r"""Benchmarks weight sync (Megatron shards into an engine) against a memcpy of the same bytes in one run.

    python tools/bench_refit.py                    # dense and MoE: one rank, then 2 and 4 ranks
    python tools/bench_refit.py --engine vllm      # the same into vLLM's own parameters
    torchrun --nproc-per-node 4 tools/bench_refit.py --tp 2 --pp 2 --rollout-tp 1
    torchrun --nproc-per-node 2 tools/bench_refit.py --preset qwen3_30b_a3b --num-layers 2 \
        --overrides '{"num_experts": 16}' --tp 1 --ep 2 --rollout-tp 2

Each repeat runs a complete weight sync (copies, messages, checksums, agreement of all ranks) and then, on all ranks
concurrently, a memcpy of as many bytes as the rank's engine received; with --device cuda, which needs a GPU per rank,
within the GPU's memory. Then each rank sends to the next one the mean number of bytes per rank that the sync sends, and
receives as many: the time of the sockets alone. Medians are compared. Prints one JSON line per layout:

    ratio           memcpy's median time over the sync's; 1 is a sync at the speed of a memcpy
    ratio_transport the same without `finish_update`, in which the engine packs its matrices for faster products
    ratio_cpu       the same in CPU time of all ranks, which is less sensitive to other load
    ratio_sockets   time of the sockets over that of the transport; above 1: faster than the sockets alone
    finish_s        time of `finish_update`: the native engine packs its matrices, vLLM on a CPU the experts
    compiled        whether copies and sums are one compiled loop (otherwise torch's operators, block by block)
    bytes_moved     bytes sent between ranks; the lower bound is the bytes that target ranks need and do not have
    traffic_ratio   bytes that an all-gather of every full tensor to every rank would move, over bytes_moved
    gb_per_s        bytes copied and sent, over all ranks, next to those of the memcpy
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench.measure import add_device, commit, device_name, spread, synchronize

from mrl.checkpoint.formats.hf import SINGLE, write_metadata_files
from mrl.config.config import CheckpointEngineConfig, RolloutConfig
from mrl.config.registry import find
from mrl.distributed import launch, shared_memory
from mrl.distributed.groups import make_rollout_group
from mrl.engines.base import EngineSpec, RolloutEngine
from mrl.models.base import ArchSpec
from mrl.models.presets import PRESETS, arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding import checked_copy
from mrl.resharding.buckets import MIN_ROUND_BYTES
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Layout
from mrl.resharding.megatron import megatron_layout, megatron_layouts
from mrl.resharding.native import native_layouts
from mrl.resharding.random_init import random_init
from mrl.resharding.transfer_cost import traffic
from mrl.resharding.vllm import vllm_layouts
from mrl.resharding.weight_sync import WeightSync

LAYOUTS: dict[str, Callable[[ArchSpec, ParallelLayout, str], Mapping[int, Layout]]] = {
    "native": native_layouts,
    "vllm": vllm_layouts,
}
"""Engine -> function that returns each rank's layout."""

CACHE_SHARE = 0.01
"""Share of free memory for the engine's KV cache, which a weight sync does not use."""

EXPERTS = {"num_experts": 16, "vocab_size": 32768}
"""Overrides of qwen3_30b_a3b for the MoE model of the default cases: fewer experts and a smaller vocabulary."""

CASES = (
    (1, ("--tp", "1")),
    (2, ("--tp", "2")),
    (2, ("--tp", "2", "--rollout-tp", "2")),
    (2, ("--tp", "1", "--rollout-tp", "2")),
    (2, ("--tp", "1", "--pp", "2", "--rollout-tp", "2")),
    (4, ("--tp", "2", "--pp", "2", "--rollout-tp", "2")),
)
EXPERT_CASES = (
    (1, ("--tp", "1")),
    (2, ("--tp", "1", "--ep", "2")),
    (2, ("--tp", "1", "--ep", "2", "--rollout-tp", "2")),
    (2, ("--tp", "1", "--ep", "2", "--rollout-tp", "2", "--rollout-ep", "2")),
    (2, ("--tp", "2", "--rollout-tp", "2", "--rollout-ep", "2")),
    (2, ("--tp", "1", "--rollout-tp", "2")),
    (2, ("--tp", "1", "--pp", "2", "--rollout-tp", "2")),
)
"""(number of ranks, layout) of the cases that run without a launcher."""


def main() -> int:
    """Runs one layout under a launcher, otherwise all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(LAYOUTS), default="native")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen2.5_0.5b")
    parser.add_argument("--num-layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--overrides", type=json.loads, default={}, help="config.json keys that replace the preset's")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="bfloat16", help="dtype of actor and engine")
    parser.add_argument(
        "--bucket-megabytes", type=int, default=CheckpointEngineConfig().update_weights_bucket_megabytes
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--etp", type=int, help="default: --tp")
    parser.add_argument("--rollout-tp", type=int, default=1)
    parser.add_argument("--rollout-ep", type=int, default=1)
    add_device(parser)
    args = parser.parse_args()
    if args.tp is None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        with_experts = ("--preset", "qwen3_30b_a3b", "--num-layers", "2", "--overrides", json.dumps(EXPERTS))
        cases = [*CASES, *((ranks, (*with_experts, *layout)) for ranks, layout in EXPERT_CASES)]
        if args.device == "cpu" and args.engine == "vllm":  # vLLM has no expert parallelism on a CPU
            cases = [case for case in cases if "--rollout-ep" not in case[1]]
        most = torch.cuda.device_count() if args.device == "cuda" else max(ranks for ranks, _ in cases)
        for ranks, layout in [case for case in cases if case[0] <= most]:
            subprocess.run([*command, str(ranks), __file__, *sys.argv[1:], *layout], check=True)
        return 0
    result = run_case(args, launch.init_distributed(args.device))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    launch.shutdown_distributed()
    return 0


@contextmanager
def refit_of(
    args: argparse.Namespace, arch: ArchSpec, grid: ParallelLayout, device: torch.device
) -> Iterator[tuple[WeightSync, RolloutEngine]]:
    """Collective over the job: yields a weight sync of random weights, and its engine."""
    rank = dist.get_rank()
    layout = megatron_layout(arch, grid, rank, dtype=args.dtype, te=False)
    sources = allocate(layout, device)
    if grid.world_size > 1:  # as the actor's weights
        shared_memory.share(sources.values())
    random_init(arch, layout, sources, seed=0)
    config = RolloutConfig(
        name=args.engine,
        gpu_memory_utilization=CACHE_SHARE,
        tensor_model_parallel_size=grid.rollout_tp,
        expert_parallel_size=grid.rollout_ep,
    )
    with tempfile.TemporaryDirectory() as folder:
        write_metadata_files(Path(folder), arch, {SINGLE: hf_layout(arch, args.dtype)}, None)
        engine: RolloutEngine = find("engines", args.engine, "ENGINE")(
            EngineSpec(
                config=config,
                arch=arch,
                tp_group=make_rollout_group(grid, rank),
                device=device,
                dtype=getattr(torch, args.dtype),
                decode=str,
                write_model_folder=lambda _: Path(folder),
                timeout_s=60.0,
                trains_on_logprobs=False,
            )
        )
        yield WeightSync(layout, sources, engine, CheckpointEngineConfig(args.bucket_megabytes)), engine
        engine.close()


def measure(
    refit: WeightSync, engine: RolloutEngine, args: argparse.Namespace, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Collective over the job: runs weight syncs and their comparisons alternately.

    Returns:
        (wall-clock seconds of each, until the last rank is done; median CPU seconds over all ranks) of "refit", of
        "finish" in it on this rank, of "memcpy" and of "sockets".
    """
    plan, world = refit.plan, dist.get_world_size()
    size = sum(copy.num_bytes for copy in plan.copies if copy.target_rank == dist.get_rank())
    given = torch.empty(size // ITEM_BYTES[args.dtype], dtype=getattr(torch, args.dtype), device=device)
    other = torch.ones_like(given)
    sent = torch.ones(MIN_ROUND_BYTES, dtype=torch.uint8, device=device)
    messages = (sent, torch.empty_like(sent))
    times: dict[str, list[float]] = {"refit": [], "finish": [], "memcpy": [], "sockets": []}
    cpu: dict[str, list[float]] = {name: [] for name in times}

    def timed(name: str, action: Callable[[], object], before: Callable[[], object]) -> None:
        before()
        began, used = time.perf_counter(), time.process_time()
        action()
        before()
        times[name].append(time.perf_counter() - began)
        cpu[name].append(time.process_time() - used)

    def together() -> None:
        synchronize(device)
        dist.barrier()

    finish = engine.finish_update
    for version in range(args.repeats + 1):
        engine.finish_update = lambda policy_version: timed(  # type: ignore[method-assign]
            "finish", functools.partial(finish, policy_version), functools.partial(synchronize, device)
        )
        timed("refit", functools.partial(refit, version), together)
        timed("memcpy", lambda: given.copy_(other), together)
        timed("sockets", functools.partial(send_around, plan.bytes_moved // world, messages), together)
        if version == 0:  # warm-up; the first refit also compares the engine's sum over all that it stores
            for values in (*times.values(), *cpu.values()):
                values.clear()
    totals = torch.tensor([statistics.median(values) for values in cpu.values()])
    dist.all_reduce(totals)
    return times, dict(zip(cpu, totals.tolist(), strict=True))


def run_case(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Collective over the job: measures one layout."""
    arch = arch_from_preset(args.preset, {"num_hidden_layers": args.num_layers, **args.overrides}, None)
    grid = ParallelLayout(
        dist.get_world_size(),
        args.tp,
        args.pp,
        ep=args.ep,
        etp=args.etp,
        rollout_tp=args.rollout_tp,
        rollout_ep=args.rollout_ep,
    )
    with refit_of(args, arch, grid, device) as (refit, engine):
        times, used = measure(refit, engine, args, device)
        plan = refit.plan
    sync_s, memcpy_s = statistics.median(times["refit"]), statistics.median(times["memcpy"])
    packing, gathered = statistics.median(times["finish"]), full_gather_bytes(args.engine, arch, grid, args.dtype)
    total = plan.bytes_local + plan.bytes_moved
    return {
        "bench": "refit",
        "engine": args.engine,
        "model": f"{args.preset}, {arch.num_layers} layers",
        "dtype": args.dtype,
        "layout": described(arch, grid),
        "ratio": round(memcpy_s / sync_s, 3),
        "ratio_transport": round(memcpy_s / (sync_s - packing), 3),
        "ratio_cpu": round(used["memcpy"] / (used["refit"] - used["finish"]), 3),
        "ratio_sockets": round(statistics.median(times["sockets"]) / (sync_s - packing), 3)
        if plan.bytes_moved
        else None,
        "refit_s": spread(times["refit"]),
        "finish_s": spread(times["finish"]),
        "memcpy_s": spread(times["memcpy"]),
        "sockets_s": spread(times["sockets"]) if plan.bytes_moved else None,
        "gb_per_s": round(total / (sync_s - packing) / 1e9, 2),
        "memcpy_gb_per_s": round(total / memcpy_s / 1e9, 2),
        "bytes_local": plan.bytes_local,
        "bytes_moved": plan.bytes_moved,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "full_gather_bytes": gathered,
        "traffic_ratio": round(gathered / plan.bytes_moved, 2) if plan.bytes_moved else None,
        "peak_staging_bytes": plan.peak_staging_bytes(args.bucket_megabytes << 20),
        "compiled": checked_copy.compiled()[0] is not None,
        "device": device_name(device.type),
        "num_threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__},
        "commit": commit(),
    }


def send_around(num_bytes: int, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Collective over the job: sends `num_bytes` to the next rank and receives as many from the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for start in range(0, num_bytes, MIN_ROUND_BYTES):
        sent, received = (buffer[: num_bytes - start] for buffer in buffers)
        operations = [
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def described(arch: ArchSpec, grid: ParallelLayout) -> str:
    """Returns the layout as text."""
    actor, engine = f"tp {grid.tp} x dp {grid.dp} x pp {grid.pp}", f"tp {grid.rollout_tp}"
    if arch.moe is not None:
        actor += f", experts ep {grid.ep} x etp {grid.expert_tp}"
        engine += f", experts ep {grid.rollout_ep} x tp {grid.rollout_moe_tp}"
    return f"{actor} -> rollout {engine}, {grid.world_size} ranks"


def full_gather_bytes(engine: str, arch: ArchSpec, grid: ParallelLayout, dtype: str) -> int:
    """Returns the bytes that ranks would receive if every rank gathered every full tensor."""
    sources = megatron_layouts(arch, grid, dtype=dtype, te=False)
    return traffic(sources, LAYOUTS[engine](arch, grid, dtype), grid.world_size).full_gather_bytes


if __name__ == "__main__":
    sys.exit(main())
