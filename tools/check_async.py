"""Counts the quickstart's steps to a validation accuracy of 0.9: synchronous, one step off, and partial rollouts.

    python tools/check_async.py                            # five seeds of each setting; half an hour on two cores
    python tools/check_async.py --seeds 1 2 --settings sync async
    python tools/check_async.py algorithm.rollout_correction.bypass_mode=true     # for all settings but sync

Every run has the config's learning rates, and ends at that accuracy, which is measured every ten steps. "ratio" is the
mean number of steps over that of `sync`, over the seeds at which both ran. In `beyond` the engine has room for a sixth
of a step's samples, so that groups complete one after another and some remain incomplete.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.measure import commit

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
ENOUGH = 0.9
LOOK_S = 1.0
"""Interval at which a run's metrics are read, s."""
QUIET = ("observe.console=off", "observe.tensorboard=false", "observe.report=false", "run.num_threads=1")
SETTINGS = {
    "sync": (),
    "async": ("train.mode=async",),
    "beyond": ("rollout.over_sample_rate=0.5", "rollout.max_num_seqs=256"),
}


def run(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the step at which a run reached the accuracy (None: never), and the mean number of carried groups."""
    words = ["-m", "mrl", "train", str(CONFIG), f"run.output_dir={folder}", *QUIET, *overrides]
    path, environment = folder / "metrics.jsonl", {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=subprocess.STDOUT, env=environment)
        there, rows = None, list[dict[str, Any]]()
        while there is None and process.poll() is None:
            time.sleep(LOOK_S)
            rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
            there = next((row["step"] for row in rows if row.get("val/accuracy", 0.0) >= ENOUGH), None)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        elif process.returncode:
            log.seek(0)
            raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{log.read()[-3000:]}")
        process.wait()
    carried = [row["rollout/num_carried_groups"] for row in rows if "rollout/num_carried_groups" in row]
    return {"steps": there, "carried_groups": round(statistics.mean(carried), 1) if carried else 0.0}


def main() -> None:
    """Prints a line per run, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--settings", choices=SETTINGS, nargs="+", default=list(SETTINGS))
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs")
    parser.add_argument("overrides", nargs="*", help="key=value, for all settings but sync")
    arguments = parser.parse_intermixed_args()
    todo = [(name, seed) for seed in arguments.seeds for name in arguments.settings]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:

        def of(case: tuple[str, int]) -> dict[str, Any]:
            name, seed = case
            more = () if name == "sync" else arguments.overrides
            return run(Path(folder) / f"{name}-{seed}", [f"run.seed={seed}", *SETTINGS[name], *more])

        found: dict[str, dict[int, Any]] = {name: {} for name in arguments.settings}
        for (name, seed), one in zip(todo, pool.map(of, todo), strict=True):
            found[name][seed] = one
            print(f"{name:7s} seed {seed}: {one}", flush=True)
    steps = {name: [one["steps"] for one in runs.values()] for name, runs in found.items()}
    ratios = {
        name: round(statistics.mean(counts) / statistics.mean(steps["sync"]), 3)
        for name, counts in steps.items()
        if name != "sync" and "sync" in steps and None not in [*counts, *steps["sync"]]
    }
    print(
        json.dumps(
            {
                "check": "async",
                "commit": commit(),
                "ratio": ratios,
                "steps": steps,
                "seeds": arguments.seeds,
                "carried_groups": {
                    name: [one["carried_groups"] for one in runs.values()] for name, runs in found.items()
                },
                "overrides": arguments.overrides,
            }
        )
    )


if __name__ == "__main__":
    main()
