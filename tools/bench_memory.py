"""Compares the predicted and the measured memory of real runs: each rank's peak per phase.

    python tools/bench_memory.py                       # all layouts
    python tools/bench_memory.py --layout tp2 --layout pp2
    python tools/bench_memory.py --device cuda         # the layouts for which there are GPUs

Each layout is a job of new processes that runs two GRPO steps with a reference, as `mrl train` does; the second is
measured, since the first allocates buffers and optimizer states. Before it the same ranks run two steps with a tiny
model; their memory then is what a process needs for mrl with any model (code pages, modules imported on first use,
buffers of process groups), reported as `process_mb`. Measured is the peak resident set of a phase
(`mrl/observability/memory_peaks.py`) minus the resident set before the model; predicted is
`mrl/commands/plan/memory.py` without allowance. The C library's allocator returns large blocks immediately
(MALLOC_MMAP_THRESHOLD_), so that the resident set is the allocated memory, and oneDNN keeps few kernels
(ONEDNN_PRIMITIVE_CACHE_CAPACITY). On a GPU both figures are torch's allocated memory, and models are in bfloat16.
Prints one JSON line per layout.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from bench.measure import add_device, device_name

from mrl.commands.plan.memory import memory_by_stage
from mrl.config.config import load
from mrl.distributed.local_ranks import free_port
from mrl.engines._memory_plan import Device
from mrl.engines.native.packed_linear import compute_dtype
from mrl.models.kernels.bindings import load_library
from mrl.models.transformer_engine import why_local
from mrl.resharding.copy_op import Copy
from mrl.resharding.dtypes import DTYPES
from mrl.train import reinforcement_step
from mrl.trainer.run_plan import RunPlan, build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.trainer import Trainer

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one": (1, []),
    "one_recompute": (1, ["actor.recompute=full"]),
    "one_offload": (1, [f"actor.{part}_offload=true" for part in ("param", "grad", "optimizer")]),
    "tp2": (
        2,
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "rollout.tensor_model_parallel_size=2",
        ],
    ),
    "pp2": (2, ["parallel.pipeline_model_parallel_size=2"]),
    "dp2": (2, []),
    "lora": (1, ["actor.lora.rank=16"]),
    "lora_beside": (1, ["actor.lora={rank: 16, merge: false}"]),
    "lora_tp2": (
        2,
        [
            "actor.lora.rank=16",
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "rollout.tensor_model_parallel_size=2",
        ],
    ),
    "ep2": (
        2,
        [
            "model.preset=qwen3_moe_tiny",
            "model.overrides={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 352}",
            "parallel.expert_model_parallel_size=2",
            "rollout.tensor_model_parallel_size=2",
            "rollout.expert_parallel_size=2",
        ],
    ),
}
"""Layout -> (number of ranks, overrides of `CONFIG`)."""

CONFIG: dict[str, Any] = {
    "model": {
        "preset": "qwen3_tiny",
        "overrides": {
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "intermediate_size": 1408,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 16000,
            "tie_word_embeddings": False,
        },
        "tokenizer": "char:0123456789+=#",
        "dtype": "float32",
    },
    "train": {"num_steps": 2, "batch_size": 8},
    "actor": {"max_tokens_per_microbatch": 1200, "logprob_chunk_tokens": 512},
    "rollout": {"n": 8, "prompt_length": 32, "response_length": 32, "ignore_eos": True},
    "algorithm": {"kl_in": "loss"},
    "reward": {"functions": [{"name": "length", "kwargs": {"target": 16, "limit": 32}}]},
    "run": {"num_threads": 1},
    "observe": {"console": "off", "tensorboard": False, "report": False},
}
SMALL = [
    f"model.overrides.{name}={size}"
    for name, size in {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }.items()
]
"""Overrides for a tiny model that fits any layout."""
PHASES = {"update_weights": "refit", "gen": "rollout", "ref": "score", "update_actor": "update"}
"""Phases of the training loop -> those of the prediction."""
MMAP_THRESHOLD = 1 << 16
KERNELS = 16
"""Kernels that oneDNN caches. It generates code for each shape of a product, up to 1024 by default; the number of rows
of an expert varies.
"""
SEED = 0


def run_rank(layout: str, folder: Path, port: str) -> None:
    """Runs one rank of two jobs, the second of which connects at `port`, and writes its prediction and measurement."""
    given = [*LAYOUTS[layout][1]]
    small = build_run_plan(load(folder / "run.yaml", [*given, *SMALL]))
    before = held_bytes(small.config.run.device)
    with two_steps(small):
        pass
    os.environ["MASTER_PORT"] = port
    plan = build_run_plan(load(folder / "run.yaml", given))
    baseline = held_bytes(plan.config.run.device)
    with two_steps(plan) as trainer:
        device, rank, stage = predicted_on(trainer), trainer.groups.rank, trainer.groups.coords.pp
        moved = most_moved_bytes(trainer.rollout_worker.weight_sync.plan.copies)
        peaks = trainer.timers.ledger.peaks
    predicted = memory_by_stage(plan, device, moved_bytes=moved)[stage]
    measured = {predicted_phase: peaks[phase] - baseline for phase, predicted_phase in PHASES.items()}
    rows = {
        phase: {
            "predicted_mb": predicted.total(phase) / 1e6,
            "measured_mb": measured[phase] / 1e6,
            "ratio": predicted.total(phase) / measured[phase],
            "terms_mb": {term: size / 1e6 for term, size in predicted.phases[phase].items()},
        }
        for phase in measured
    }
    (folder / f"rank{rank}.json").write_text(json.dumps({"process_mb": (baseline - before) / 1e6, "phases": rows}))


@contextmanager
def two_steps(plan: RunPlan) -> Iterator[Trainer]:
    """Collective over the job: runs two steps; the body runs with everything still allocated."""
    with open_trainer(plan, log=False) as trainer:
        trainer.resume()
        with trainer.timers.step(0):
            trainer.init_reference_and_critic(0)
        for step in (1, 2):
            with trainer.timers.step(step):
                reinforcement_step(trainer, step)
        yield trainer


def held_bytes(device: str) -> int:
    """Returns the memory of this process."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss


