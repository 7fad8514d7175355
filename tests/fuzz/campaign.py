"""Runs cases for as long as one likes, and tells what was found.

python -m tests.fuzz.campaign --kinds config,value,data --count 2000 --seed 0 [--jobs 2]
"""

# ruff: noqa: T201 -- it is what the command prints
from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import cases, configs, data_files, values

KINDS = {"config": configs.case, "value": values.case, "data": data_files.case}


def warm_up() -> None:
    """Imports what every child needs, once."""
    import torch

    import mrl.commands.doctor.doctor
    import mrl.commands.plan.dryrun
    import mrl.commands.plan.plan
    import mrl.commands.rehearse.rehearse
    import mrl.train  # noqa: F401

    torch.set_num_threads(1)


def main() -> int:
    """Runs the campaign; status 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--count", type=int, default=2000, help="cases of all kinds together")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each kind")
    parser.add_argument("--keep", type=Path, help="folder for the inputs of cases that went wrong")
    arguments = parser.parse_args()
    warm_up()
    kinds = arguments.kinds.split(",")
    began, done, wrong, statuses, slowest = time.monotonic(), Counter(), [], Counter(), []
    with tempfile.TemporaryDirectory(prefix="mrl-fuzz-") as folder:
        for turn in range(arguments.count):
            if time.monotonic() - began > arguments.seconds:
                break
            kind = kinds[turn % len(kinds)]
            number = arguments.first + turn // len(kinds)
            place = Path(folder) / f"{kind}-{number}"
            outcome = cases.run(KINDS[kind](number), place)
            done[kind] += 1
            statuses[kind, outcome.status] += 1
            slowest.append((outcome.seconds, outcome.case.name, outcome.case.command))
            if outcome.wrong:
                wrong.append(outcome)
                last = outcome.said.strip().splitlines()[-1:] or [""]
                print(f"{outcome.case.name} ({outcome.case.command}): {outcome.wrong}: {last[0][:300]}", flush=True)
                if arguments.keep:
                    shutil.copytree(
                        place, arguments.keep / place.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.fifo")
                    )
            shutil.rmtree(place, ignore_errors=True)
    print(f"{sum(done.values())} cases in {time.monotonic() - began:.0f} s: {dict(done)}")
    print(
        "statuses: "
        + ", ".join(f"{kind} {status}: {count}" for (kind, status), count in sorted(statuses.items(), key=str))
    )
    print(
        "wrong: "
        + (", ".join(f"{name}: {count}" for name, count in Counter(one.wrong for one in wrong).items()) or "none")
    )
    print(f"slowest: {sorted(slowest)[-5:]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
