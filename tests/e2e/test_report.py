"""The report of a run is drawn by one rank, after the ranks have left each other."""

import pytest
import torch.distributed as dist

from mrl.distributed.local_ranks import free_port
from mrl.observability import report
from tests.e2e import runs
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

ONE_STEP = ["train={num_steps: 1, warm_start: {num_steps: 0}}", "observe.report=true", "checkpoint.interval=1"]


def drawn_in_a_group(words, ports):
    """Runs a rank of `mrl WORDS`; for each call that drew the report: whether a process group existed."""
    found, draw = [], report.write_report

    def observed(run_dir):
        found.append(dist.is_initialized())
        return draw(run_dir)

    report.write_report = observed
    try:
        return runs.in_rank(words, ports), found
    finally:
        report.write_report = draw


def test_no_rank_waits_in_a_collective_while_the_report_is_drawn(tmp_path):
    ports = [free_port(), free_port()]
    assert run_ranks(2, drawn_in_a_group, runs.arguments(tmp_path, ONE_STEP), ports) == [(0, [False]), (0, [])]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_report_that_cannot_be_written_fails_no_run(tmp_path):
    (tmp_path / "run" / "report.html" / "taken").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    assert runs.train_in_pool(tmp_path, ONE_STEP, 1)