def predicted_on(trainer: Trainer) -> Device:
    """Returns this rank's device, for the prediction."""
    if trainer.device.type == "cuda":
        return Device(te=why_local(trainer.config, trainer.arch, trainer.device.type) is None)
    dtype = DTYPES[trainer.config.rollout.dtype or trainer.config.model.dtype]
    copies = compute_dtype(dtype, trainer.device).itemsize
    compiles = load_library(DTYPES[trainer.config.model.dtype])[0] is not None
    return Device(te=False, engine_copies=copies, is_host=True, compiles=compiles)


def most_moved_bytes(copies: Sequence[Copy]) -> int:
    """Returns the bytes that the busiest rank sends or receives in a weight sync."""
    busy: Counter[tuple[str, int]] = Counter()
    for copy in copies:
        if copy.source_rank != copy.target_rank:
            busy["sends", copy.source_rank] += copy.num_bytes
            busy["receives", copy.target_rank] += copy.num_bytes
    return max(busy.values(), default=0)


def run_layout(layout: str, device: str, *, details: bool) -> dict[str, Any]:
    """Starts the ranks of a layout and collects their results."""
    size = LAYOUTS[layout][0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, device)
        ranks = []
        first, second = str(free_port()), str(free_port())
        for rank in range(size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": first,
                "OMP_NUM_THREADS": "1",
                "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD),
                "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KERNELS),
            }
            command = [sys.executable, __file__, "--rank-of", layout, "--folder", name, "--port", second]
            ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        for rank, process in enumerate(ranks):
            _, error = process.communicate()
            if process.returncode:
                raise RuntimeError(f"{layout}, rank {rank}:\n{error}")
        found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]
    phases = {}
    for phase in found[0]["phases"]:
        each = [rank["phases"][phase] for rank in found]
        phases[phase] = {
            key: [round(rank[key], 3 if key == "ratio" else 1) for rank in each]
            for key in ("predicted_mb", "measured_mb", "ratio")
        }
        if details:
            phases[phase]["terms_mb"] = [
                {term: round(value, 1) for term, value in rank["terms_mb"].items()} for rank in each
            ]
    without_model = [round(rank["process_mb"], 1) for rank in found]
    peaks = []
    for rank in found:
        peak = {key: max(phase[key] for phase in rank["phases"].values()) for key in ("predicted_mb", "measured_mb")}
        peaks.append(round(peak["predicted_mb"] / peak["measured_mb"], 3))
    return {"layout": layout, "ranks": size, "peak_ratio": peaks, "process_mb": without_model, "phases": phases}


def write_inputs(folder: Path, device: str) -> None:
    """Writes prompts of equal length and the config; in bfloat16 on a GPU."""
    digits = random.Random(SEED)
    length = CONFIG["rollout"]["prompt_length"]
    rows = [
        {"prompt": "".join(digits.choice("0123456789") for _ in range(length)), "answer": "1"}
        for _ in range(CONFIG["train"]["batch_size"])
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {**CONFIG, "run": {**CONFIG["run"], "device": device, "output_dir": str(folder / "run")}}
    config["model"] = {**CONFIG["model"], "dtype": "bfloat16" if device == "cuda" else "float32"}
    config["data"] = {"train_files": [str(folder / "prompts.jsonl")]}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def main() -> None:
    """Prints a JSON line per layout."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="default: all")
    parser.add_argument("--details", action="store_true", help="also print the prediction's terms")
    parser.add_argument("--rank-of", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    add_device(parser)
    arguments = parser.parse_args()
    if arguments.rank_of:
        run_rank(arguments.rank_of, arguments.folder, arguments.port)
        return
    most = torch.cuda.device_count() if arguments.device == "cuda" else len(LAYOUTS)
    for layout in arguments.layout or [name for name, (ranks, _) in LAYOUTS.items() if ranks <= most]:
        line = {"bench": "memory", "device": device_name(arguments.device), "torch": torch.__version__}
        found = run_layout(layout, arguments.device, details=arguments.details)
        print(json.dumps({**line, **found}), flush=True)


if __name__ == "__main__":
    main()
