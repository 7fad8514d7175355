"""The command line that acceptance tools share: options, where overrides stand, the page, the exit status."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mrl.acceptance.accept import Acceptance
from mrl.acceptance.gpu import GpuAcceptance
from mrl.acceptance.page import Page, verdict, write_page
from mrl.errors import UserError


def add_options(parser: argparse.ArgumentParser, *, folder: str, start_timeout_s: float, timeout_s: float) -> None:
    """Adds where the page goes, the time limits, and overrides of the config.

    Args:
        parser: Of a tool.
        folder: Default of --output_dir.
        start_timeout_s: Default.
        timeout_s: Default.
    """
    parser.add_argument("--output_dir", type=Path, default=Path(folder), help="default: %(default)s")
    parser.add_argument("--start-timeout-s", type=float, default=start_timeout_s, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="of each check; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config, as with mrl train")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, lists: Sequence[str]) -> argparse.Namespace:
    """What was given.

    Args:
        parser: After `add_options`.
        arguments: Words; None: those of the process.
        lists: Options of nargs="+", each of which takes the overrides behind it too.
    """
    found = parser.parse_intermixed_args(arguments)
    for name in lists:
        given = getattr(found, name)
        found.overrides += [word for word in given if "=" in word]
        setattr(found, name, [word for word in given if "=" not in word])
    return found


def run(name: str, page: Page, arguments: Sequence[str] | None, begin: Callable[[], Acceptance | GpuAcceptance]) -> int:
    """Runs the checks and writes the page; returns the exit status.

    Args:
        name: Of the tool, without .py.
        page: That it writes.
        arguments: As in `parse`.
        begin: Makes the run; may raise UserError, as the run may.
    """
    words = sys.argv[1:] if arguments is None else arguments
    began = time.monotonic()
    try:
        acceptance = begin()
        results = acceptance.run()
    except UserError as error:
        sys.stderr.write(f"{name}: error: {error}\n")
        return 2
    file = write_page(
        page,
        acceptance.folder,
        results,
        acceptance.versions,
        command=shlex.join(["python", f"tools/{name}.py", *words]),
        took_s=time.monotonic() - began,
    )
    tell(f"{verdict(results)}\n{file}")
    return 1 if any(result.status == "fails" for result in results) else 0


def tell(line: str) -> None:
    """Prints a line of progress at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
