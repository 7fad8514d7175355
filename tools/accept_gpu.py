r"""Acceptance test of mrl on a GPU: correctness against a CPU and transformers, and speed. Writes one page.

    python tools/accept_gpu.py                                # one GPU; with several, also checks that need two
    python tools/accept_gpu.py --checks device parity commit  # some of the checks
    python tools/accept_gpu.py --device cpu --checks parity   # the same on a CPU, as far as possible

The actor is compared with transformers in fp32, the native engine with the actor, with and without CUDA graphs, and
each speed with plain Megatron-Core, transformers or the device's own limits in the same run. Each check runs in its own
process; one that fails, hangs or crashes does not stop the others. Checks that measure neither time nor memory run
concurrently (--workers), the others one by one. The report, OUTPUT_DIR/acceptance-gpu.md (and .json), lists for each
check the result, its meaning and the remedy, with versions and measurements. Only OUTPUT_DIR is modified.

Exit status: 0 no check fails, 1 a check fails, 2 invalid arguments or no GPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from acceptance import tool
from acceptance.gpu import GpuAcceptance
from acceptance.gpu_table import CHECKS, PAGE

MOST_WORKERS, CORES_PER_WORKER = 4, 3
"""Most checks that run concurrently, and CPU cores for each."""


def default_workers(device: str) -> int:
    """Returns how many checks run concurrently; one on a CPU, where each uses all cores."""
    return 1 if device == "cpu" else max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // CORES_PER_WORKER))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), metavar="CHECK", help=f"among {', '.join(CHECKS)}")
    many = f"number of checks that run concurrently; default: {MOST_WORKERS} with enough CPU cores, 1 on a CPU"
    parser.add_argument("--workers", type=_positive, metavar="NUM", help=many)
    tool.add_options(parser, folder="acceptance-gpu", start_timeout_s=180.0, timeout_s=300.0)
    return tool.parse(parser, arguments, ("checks",))


def _positive(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"'{word}' came, expected an integer above 0")
    return int(word)


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks, writes the report and returns the exit status."""
    given = parse(arguments)

    def begin() -> GpuAcceptance:
        return GpuAcceptance(
            folder=given.output_dir,
            tools=Path(__file__).resolve().parent,
            checks=given.checks,
            device=given.device,
            num_workers=given.workers or default_workers(given.device),
            overrides=given.overrides,
            start_timeout_s=given.start_timeout_s,
            timeout_s=given.timeout_s,
            tell=tool.tell,
        )

    return tool.run("accept_gpu", PAGE, arguments, begin)


if __name__ == "__main__":
    raise SystemExit(main())
