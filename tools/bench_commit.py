"""Benchmarks asynchronous checkpointing: the time of a step while a checkpoint is written over that of a step without.

    python tools/bench_commit.py
    python tools/bench_commit.py --device cuda --repeats 20 model.dtype=bfloat16 model.overrides.hidden_size=1024

One process runs GRPO steps as `mrl train` does, with `checkpoint.async_save=true`: pairs of one step while a checkpoint
is written and one without, in alternating order. On a CPU training has `--num-threads` threads, by default all cores
but one. Run it on an idle machine: without a free core, writing takes time from the training. A step should take longer
than the writing (`written_frac`), so that it is exposed to all of it. Prints one JSON line: the median ratio of a
pair's times; the same with the time that training waited for copies and for the checkpoint added to the step; and the
time of a synchronous checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.measure import add_device, commit, device_name, seconds, spread

from mrl.config.config import Config, load
from mrl.train import reinforcement_step
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.trainer import Trainer

WARM_UP = 2
CONFIG: dict[str, Any] = {
    "model": {
        "preset": "qwen3_tiny",
        "overrides": {
            "hidden_size": 512,
            "num_hidden_layers": 4,
            "intermediate_size": 1408,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 4096,
        },
        "tokenizer": "char:0123456789<>+#",
        "dtype": "float32",
    },
    "data": {"task": "addition"},
    "train": {"num_steps": 1_000_000, "batch_size": 8},
    "actor": {"max_tokens_per_microbatch": 1200},
    "rollout": {"n": 8, "prompt_length": 32, "response_length": 32, "ignore_eos": True},
    "reward": {"functions": [{"name": "length", "kwargs": {"target": 16, "limit": 32}}]},
    "observe": {"console": "off", "tensorboard": False, "report": False},
    "checkpoint": {"async_save": True, "keep_last": 1},
}


@dataclass(frozen=True)
class Written:
    """Step during which a checkpoint was written, times in s.

    Attributes:
        step: Time of the step.
        waited: Time that training waited, before and after the step.
        files: Time from the first byte to the last hash.
        done: True if the files were complete when the step ended.
    """

    step: float
    waited: float
    files: float
    done: bool


def main() -> None:
    """Parses the command line and prints the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="number of pairs; default: 10")
    parser.add_argument("--num-threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="overrides of the config")
    add_device(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        run = {"output_dir": f"{folder}/run", "device": given.device, "num_threads": given.num_threads}
        config = load({**CONFIG, "run": run}, given.overrides)
        found = measure(config, given.repeats)
    threads = given.num_threads if given.device == "cpu" else None
    line = {"bench": "commit", **found, "device": device_name(given.device), "num_threads": threads}
    versions = {name: version(name) for name in ("torch", "megatron-core")}
    print(json.dumps({**line, "versions": versions, "commit": commit()}), flush=True)


def measure(config: Config, repeats: int) -> dict[str, Any]:
    """Runs the pairs in one job and returns the result."""
    plain: list[float] = []
    overlapped: list[Written] = []
    waiting: list[float] = []
    with open_trainer(build_run_plan(config)) as trainer:
        trainer.resume()
        step = 0
        for pair in range(-WARM_UP, repeats):
            for writes in (True, False) if pair % 2 else (False, True):
                step += 1
                found = step_while_writing(trainer, step) if writes else plain_step(trainer, step)
                if pair >= 0:
                    (overlapped if isinstance(found, Written) else plain).append(found)  # type: ignore[arg-type]
        for _ in range(min(3, repeats)):
            step += 1
            standing = trainer.progress.record_state(step, {})
            waiting.append(seconds(partial(trainer.checkpointing.write_saved_state, standing), trainer.device))
        files = [
            file.stat().st_size for file in trainer.checkpointing.checkpoints.path(step).rglob("*") if file.is_file()
        ]
    pairs = list(zip(overlapped, plain, strict=True))
    return {
        "ratio_step": round(statistics.median(one.step / other for one, other in pairs), 3),
        "ratio_with_waiting": round(statistics.median((one.step + one.waited) / other for one, other in pairs), 3),
        "ratios": [round(ours.step / theirs, 3) for ours, theirs in pairs],
        "step_s": spread(plain),
        "writing_step_s": spread([each.step for each in overlapped]),
        "waited_s": spread([each.waited for each in overlapped]),
        "files_s": spread([each.files for each in overlapped]),
        "written_frac": round(statistics.median(each.files / each.step for each in overlapped), 3),
        "done_within_step": sum(each.done for each in overlapped),
        "waiting_commit_s": spread(waiting),
        "commit_mb": round(sum(files) / 1e6, 1),
        "pairs": repeats,
    }


def plain_step(trainer: Trainer, step: int) -> float:
    """Returns the time of a step, s."""
    with trainer.timers.step(step):
        return seconds(lambda: reinforcement_step(trainer, step), trainer.device)


def step_while_writing(trainer: Trainer, step: int) -> Written:
    """Starts a checkpoint, runs a step, and returns the times of both."""
    began = time.perf_counter()
    trainer.checkpointing.write(step, {})
    waited, writing = time.perf_counter() - began, trainer.checkpointing.pending_writes
    if writing is None:
        raise RuntimeError("no checkpoint is being written")
    took = plain_step(trainer, step)
    done = writing.is_done
    while not writing.is_done:  # training does not wait here if steps are long
        time.sleep(0.01)
    began = time.perf_counter()
    trainer.checkpointing.finish_pending(wait=True)
    return Written(took, waited + time.perf_counter() - began, writing.seconds, done)


if __name__ == "__main__":
    main()
