"""Benchmarks asynchronous training: overlap of sampling with updates, and partial rollouts, as ratios within one run.

    python tools/bench_async.py                       # both parts, one core per rank
    python tools/bench_async.py --part overlap --steps 20
    python tools/bench_async.py --part tail --slow 0.05 --factor 8 --samples 8

overlap: one training rank and one rollout rank, each on its own core, with `train.mode=async` one step ahead. Lengths
are chosen so that both have about the same work. "ratio" is the median over steps of the step's time over the longer of
the two ranks' work in it (sampling and scoring; or log-probabilities and updates). 1 is perfect overlap.

tail: a share of the responses (`--slow`) is `--factor` times as long as the others, the same ones in both runs,
selected by the seed of their random numbers. The two runs are separate processes that alternate step by step. A prompt
has `--samples` responses and is complete when all of them are: with 2, one prompt in ten has a long response, with 8
one in three. "ratio" is the samples per second with `rollout.over_sample_rate` (`--rate`) over those without, for
complete steps. "ratio_of_sampling" is the same for sampling alone, which takes "sampling_part" of the steps of the run
without.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.measure import commit, device_name, spread

from mrl.config.config import load
from mrl.distributed.local_ranks import free_port
from mrl.engines.native.decode_state import DecodeState
from mrl.train import run_step
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.trainer import Trainer

WARM_UP = {"overlap": 2, "tail": 8}
"""Untimed steps; in "tail" until as many long responses end as start."""

MODELS = {
    "overlap": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704, "num_attention_heads": 4},
    "tail": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 176, "num_attention_heads": 4},
}
"""Model shapes; with that of "tail" a decode step takes about as long for many rows as for few, as on a GPU."""
MAX_SEQS = 4
"""Sequences that the rollout rank decodes at a time; with more it would finish long before the updates."""

SAMPLING = ("gen", "reward")
TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases of the rollout rank and of the training rank."""


def settings(folder: Path, part: str, *, steps: int, batch_size: int, **rollout: Any) -> dict[str, Any]:
    """Returns the config of a run on additions with random weights and responses of the length in `rollout`."""
    return {
        "run": {"output_dir": str(folder / "run"), "num_threads": 1, "seed": 0, "device": "cpu"},
        "model": {
            "preset": "qwen2_tiny",
            "overrides": {**MODELS[part], "max_position_embeddings": 4096},
            "tokenizer": "char:0123456789<>+#",
            "dtype": "float32",
        },
        "data": {"task": "addition", "task_kwargs": {"min_terms": 2, "max_terms": 3, "max_value": 9, "num_val": 0}},
        "train": {"num_steps": steps, "batch_size": batch_size},
        "actor": {"lr": 1e-5, "max_tokens_per_microbatch": 8192},
        "rollout": {"prompt_length": 12, "ignore_eos": True, **rollout},
        "algorithm": {"name": "grpo"},
        "observe": {"console": "off", "report": False, "tensorboard": False},
    }


def measured(trainer: Trainer, step: int) -> dict[str, float]:
    """Runs a step and returns the time of its phases and of the step, s."""
    with trainer.timers.step(step):
        metrics = run_step(trainer, step)
    timings = trainer.timers.metrics()
    trainer.log.step(step, metrics | trainer.rates.metrics())
    return {name.removeprefix("timing_s/"): seconds for name, seconds in timings.items()}


def rank_of_overlap(rank: int, port: int, config: dict[str, Any], pipe: Connection | None) -> None:
    """Runs one rank of "overlap" on its own core; rank 0 sends the measurements."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    where = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()}, MASTER_ADDR="127.0.0.1")
    found = []
    with open_trainer(build_run_plan(load(config), resumes=False)) as trainer:
        trainer.resume()
        trainer.init_reference_and_critic(0)
        for step in range(1, config["train"]["num_steps"] + 1):
            found.append(measured(trainer, step))
    if pipe is not None:
        pipe.send(found)


def overlap(steps: int, response_len: int) -> dict[str, Any]:
    """Runs the two ranks of "overlap" and returns the result."""
    with tempfile.TemporaryDirectory() as name:
        config = settings(
            Path(name),
            "overlap",
            steps=WARM_UP["overlap"] + steps + 1,
            batch_size=32,
            n=2,
            max_num_seqs=MAX_SEQS,
            response_length=response_len,
            num_ranks=1,
        )
        config["train"] |= {"mode": "async", "max_off_policy_steps": 1}
        processes, port = multiprocessing.get_context("spawn"), free_port()
        parent_end, child_end = processes.Pipe()
        ranks = [
            processes.Process(target=rank_of_overlap, args=(rank, port, config, child_end if rank == 0 else None))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        child_end.close()
        found = parent_end.recv()[
            WARM_UP["overlap"] : -1
        ]  # EOFError if rank 0 failed, which printed its error; the last step samples nothing
        for process in ranks:
            process.join()
    sides = [[sum(phases.get(name, 0.0) for name in side) for phases in found] for side in (SAMPLING, TRAINING)]
    ratios = [one["step"] / max(pair) for one, pair in zip(found, zip(*sides, strict=True), strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "step_s": spread([one["step"] for one in found]),
        "sampling_s": spread(sides[0]),
        "training_s": spread(sides[1]),
        "in_turns_over_step": round(sum(map(sum, sides)) / sum(one["step"] for one in found), 3),
        "response_len": response_len,
        "steps": len(found),
    }


def lengths_by_key(short: int, factor: int, slow: float) -> None:
    """Ends responses in this process's engine at lengths that follow from the keys of their random numbers."""
    begin = DecodeState.begin

    def begun(
        self: DecodeState, rows: Sequence[int], prompt_lens: Sequence[int], keys: Sequence[int], rooms: Sequence[int]
    ) -> Any:
        chosen = [short * factor if key % 1000 < 1000 * slow else short for key in keys]
        return begin(self, rows, prompt_lens, keys, [min(pair) for pair in zip(chosen, rooms, strict=True)])

    DecodeState.begin = begun  # type: ignore[method-assign]


