"""Runs of episodes that are killed in the middle of one, again and again, and go on as if nobody had.

    python -m tests.e2e.episode_kills                          # ten kills of each task; about three minutes
    python -m tests.e2e.episode_kills --tasks calculator --ranks 2 --kills 10 --seed 5

Prints a JSON line for each task, and ends with 1 where a killed run has other metrics or samples than one that nobody
killed, computed another number of scores, left a process behind, or ended before it was killed so often. A moment is an
action on its way to its environment, of training and of evaluations, drawn at random; all ranks end by SIGKILL. With
two ranks the actor and the engine are split over both (TP 2).
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from mrl.distributed.local_ranks import fork_server_context, free_port
from tests.e2e import runs
from tests.ranks import PRELOAD

COMMON = [
    "train={batch_size: 4, minibatch_size: 2, eval_interval: 3}",
    "rollout.n=4",
    "data.task_kwargs.num_val=4",
    "checkpoint.interval=1",
    "observe={console: plain, tensorboard: false, report: false, num_samples: 4}",
    "run.num_threads=1",
]
TASKS = {
    "guessing": (
        "environment",
        "train.warm_start={num_steps: 30, batch_size: 16}",
        "model.overrides={hidden_size: 32, intermediate_size: 64}",
    ),
    "calculator": (
        "exact_match",
        "train.warm_start={num_steps: 250, batch_size: 32, lr_warmup_steps: 20}",
        "model.overrides={hidden_size: 64, intermediate_size: 256}",
        "data.task_kwargs.calls_frac=0.8",
    ),
}
"""Configs by name: the reward, and how the run is made small; the second's warm start ends in a policy that calls."""
SPLIT = ["parallel.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"]
MORE_STEPS = 3
"""Than kills: each start is killed within about two steps."""
GONE_S = 20
"""In which workers end by themselves."""


def reward(*, prompt, response, answer, extra, notes):
    """Counts its calls."""
    with open(notes, "a", encoding="utf-8") as file:
        file.write(json.dumps([prompt, response]) + "\n")
    return 0.1 * len(set(response))


def words(folder, task, *, steps, ranks):
    """The command line of a run."""
    given, *small = TASKS[task]
    counts = f"{{name: 'tests.e2e.episode_kills:reward', weight: 0.1, kwargs: {{notes: '{folder}/notes'}}}}"
    own = [f"run.output_dir={folder}/run", f"train.num_steps={steps}"]
    own += [f"reward.functions=[{{name: {given}}}, {counts}]", *(SPLIT if ranks > 1 else [])]
    return ["train", str(runs.REPOSITORY / f"configs/{task}.yaml"), *COMMON, *small, *own]


def _rank(folder, arguments, place, kill_at):
    """A rank of a run; the first one is killed at its `kill_at`th moment, 0: never, and the moments are counted."""
    rank, size, port = place
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    with open(folder / f"output{rank}.txt", "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    from mrl.environments.pool import EnvironmentPool

    moments, send = [0], EnvironmentPool.send

    def told(pool, episode, action):
        send(pool, episode, action)
        moments[0] += 1
        if moments[0] == kill_at:
            (folder / "workers").write_text(json.dumps([one.pid for one in psutil.Process().children(recursive=True)]))
            os.kill(os.getpid(), signal.SIGKILL)

    EnvironmentPool.send = told
    sys.argv = ["mrl", *arguments]
    from mrl.__main__ import main

    status = main()
    if rank == 0 and not kill_at:
        (folder / "moments").write_text(str(moments[0]))
    sys.exit(status)


def start(folder, arguments, ranks, kill_at=0):
    """Whether the run ended by the kill; its end otherwise must be a good one.

    Raises:
        AssertionError: A rank failed, or workers outlived theirs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, context = free_port(), fork_server_context(PRELOAD)
    processes = [
        context.Process(target=_rank, args=(folder, arguments, (rank, ranks, port), kill_at)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    wait([processes[0].sentinel], runs.TIMEOUT_S)
    processes[0].join(0)
    was_killed = processes[0].exitcode == -signal.SIGKILL
    for process in processes[1:]:
        if was_killed:
            process.kill()
        process.join(runs.TIMEOUT_S)
    if was_killed:
        workers, end = json.loads((folder / "workers").read_text()), time.monotonic() + GONE_S
        while (left := [pid for pid in workers if psutil.pid_exists(pid)]) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left, f"processes {left} outlived their rank"
        return True
    said = "".join((folder / f"output{rank}.txt").read_text()[-2000:] for rank in range(ranks))
    assert [process.exitcode for process in processes] == [0] * ranks, said
    return False


def result(folder):
    """What a run leaves that does not depend on the clock: metrics, samples, and how often each score was computed."""
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "run/samples.jsonl").read_text().splitlines()]
    clocks = ("timing", "perf")
    metrics = [
        {name: value for name, value in row.items() if not name.startswith(clocks) and name[-2:] != "_s"}
        for row in rows
    ]
    scores = collections.Counter((folder / "notes").read_text().splitlines())
    return {"metrics": metrics, "samples": samples, "scores": scores}


def compare(task, folder, *, kills, ranks, seed):
    """A run that nobody kills and one that is killed so often: what is the same, and how much it is."""
    steps = kills + MORE_STEPS
    whole, killed = folder / "whole", folder / "killed"
    assert not start(whole, words(whole, task, steps=steps, ranks=ranks), ranks)
    moments = int((whole / "moments").read_text())
    draw, number = random.Random(seed), 0
    drawn = [draw.randint(1, 2 * moments // steps) for _ in range(kills)]
    arguments = words(killed, task, steps=steps, ranks=ranks)
    while number < kills and start(killed, arguments, ranks, drawn[number]):
        number += 1
    if number == kills:
        start(killed, arguments, ranks)
    expected, found = result(whole), result(killed)
    return {
        "task": task,
        "ranks": ranks,
        "kills": number,
        "killed_at_action": drawn,
        "actions_of_a_whole_run": moments,
        "turns_of_an_episode": expected["metrics"][-1]["num_turns/mean"],
        "lines_of_metrics": len(expected["metrics"]),
        "samples": len(expected["samples"]),
        "scores_computed": [sum(one["scores"].values()) for one in (expected, found)],
        "same": {name: found[name] == expected[name] for name in expected},
        "holds": number == kills and found == expected,
    }


def main():
    """Prints what was found; 0 where all of it holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=0, help="draws the moments")
    given = parser.parse_args()
    holds = True
    for task in given.tasks:
        with tempfile.TemporaryDirectory() as name:
            line = compare(task, Path(name), kills=given.kills, ranks=given.ranks, seed=given.seed)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        holds &= line["holds"]
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
