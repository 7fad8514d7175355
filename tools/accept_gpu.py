r"""Does mrl do on this GPU what it does on a CPU, and how fast? One command, about twenty minutes, one page.

    python tools/accept_gpu.py                                # one GPU; with several, also what needs two
    python tools/accept_gpu.py --checks device parity commit  # some of it
    python tools/accept_gpu.py --device cpu --checks parity   # the same on a CPU, as far as it makes sense

The actor is compared with transformers in fp32, the native engine with the actor, with and without CUDA graphs, and
each speed with plain Megatron-Core, transformers or the device's own limits in the same run. Each check runs in a
process of its own; one that fails, hangs or ends its process stops no other. The page, OUTPUT_DIR/acceptance-gpu.md
(and .json), says what works, what does not, what that means and what to do, with versions and figures. Nothing is
changed but OUTPUT_DIR.

Exit status: 0 nothing fails, 1 something does, 2 a mistake in what was given or there is no GPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from mrl.acceptance.gpu import GpuAcceptance
from mrl.acceptance.gpu_table import CHECKS, PAGE
from mrl.acceptance.page import verdict, write_page
from mrl.errors import UserError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("acceptance-gpu"), help="default: %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--start-timeout-s", type=float, default=180.0, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of each check; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config, as with mrl train")
    found = parser.parse_intermixed_args(arguments)
    found.overrides += [word for word in found.checks if "=" in word]  # nargs="+" takes the overrides behind it too
    found.checks = [word for word in found.checks if "=" not in word]
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and writes the page; returns the exit status."""
    given = parse(arguments)
    words = sys.argv[1:] if arguments is None else arguments
    began = time.monotonic()
    try:
        acceptance = GpuAcceptance(
            folder=given.output_dir,
            tools=Path(__file__).resolve().parent,
            checks=given.checks,
            device=given.device,
            overrides=given.overrides,
            start_timeout_s=given.start_timeout_s,
            timeout_s=given.timeout_s,
            tell=lambda line: print(line, flush=True),
        )
        results = acceptance.run()
    except UserError as error:
        print(f"accept_gpu: error: {error}", file=sys.stderr)
        return 2
    page = write_page(
        PAGE,
        acceptance.folder,
        results,
        acceptance.versions,
        command=shlex.join(["python", "tools/accept_gpu.py", *words]),
        took_s=time.monotonic() - began,
    )
    print(f"{verdict(results)}\n{page}")
    return 1 if any(result.status == "fails" for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
