"""The disk is full when a checkpoint is due: one message, status 2, and with more room the same command goes on."""

import subprocess

import pytest

from tests.e2e import runs
from tests.e2e.test_owner import two_ranks
from tests.full_disk import full_disk

pytestmark = pytest.mark.slow


def test_a_checkpoint_that_does_not_fit_is_told_and_the_run_goes_on_with_more_room(tmp_path):
    with full_disk(tmp_path / "run" / "checkpoints", "400k"):
        (status, said), (other, silent) = two_ranks(tmp_path)
        assert (status, other, silent) == (2, 2, ""), said
        assert "No space left on device" in said and "start the same command again" in said, said
        assert "Traceback" not in said and said.count("mrl: error") == 1
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "run" / "checkpoints")], check=True)
        assert two_ranks(tmp_path)[0] == (0, "")
        rows = [row["step"] for row in runs.metrics(tmp_path) if row["phase"] == "train"]
        assert rows == list(range(5))
        assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
