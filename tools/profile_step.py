"""Profiles a GRPO step on a CPU: time in matrix products, other kernels, and the host.

    python tools/profile_step.py                           # the cases of small models, fp32
    python tools/profile_step.py --case middle --steps 1
    python tools/profile_step.py --plain                   # the actor without mrl's compiled kernels

The work is that of mrl in `tools/bench_step.py`, on one thread, measured in CPU time, so that other load and the reward
workers do not count. Prints one JSON line per case:

    processor_s     CPU time of one step, the median of `--steps` after three (two, if there is one)
    times_floor     CPU time over that of a step's products at matmul_gflop_per_s, the rate of a product of two squares
    shares          its parts. The update: products of the layers, forward and backward; head, the output matrix with
                    log-probabilities and entropy; attention, with RoPE; norms and activations; microbatches, cutting
                    the batch; optimizer; rest of update: Megatron's Python, autograd, residual sums, metrics (with
                    --plain also attention, norms and activations). Then rollouts, refit, rewards, pack, and rest
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench.measure import PartTimes, commit, device_name, matrix_rate
from bench.roofline import limits
from bench_step import CASES, Case, job_config, mrl_step, write_inputs

from mrl.algorithms.functional.logprobs import _LinearLogprobs
from mrl.megatron import model
from mrl.megatron.cpu import layers
from mrl.megatron.forward_backward import ForwardBackward
from mrl.models.kernels.training import TrainingKernels
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.trainer import Trainer

CPU = torch.device("cpu")
PARTS: dict[str, list[tuple[Any, str]]] = {
    "products": [(layers, "rows_times"), (layers, "accumulate_weight_gradient")],
    "head": [(_LinearLogprobs, "forward"), (_LinearLogprobs, "backward")],
    "attention": [
        (TrainingKernels, "attend"),
        (TrainingKernels, "attention_backward"),
        (TrainingKernels, "rope_forward"),
    ],
    "norms and activations": [
        (TrainingKernels, name) for name in ("norm_forward", "norm_gradients", "gate_forward", "gate_gradient")
    ],
    "microbatches": [(ForwardBackward, "microbatches")],
}
"""Name in "shares" -> functions of an update; none of them calls another."""
PHASES = {"generate_rollouts": "rollouts", "score": "rewards", "dispatch_samples": "pack", "optimizer_step": "update"}
"""Functions of `mrl/train.py` -> name in "shares"."""


class Clock(PartTimes):
    """Timer of the functions of a step."""

    def attach(self, trainer: Trainer) -> None:
        """Wraps the functions of this process."""
        for part, functions in PARTS.items():
            for owner, name in functions:
                self._time(part, owner, name)
        train = importlib.import_module("mrl.train")
        for name, part in PHASES.items():
            self._time(part, train, name)
        self._time("refit", trainer, "sync_weights_if_stale")
        self._time("optimizer", trainer.actor.optimizer, "step")

    def _time(self, part: str, owner: Any, name: str) -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))


def main() -> None:
    """Parses the command line and prints a JSON line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), nargs="*", default=["small", "long_prompts"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=7, help="timed steps, of which the median is reported")
    parser.add_argument("--plain", action="store_true", help="PyTorch's operators between the actor's products")
    args = parser.parse_args()
    if args.plain:
        model.compiles = lambda dtype: False  # type: ignore[attr-defined]
    for name in args.case:
        with tempfile.TemporaryDirectory() as folder:
            found = profile(CASES[name], args.dtype, Path(folder), args.steps)
        operations = "PyTorch's" if args.plain else "compiled"
        print(json.dumps({"profile": "step", "case": name, **found, "operations": operations}), flush=True)


def profile(case: Case, dtype: str, folder: Path, steps: int) -> dict[str, Any]:
    """Runs steps and returns their profile."""
    write_inputs(case, folder)
    warm_up = 3 if steps > 1 else 2
    config = job_config(case, dtype, folder, "cpu", 1, steps=warm_up + steps)
    clock, step_times = Clock(), []
    with open_trainer(build_run_plan(config)) as trainer:
        trainer.resume()
        clock.attach(trainer)
        for step in range(1, warm_up + steps + 1):
            if step == warm_up + 1:
                clock.seconds.clear()
            began = time.thread_time()
            mrl_step(trainer, case, step)
            step_times.append(time.thread_time() - began)
        rate = matrix_rate(getattr(torch, dtype), CPU, time.thread_time)
    step_times, parts = step_times[warm_up:], dict(clock.seconds)
    of_update = ("update", *PARTS, "optimizer")
    parts["rest of update"] = parts.pop("update") - sum(parts.get(name, 0.0) for name in of_update[1:])
    parts["rest"] = sum(step_times) - sum(parts.values())
    median_s = statistics.median(step_times)
    bounds = limits(case, {"mrl": median_s}, rate)
    return {
        "dtype": dtype,
        "processor_s": round(median_s, 4),
        "times_floor": bounds["times_floor"]["mrl"],
        "shares": {
            name: round(taken / sum(step_times), 3) for name, taken in sorted(parts.items(), key=lambda x: -x[1])
        },
        "matmul_gflop_per_s": bounds["matmul_gflop_per_s"],
        "steps": steps,
        "device": device_name(),
        "num_threads": 1,
        "torch": torch.__version__,
        "commit": commit(),
    }


if __name__ == "__main__":
    main()
