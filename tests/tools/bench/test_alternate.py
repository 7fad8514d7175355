"""Contenders run in processes of their own, in turns, and say why one of them failed."""

import functools
import os
import time
from contextlib import contextmanager

import pytest
import torch
from bench.alternate import take_turns

CPU = torch.device("cpu")
NAP_S = 0.2


@contextmanager
def writes(file, word):
    """Appends its word, its process and its threads to a file."""
    os.write(1, b"not a figure\n")

    def run():
        with file.open("a") as log:
            log.write(f"{word} {os.getpid()} {os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()}\n")

    yield run
    with file.open("a") as log:
        log.write(f"{word} ended\n")


@contextmanager
def naps():
    yield lambda: time.sleep(NAP_S)


@contextmanager
def counts():
    """Keeps one processor busy for as long as another naps."""

    def run():
        ends = time.process_time() + NAP_S
        while time.process_time() < ends:
            pass

    yield run


@contextmanager
def fails():
    yield lambda: (_ for _ in ()).throw(ValueError("no weights"))


@contextmanager
def dies():
    yield lambda: os._exit(7)


@pytest.mark.slow
def test_they_take_turns_in_processes_of_their_own(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    log = tmp_path / "log"
    found = take_turns({word: functools.partial(writes, log, word) for word in "ab"}, 2, CPU, 2)
    rows = [row.split() for row in log.read_text().splitlines()]
    assert [row[0] for row in rows if row[1] != "ended"] == ["a", "b"] * 3
    assert {row[0] for row in rows if row[1] == "ended"} == {"a", "b"}
    processes = {(row[0], row[1]) for row in rows if row[1] != "ended"}
    assert len(processes) == 2 and str(os.getpid()) not in {number for _, number in processes}
    assert {tuple(row[2:]) for row in rows if row[1] != "ended"} == {("2", "2")}
    assert [len(turns.wall_s) for turns in found.values()] == [2, 2]
    assert os.environ["OMP_NUM_THREADS"] == "1" and "not a figure" not in capfd.readouterr().out


@pytest.mark.slow
def test_processors_are_counted_beside_the_clock():
    found = take_turns({"naps": naps, "counts": counts}, 1, CPU, 1)
    assert found["naps"].median_s >= NAP_S and found["naps"].cores < 0.5
    assert sum(found["counts"].processor_s) >= NAP_S - 0.02  # the clock of processors ticks in hundredths


@pytest.mark.parametrize(("maker", "said"), [(fails, "ValueError: no weights"), (dies, "with status 7")])
def test_a_failure_is_told(maker, said):
    with pytest.raises(RuntimeError, match=f"(?s)'culprit'.*{said}"):
        take_turns({"culprit": maker}, 1, CPU, 1)
