"""Checks README's claims about the quickstart: low accuracy after warm start, high at the end, equal in each layout.

    python tools/check_quickstart.py                        # ten seeds, then three layouts; half an hour on two cores
    python tools/check_quickstart.py --seeds 0 1 --jobs 1   # two seeds, one run at a time
    python tools/check_quickstart.py --no-layouts

Each seed is a complete `mrl train configs/quickstart.yaml`. A layout is its warm start on two ranks, whose gradient
norms and losses are compared with the single process, step by step. Prints a table and one JSON line; exit status 1 if
a claim is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.measure import commit

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
WEAK, STRONG = 0.30, 0.90
"""Bounds of the validation accuracy: below the first after the warm start, above the second at the end."""
SAME = 1e-3
"""Largest relative difference of a warm start's gradient norms and losses between two layouts."""
LAYOUTS = {
    "tp2": ["parallel.tensor_model_parallel_size=2"],
    "pp2": ["parallel.pipeline_model_parallel_size=2"],
    "dp2": [],
}
QUIET = ["observe.console=off", "observe.tensorboard=false", "observe.report=false", "run.num_threads=1"]
ONE_STEP = ["train.num_steps=1", "actor.lr_schedule=constant"]
"""Overrides for a warm start and only one step after it."""

Row = dict[str, Any]


def run(folder: Path, overrides: list[str], ranks: int = 1) -> list[Row]:
    """Runs the quickstart and returns the lines of metrics.jsonl."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = ["-m", "mrl", "train", str(CONFIG), f"run.output_dir={folder}", *QUIET, *overrides]
    done = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of_seed(seed: int, folder: Path) -> Row:
    """Runs the quickstart with a seed and returns its accuracies and rewards."""
    began = time.monotonic()
    rows = run(folder / f"seed-{seed}", [f"run.seed={seed}"])
    held_out = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    rewards = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    return {
        "seed": seed,
        "after_warm_start": held_out[0],
        "at_the_end": held_out[-1],
        "first_reward": rewards[0],
        "last_reward": rewards[-1],
        "run_s": round(time.monotonic() - began),
    }


def warm_start(folder: Path, overrides: list[str], ranks: int = 1) -> list[Row]:
    """Runs the warm start and returns its lines of metrics.jsonl."""
    rows = run(folder, [*ONE_STEP, *overrides], ranks)
    return [row for row in rows if row["phase"] == "warm_start"]


def difference(one: list[Row], other: list[Row]) -> float:
    """Returns the largest relative difference of gradient norm and loss over all steps."""
    apart: list[float] = [
        abs(left[name] - right[name]) / abs(left[name])
        for left, right in zip(one, other, strict=True)
        for name in ("warm_start/grad_norm", "warm_start/loss")
    ]
    return max(apart)


def main() -> int:
    """Runs everything and prints the table; returns 0 if the claims are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs")
    parser.add_argument("--layouts", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(arguments.jobs) as pool:
        folder = Path(name)
        found = []
        print("seed  after warm start  at the end  reward, first and last step  s")
        for row in pool.map(lambda seed: of_seed(seed, folder), arguments.seeds):
            found.append(row)
            print(
                f"{row['seed']:4d}  {row['after_warm_start']:16.3f}  {row['at_the_end']:10.3f}  "
                f"{row['first_reward']:12.3f} {row['last_reward']:14.3f}  {row['run_s']:4d}",
                flush=True,
            )
        apart = {}
        if arguments.layouts:
            single = warm_start(folder / "single", [])
            for layout, overrides in LAYOUTS.items():
                apart[layout] = difference(single, warm_start(folder / layout, overrides, ranks=2))
                print(f"{layout}: warm start differs by {apart[layout]:.1e} at most", flush=True)
    weakest, strongest = max(row["after_warm_start"] for row in found), min(row["at_the_end"] for row in found)
    holds = weakest < WEAK and strongest > STRONG and all(value < SAME for value in apart.values())
    print(json.dumps({"commit": commit(), "holds": holds, "seeds": found, "layouts": apart}))
    return 0 if holds else 1


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main())
