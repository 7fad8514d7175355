"""How much time a run keeps for its commits before a limit ends it."""

from mrl.config.config import RunConfig
from mrl.distributed.watchdog.graceful_stop import Stop
from mrl.observability.timers import Timers
from mrl.trainer.preemption import MARGIN, RunProgress


def test_a_stop_that_waits_for_a_commit_before_its_own_has_time_for_both():
    progress = RunProgress(Timers(), dict)
    progress.stop = Stop(RunConfig(), ends={}, keeps_time=True, say=lambda text: None)
    for _ in range(2):
        progress.record_save_time(save_s=4.0)
        assert progress.stop.reserve_s == MARGIN * 4.0
        progress.reserve_for_async_save()
        assert progress.stop.reserve_s == 2 * MARGIN * 4.0
