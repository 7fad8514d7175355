"""Steps end before a limit: rank 0's clock decides, and a step that would not fit is not begun."""

import time
from dataclasses import replace

import torch.distributed as dist

from mrl.config import RunConfig
from mrl.errors import UserError
from mrl.observe.timers import Timers
from mrl.run.progress import Progress
from mrl.survival.stop import LIMITS, Stop
from tests.ranks import run_ranks

STEP_S = 0.5
LEFT_S = 0.4
"""Enough for a question, too little for another step."""


def run_until(left_s):
    """What becomes of four steps if in the second one rank 0 has `left_s` to go."""
    rank = dist.get_rank()
    said, commits = [], []
    stop = Stop(replace(RunConfig(), stop_timeout_s=5.0), ends={}, keeps_time=rank == 0, say=said.append)
    progress = Progress(Timers(), dict)
    done = 0
    with progress.stops_in_order(stop, lambda standing: commits.append(standing.state["step"])):
        for step in range(1, 5):
            with progress.step(step):
                time.sleep(STEP_S)
                with progress.phase("gen"):
                    if step == 2 and rank == 0:
                        stop.ends = {LIMITS[0]: time.monotonic() + left_s}
                done = step
                progress.reached(step)
    return done, commits, said, stop.why


def test_a_step_that_would_not_fit_is_not_begun():
    first, second = run_ranks(2, run_until, LEFT_S)
    assert first == (2, [2], ["stopped by run.max_time_s after step 2, which is committed"], LIMITS[0])
    assert second[:2] == first[:2]


def test_a_step_whose_time_is_over_is_abandoned():
    first, _ = run_ranks(2, run_until, 0.0)
    assert first[:3] == (1, [1], ["stopped by run.max_time_s after step 1, which is committed"])


def refused():
    stop = Stop(RunConfig(), ends={LIMITS[1]: 0.0}, keeps_time=dist.get_rank() == 0, say=print)
    progress = Progress(Timers(), dict)
    try:
        with progress.stops_in_order(stop, print), progress.step(1):
            return "began"
    except UserError as error:
        return str(error)


def test_a_limit_that_is_over_before_any_step_is_a_mistake_and_is_not_tried_again_and_again():
    first, second = run_ranks(2, refused)
    assert first == second and first.startswith("SLURM's time limit is over before one step was done")
