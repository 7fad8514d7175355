"""What sampling beside the updates, and beyond a batch, gain: each as a ratio of times of one run.

    python tools/bench_async.py                       # both, one core for each rank
    python tools/bench_async.py --part overlap --steps 20
    python tools/bench_async.py --part tail --slow 0.05 --factor 8 --samples 8

overlap: a rank that trains and one that samples, each on a core of its own, `train.mode=async` one step ahead. Lengths
are such that either has about as much to do. "ratio" is the median over the steps of the step's time over the longer
of the two ranks' work in it: sampling and scoring, or scores and updates. 1: nothing but the longer one.

tail: of the responses a part (`--slow`) is `--factor` times as long as the others, the same ones in both runs, drawn by
the key of their random numbers. The two run in processes of their own, in turns of one step. A prompt has `--samples`
responses, and is whole when all of them are: with 2 one prompt in ten has a long one, with 8 one in three. "ratio" is
the samples per second with `rollout.over_sample_rate` (`--rate`) over those of a run without, of whole steps.
"ratio_of_sampling" is that of sampling alone, which takes "sampling_part" of the steps of the run without.
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
from mrl.train import one_step
from mrl.trainer.resolve import prepare
from mrl.trainer.startup import open_job
from mrl.trainer.trainer import Job

WARM_UP = {"overlap": 2, "tail": 8}
"""Steps; the second until as many long responses end as begin."""

MODELS = {
    "overlap": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 704, "num_attention_heads": 4},
    "tail": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 176, "num_attention_heads": 4},
}
"""With the second a decode step takes about as long for many rows as for few, as on a GPU."""
MAX_SEQS = 4
"""Sequences that the rank that samples decodes at a time: with more it would be done long before the updates are."""

SAMPLING = ("gen", "reward")
TRAINING = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
"""Phases of either side."""


def settings(folder: Path, part: str, *, steps: int, batch_size: int, **rollout: Any) -> dict[str, Any]:
    """A run of additions with random weights, whose responses have all the length that `rollout` says."""
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


def measured(job: Job, step: int) -> dict[str, float]:
    """Takes a step; its phases and its time, s."""
    with job.timers.step(step):
        metrics = one_step(job, step)
    timings = job.timers.metrics()
    job.log.step(step, metrics | job.rates.metrics())
    return {name.removeprefix("timing_s/"): seconds for name, seconds in timings.items()}


def rank_of_overlap(rank: int, port: int, config: dict[str, Any], pipe: Connection | None) -> None:
    """A rank of the run, on a core of its own; the first one sends what it measured."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    where = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()}, MASTER_ADDR="127.0.0.1")
    found = []
    with open_job(prepare(load(config), resumes=False)) as job:
        job.resume()
        job.begin(0)
        for step in range(1, config["train"]["num_steps"] + 1):
            found.append(measured(job, step))
    if pipe is not None:
        pipe.send(found)


def overlap(steps: int, response_len: int) -> dict[str, Any]:
    """The run of two ranks."""
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
        ours, theirs = processes.Pipe()
        ranks = [
            processes.Process(target=rank_of_overlap, args=(rank, port, config, theirs if rank == 0 else None))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        found = ours.recv()[
            WARM_UP["overlap"] : -1
        ]  # EOFError where it failed, which it has told; the last step samples nothing
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
    """A run that takes a step whenever it is told to, and answers with its time and the samples it took."""
    lengths_by_key(*trace)
    with open_job(prepare(load(config), resumes=False)) as job:
        job.resume()
        job.begin(0)
        for _ in range(config["train"]["num_steps"]):
            phases = measured(job, pipe.recv())
            pipe.send(phases)


def tail(steps: int, short: int, factor: int, slow: float, samples: int, rate: float) -> dict[str, Any]:
    """The two runs."""
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
            pipes[name], theirs = processes.Pipe()
            ranks.append(processes.Process(target=run_of_tail, args=(config, (short, factor, slow), theirs)))
            ranks[-1].start()
            theirs.close()
        for step in range(1, WARM_UP["tail"] + steps + 1):
            for name in sorted(pipes, reverse=step % 2 == 0):
                pipes[name].send(step)
                phases = pipes[name].recv()
                if step > WARM_UP["tail"]:
                    times[name].append(phases["step"])
                    sampling[name].append(phases.get("gen", 0.0))  # where enough was whole nothing is sampled
        for process in ranks:
            process.join()
    return {
        "ratio": round(sum(times["sync"]) / sum(times["over"]), 3),  # each step takes as many samples in either
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
    """Prints a JSON line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("overlap", "tail"), nargs="*", default=["overlap", "tail"])
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--response-len", type=int, default=48, help="tokens; of tail: of the short responses")
    parser.add_argument("--slow", type=float, default=0.05, help="part of the responses that is long")
    parser.add_argument("--factor", type=int, default=8, help="times as long")
    parser.add_argument("--samples", type=int, default=2, help="of tail: responses to a prompt")
    parser.add_argument("--rate", type=float, default=1.0, help="of tail: prompts beyond a batch, as a part of it")
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
