"""What is slow: by its own mark, and by what it needs; and a test that is not starts no launcher."""

import subprocess
import sys

import pytest

from tests import tiers
from tests.source import ROOT

SLOW_SHARE = 0.2


@pytest.mark.parametrize("words", [["mpirun", "-n", "1", "true"], [sys.executable, "-m", "torch.distributed.run"]])
def test_a_test_that_is_not_slow_starts_no_launcher(words):
    with pytest.raises(AssertionError, match="mark it slow"):
        subprocess.run(words, capture_output=True, check=False)


def test_a_launcher_is_told_from_what_only_names_one():
    assert tiers.starts_ranks("/usr/bin/mpirun", ["mpirun", "x"]) and tiers.starts_ranks(None, "srun x")
    assert not tiers.starts_ranks(None, ["bash", "launch/torchrun.sh"])
    assert not tiers.starts_ranks("python", ["python", "-m", "mrl", "launch", "--via", "mpirun"])


def test_what_needs_another_program_is_slow(request):
    items = request.session.items
    assert items == sorted(items, key=lambda item: not tiers.is_slow(item))
    for item in items:
        assert tiers.is_slow(item) or not any(item.get_closest_marker(marker) for marker in tiers.NEED_MORE), item


def test_four_of_five_tests_are_not_slow(request):
    found = request.config.stash[tiers.collected]
    files = {name.partition("::")[0] for name in found}
    if files == {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}:  # the suite, not a part
        assert sum(found.values()) <= SLOW_SHARE * len(found)
