"""Command line shared by the acceptance tools: options, overrides, writing the page, exit status."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from acceptance.engines import EngineAcceptance
from acceptance.gpu import GpuAcceptance
from acceptance.page import Page, verdict, write_page
from mrl.distributed.watchdog.signals import INTERRUPTED
from mrl.errors import UserError

Run = TypeVar("Run", bound=EngineAcceptance)


def add_options(parser: argparse.ArgumentParser, *, folder: str, start_timeout_s: float, timeout_s: float) -> None:
    """Adds options for the output folder, the time limits and config overrides.

    Args:
        parser: Argument parser of the tool.
        folder: Default of --output_dir.
        start_timeout_s: Default of --start-timeout-s, seconds.
        timeout_s: Default of --timeout-s, seconds.
    """
    parser.add_argument("--output_dir", type=Path, default=Path(folder), help="default: %(default)s")
    parser.add_argument("--start-timeout-s", type=float, default=start_timeout_s, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="of each check; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config, as with mrl train")


def add_engines(
    parser: argparse.ArgumentParser, *, engines: Sequence[str], checks: Iterable[str], launcher: str
) -> None:
    """Adds options for engines, checks and ranks.

    Args:
        parser: Argument parser of the tool.
        engines: All engines, which are the default.
        checks: All checks, which are the default.
        launcher: Command prefix that starts several ranks, containing {ranks}.
    """
    parser.add_argument("--model_dir", type=Path, help="Hugging Face folder; default: a small random model")
    parser.add_argument("--engines", nargs="+", default=list(engines), metavar="ENGINE", help="default: %(default)s")
    parser.add_argument("--checks", nargs="+", default=list(checks), metavar="CHECK", help="default: %(default)s")
    parser.add_argument("--num_ranks", type=int, default=1, help="GPUs, as one replica; default: %(default)s")
    shown = launcher.format(ranks="NUM_RANKS")
    parser.add_argument("--launcher", help=f'words that start the ranks; default with several: "{shown}"')


def of_engines(kind: Callable[..., Run], given: argparse.Namespace, launcher: str, file: str) -> Run:
    """Creates the run that a command line describes.

    Args:
        kind: Class of the run.
        given: Arguments parsed after `add_engines` and `add_options`.
        launcher: Command prefix that starts several ranks, containing {ranks}.
        file: Path of the tool.
    """
    words = given.launcher
    if words is None:
        words = launcher.format(ranks=given.num_ranks) if given.num_ranks > 1 else ""
    return kind(
        folder=given.output_dir,
        tools=Path(file).resolve().parent,
        engines=given.engines,
        checks=given.checks,
        overrides=given.overrides,
        model_dir=given.model_dir,
        num_ranks=given.num_ranks,
        launcher=shlex.split(words),
        start_timeout_s=given.start_timeout_s,
        timeout_s=given.timeout_s,
        tell=tell,
    )


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, lists: Sequence[str]) -> argparse.Namespace:
    """Parses a command line, and separates overrides from the values of multi-word options.

    Args:
        parser: Argument parser after `add_options`.
        arguments: Words to parse; None: those of the process.
        lists: Names of options with nargs="+", which also absorb the overrides after them.
    """
    found = parser.parse_intermixed_args(arguments)
    for name in lists:
        given = getattr(found, name)
        found.overrides += [word for word in given if "=" in word]
        setattr(found, name, [word for word in given if "=" not in word])
    return found


def run(
    name: str, page: Page, arguments: Sequence[str] | None, begin: Callable[[], EngineAcceptance | GpuAcceptance]
) -> int:
    """Runs the checks and writes the page, even after Ctrl-C; returns the exit status.

    Args:
        name: Name of the tool, without .py.
        page: Page to write.
        arguments: Words of the command line; None: those of the process.
        begin: Factory of the run; may raise UserError, like the run itself.
    """
    words = sys.argv[1:] if arguments is None else arguments
    began, stopped = time.monotonic(), False
    try:
        acceptance = begin()
        try:
            acceptance.run()
        except KeyboardInterrupt:
            stopped = True
    except UserError as error:
        sys.stderr.write(f"{name}: error: {error}\n")
        return 2
    results = acceptance.results
    if stopped and not results:
        sys.stderr.write(f"{name}: interrupted before the first result; no page was written.\n")
        return INTERRUPTED
    file = write_page(
        page,
        acceptance.folder,
        results,
        acceptance.versions,
        command=shlex.join(["python", f"tools/{name}.py", *words]),
        took_s=time.monotonic() - began,
    )
    tell(f"{verdict(results)}\n{file}")
    if stopped:
        sys.stderr.write(f"{name}: interrupted; the page has the results so far.\n")
        return INTERRUPTED
    return 1 if any(result.status == "fails" for result in results) else 0


def tell(line: str) -> None:
    """Prints a progress line and flushes it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
