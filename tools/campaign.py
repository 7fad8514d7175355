r"""Fuzz test of parallel layouts: random runs must give the same numbers on one process and at a random layout.

    python tools/campaign.py --minutes 60
    python tools/campaign.py --first-seed 1017 --cases 1 --keep    # repeat one case and keep its folder

Each case draws a config, data and a layout (TP, PP, virtual stages, CP, EP, ETP, DP, replicas, microbatches, offload,
recompute, the distributed optimizer, often a resume at another layout), and runs `mrl train` on tiny models for two or
three steps, as one process and at the layout, on this machine's CPU. A case passes if both give the same metrics,
within 1e-4, and the same sampled tokens; or if both are refused with a message, or the layout for a reason of its own.
A traceback, a run that does not end and a difference are failures. The folder of a failed case is kept, with its
configs, data and the ranks' output.

Prints one JSON line per case, and a summary. Exit status: 0 all pass, 1 a case failed, 2 invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz_layouts.cases import draw
from fuzz_layouts.compare import GOOD, judge
from fuzz_layouts.runner import ALONE, SPREAD, run_side, write_files


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="number of cases; default: no limit with --minutes")
    parser.add_argument("--minutes", type=float, help="start no case after this time; default: no limit with --cases")
    parser.add_argument("--first-seed", type=int, default=1, help="seed of the first case; default: %(default)s")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/campaign"), help="default: %(default)s")
    parser.add_argument("--time-limit-s", type=float, default=180.0, help="limit of each start; default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="also keep the folders of cases that pass")
    given = parser.parse_args(arguments)
    if given.cases is None and given.minutes is None:
        parser.error("give --minutes or --cases")
    return given


def main(arguments: list[str] | None = None) -> int:
    """Runs cases, prints a JSON line for each, and returns the exit status."""
    given = parse(arguments)
    began = time.monotonic()
    end = began + 60 * given.minutes if given.minutes is not None else float("inf")
    verdicts: Counter[str] = Counter()
    bad: list[int] = []
    worst, seed = 0.0, given.first_seed
    while time.monotonic() < end and (given.cases is None or seed < given.first_seed + given.cases):
        line = run_case(seed, given.output_dir.resolve(), time_limit_s=given.time_limit_s, keep=given.keep)
        print(json.dumps(line), flush=True)
        verdicts[line["verdict"]] += 1
        worst = max(worst, line["worst"]) if line["verdict"] in GOOD else worst
        if line["verdict"] not in GOOD:
            bad.append(seed)
        seed += 1
    took = {"seconds": round(time.monotonic() - began, 1), "worst_of_good": worst}
    print(json.dumps({"cases": dict(verdicts), "bad_seeds": bad, **took}))
    return 1 if bad else 0


def run_case(seed: int, output_dir: Path, *, time_limit_s: float, keep: bool = False) -> dict[str, Any]:
    """Runs one case and returns its JSON line.

    Args:
        seed: Seed of the case.
        output_dir: Parent of the case's folder.
        time_limit_s: Limit of each start, s.
        keep: True to keep the folder of a case that passes.
    """
    began = time.monotonic()
    case, folder = draw(seed), output_dir / f"case-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    write_files(case, folder)
    alone, spread = (run_side(case, folder, side, time_limit_s=time_limit_s) for side in (ALONE, SPREAD))
    verdict = judge(case, alone, spread)
    if verdict.name in GOOD and not keep:
        shutil.rmtree(folder)
    return {
        "seed": seed,
        "verdict": verdict.name,
        "why": verdict.why,
        "worst": round(verdict.worst, 4),
        "seconds": round(time.monotonic() - began, 1),
        "settings": case.settings,
        "changes": case.changes,
        "starts": [{"ranks": start.ranks, **start.settings} for start in case.starts],
    }


if __name__ == "__main__":
    sys.exit(main())
