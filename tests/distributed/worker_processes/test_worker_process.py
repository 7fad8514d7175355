"""What a worker has said while its parent wrote to it is heard at once."""

import time

from mrl.distributed.worker_processes.worker_process import wait_for
from mrl.rewards import _pool
from mrl.rewards._call_batches import ScoringTask
from mrl.rewards._signatures import Sample

LIMIT_S = 60
NUM_SAMPLES = 40


def pool_of_a_fast_function():
    return _pool.RewardPool(
        [("length", {"target": 1, "limit": 9})], num_workers=1, time_limit_s=LIMIT_S, memory_limit_mb=0
    )


def samples_and_tasks():
    samples = [Sample("p", "r", None, {"response_length": i}) for i in range(NUM_SAMPLES)]
    return samples, [ScoringTask((0,), ((row,),)) for row in range(NUM_SAMPLES)]


def read_beside(worker):
    """As where the worker answers before the parent has done writing."""
    while not worker.channel.has_line:
        worker.channel.transfer()
        time.sleep(0.01)


def test_what_was_read_already_is_not_waited_for():
    pool = pool_of_a_fast_function()
    try:
        (worker,) = pool._workers
        samples, tasks = samples_and_tasks()
        assert worker.send(tasks, samples)
        read_beside(worker)
        began = time.monotonic()
        wait_for([worker.channel], LIMIT_S)
        assert time.monotonic() - began < LIMIT_S / 2
        assert worker.take()
    finally:
        pool.shutdown()


def test_a_pool_whose_worker_answers_while_it_is_sent_to_never_waits(monkeypatch):
    monkeypatch.setattr(_pool, "_POLL_S", LIMIT_S)
    pool = pool_of_a_fast_function()
    send = _pool.RewardWorker.send

    def slow_to_send(worker, tasks, samples):
        sent = send(worker, tasks, samples)
        time.sleep(0.2)  # all is answered
        worker.channel.transfer()
        return sent

    monkeypatch.setattr(_pool.RewardWorker, "send", slow_to_send)
    rows = []
    try:
        began = time.monotonic()
        pool.run(*samples_and_tasks(), 0, on_scored=lambda answered: rows.extend(row for _, row, _ in answered))
        assert time.monotonic() - began < LIMIT_S / 2
    finally:
        pool.shutdown()
    assert sorted(rows) == list(range(NUM_SAMPLES))