def run_of_tail(config: dict[str, Any], trace: tuple[int, int, float], pipe: Connection) -> None:
    """Runs one side of "tail": takes a step per message and answers with the time of its phases."""
    lengths_by_key(*trace)
    with open_trainer(build_run_plan(load(config), resumes=False)) as trainer:
        trainer.resume()
        trainer.init_reference_and_critic(0)
        for _ in range(config["train"]["num_steps"]):
            phases = measured(trainer, pipe.recv())
            pipe.send(phases)


def tail(steps: int, short: int, factor: int, slow: float, samples: int, rate: float) -> dict[str, Any]:
    """Runs both sides of "tail" and returns the result."""
    kinds = {"sync": {}, "over": {"over_sample_rate": rate}}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    sampling: dict[str, list[float]] = {name: [] for name in kinds}
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = {}, []
        for name, more in kinds.items():
            config = settings(
                Path(folder) / name,
                "tail",
                steps=WARM_UP["tail"] + steps,
                batch_size=8,
                n=samples,
                response_length=short * factor,
                **more,
            )
            pipes[name], child_end = processes.Pipe()
            ranks.append(processes.Process(target=run_of_tail, args=(config, (short, factor, slow), child_end)))
            ranks[-1].start()
            child_end.close()
        for step in range(1, WARM_UP["tail"] + steps + 1):
            for name in sorted(pipes, reverse=step % 2 == 0):
                pipes[name].send(step)
                phases = pipes[name].recv()
                if step > WARM_UP["tail"]:
                    times[name].append(phases["step"])
                    sampling[name].append(phases.get("gen", 0.0))  # nothing is sampled if enough groups are complete
        for process in ranks:
            process.join()
    return {
        "ratio": round(sum(times["sync"]) / sum(times["over"]), 3),  # a step has the same number of samples in both
        "ratio_of_sampling": round(sum(sampling["sync"]) / sum(sampling["over"]), 3),
        "sampling_part": round(sum(sampling["sync"]) / sum(times["sync"]), 3),
        "slow": slow,
        "factor": factor,
        "samples": samples,
        "rate": rate,
        "response_len": short,
        "steps": steps,
        "sync_s": spread(times["sync"]),
        "over_s": spread(times["over"]),
    }


def main() -> None:
    """Prints a JSON line per part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("overlap", "tail"), nargs="*", default=["overlap", "tail"])
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--response-len", type=int, default=48, help="response length, tokens; tail: of short ones")
    parser.add_argument("--slow", type=float, default=0.05, help="tail: share of long responses")
    parser.add_argument("--factor", type=int, default=8, help="tail: length of long over short responses")
    parser.add_argument("--samples", type=int, default=2, help="tail: responses per prompt")
    parser.add_argument("--rate", type=float, default=1.0, help="tail: rollout.over_sample_rate")
    given = parser.parse_args()
    began = time.strftime("%Y-%m-%d")
    for part in given.part:
        if part == "overlap":
            found = overlap(given.steps, given.response_len)
        else:
            found = tail(given.steps, given.response_len, given.factor, given.slow, given.samples, given.rate)
        versions = {name: version(name) for name in ("torch", "megatron-core")}
        about = {"model": MODELS[part], "device": device_name("cpu"), "versions": versions, "commit": commit()}
        print(json.dumps({"bench": f"async_{part}", "date": began, **found, **about}), flush=True)


if __name__ == "__main__":
    main()
