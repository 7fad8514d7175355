"""The console's message inside a sampling phase: prompts done, tokens per second, time left."""

import re
import time

import pytest

from mrl.rollout import sampling_progress
from mrl.rollout.sampling_progress import SamplingProgress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def numbers(text):
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]


def test_a_prompt_is_done_with_its_last_sample(clock):
    shown = []
    progress = SamplingProgress(shown.append)
    with progress.of(num_prompts=3, num_samples=2, expected_tokens=4000.0):
        progress.record(900, [7, 8])
        assert shown == []
        clock[0] += sampling_progress.INTERVAL_S
        progress.record(100, [8])
        clock[0] += 1.0
        progress.record(1000, [7])
    assert [numbers(text) for text in shown] == [[1, 3, 1000, 3], [2, 3, 1000, 2]]


def test_no_time_is_estimated_without_speed_or_beyond_what_was_expected(clock):
    shown = []
    progress = SamplingProgress(shown.append)
    with progress.of(1, 1, 10.0):
        for tokens in (0, 11):
            clock[0] += 2.0
            progress.record(tokens, [])
    assert [numbers(text) for text in shown] == [[0, 1, 0], [0, 1, 3]]


def test_nothing_is_shown_outside_a_phase_and_each_phase_starts_at_zero(clock):
    shown = []
    progress = SamplingProgress(shown.append)
    with progress.of(1, 1, 10.0):
        progress.record(5, [3])
    clock[0] += 5.0
    progress.record(5, [3])
    with progress.of(2, 1, 4.0, " (replica 1 of 2)"):
        clock[0] += 2.0
        progress.record(2, [4])
    assert [numbers(text) for text in shown] == [[1, 2, 1, 2, 1, 2]]
