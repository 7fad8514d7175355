"""The two tiers: tests marked `slow`, and all others, which `pytest` runs by itself (`.pytest.ini`).

A test that needs a program which README's command does not install is slow; a test that is not starts no launcher. The
slow ones are begun first: one of them at the end would keep one worker busy while the others are done.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NEED_MORE = ("vllm", "mpi", "slurm", "netns", "bubblewrap", "shellcheck")
"""Markers of what `.ci/run` installs, or has to make, for the slow tier."""

LAUNCHERS = {"torchrun", "mpirun", "mpirun.mpich", "mpiexec", "srun", "sbatch"}

collected = pytest.StashKey[dict[str, bool]]()
"""Whether each test is slow, also of those that are not to run."""

_fast: list[str] = []
"""The test that runs, while it is not slow."""


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


@pytest.hookimpl(tryfirst=True)  # before pytest picks by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(marker) for marker in NEED_MORE):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not is_slow(item))
    config.stash[collected] = {item.nodeid: is_slow(item) for item in items}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _fast[:] = [] if is_slow(item) else [item.nodeid]
    try:
        return (yield)
    finally:
        _fast.clear()


def starts_ranks(program: Any, words: Any) -> bool:
    """Whether the command is a launcher's; of a shell's it sees only the first program."""
    if isinstance(words, str):
        words = words.split()
    words = [program or words[0], *map(str, words[1:])]
    return Path(str(words[0])).name in LAUNCHERS or words[1:3] == ["-m", "torch.distributed.run"]


def _refuse_launchers(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and _fast and starts_ranks(*arguments[:2]):
        raise AssertionError(f"{_fast[0]} starts a launcher: mark it slow")


sys.addaudithook(_refuse_launchers)
