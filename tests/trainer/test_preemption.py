"""How much time a run keeps for its commits before a limit ends it."""

import re
import signal
import time

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


def test_an_export_is_left_out_unless_it_is_known_to_fit(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    progress = RunProgress(Timers(), dict)
    assert progress.has_time_to_export()
    progress.stop = Stop(RunConfig(), ends={}, keeps_time=True, say=lambda text: None)
    assert progress.has_time_to_export()
    progress.stop._receive(signal.SIGTERM, directly=True)  # 25 s
    fits = []
    for save_s in (0.0, 19.0, 21.0):
        progress.record_save_time(save_s=save_s)
        fits.append(progress.has_time_to_export())
    assert fits == [False, True, False]


def test_a_commit_longer_than_a_timeout_is_warned_of_by_key():
    progress = RunProgress(Timers(), dict)
    progress.stop = Stop(RunConfig(), ends={}, keeps_time=True, say=lambda text: None)
    progress.record_save_time(save_s=24.0)
    assert progress.short_timeouts() == ""
    progress.record_save_time(save_s=100.0)
    assert {"run.stop_timeout_s=90", "run.term_timeout_s=25"} <= set(
        re.findall(r"run\.\w+=\d+", progress.short_timeouts())
    )
