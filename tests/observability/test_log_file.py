"""run.log holds the plain console of rank 0, and warnings and errors of every rank with rank and time."""

import logging as python_logging
import re
import warnings

import pytest

from mrl.distributed.watchdog import abort
from mrl.errors import UserError
from mrl.observability.log_file import append_lines, record_process
from tests.observability.folders import logging, row, run_steps

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} rank (\d+): (.*)")


def lines(path) -> list[tuple[int, str]]:
    return [(int(found[1]), found[2]) for found in map(LINE.fullmatch, path.read_text().splitlines())]


@pytest.mark.parametrize("console", ["off", "plain"])
def test_it_holds_what_the_plain_console_prints(tmp_path, capsys, console):
    with logging(tmp_path / "printed", console="plain") as (_, log):
        run_steps(log, 1, 2)
    printed = capsys.readouterr().out.splitlines()
    with logging(tmp_path / "run", console=console) as (run, log):
        run_steps(log, 1, 2)
    (_, first), *rest = lines(run.log)
    assert first.startswith("--- new run")
    assert [re.sub(r"left \S+", "", text) for _, text in rest] == [re.sub(r"left \S+", "", text) for text in printed]
    assert {rank for rank, _ in rest} == {0} and len(rest) >= 2


def test_a_resumed_run_appends(tmp_path):
    with logging(tmp_path) as (run, log):
        log.note("a note")
    before = run.log.read_bytes()
    with logging(tmp_path, resume_step=2) as (run, log):
        log.samples(2, [row(response="\x1b[2J")])
    assert run.log.read_bytes().startswith(before)
    assert "resumed after step 2" in run.log.read_text() and "\x1b" not in run.log.read_text()


def test_warnings_and_log_records_are_written_and_still_shown(tmp_path, capsys, recwarn):
    path = tmp_path / "run.log"
    shown = warnings.showwarning
    with record_process(path, 3):
        warnings.showwarning(UserWarning("slow path"), UserWarning, "file.py", 7)
        python_logging.getLogger("some.library").warning("deprecated %s", "option")
        python_logging.getLogger("some.library").info("detail")
    assert lines(path) == [(3, "UserWarning: slow path (file.py:7)"), (3, "WARNING some.library: deprecated option")]
    assert warnings.showwarning is shown
    assert not [each for each in python_logging.getLogger().handlers if type(each).__module__.startswith("mrl")]


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_is_written_by_the_ranks_that_raise_it_alone(tmp_path, rank):
    path = tmp_path / "run.log"
    everywhere = UserError("wrong key")
    everywhere.on_all_ranks = True
    for error in (ValueError("broken"), UserError("no file"), everywhere, KeyboardInterrupt()):
        with pytest.raises(type(error)), record_process(path, rank):
            raise error
    text = [text for found, text in lines(path) if found == rank]
    assert text[0] == "Traceback (most recent call last):" and "ValueError: broken" in text
    assert "error: no file" in text and "ended by KeyboardInterrupt" in text
    assert ("error: wrong key" in text) == (rank == 0)


def test_the_message_of_an_abort_is_written(tmp_path, capsys):
    path = tmp_path / "run.log"
    with record_process(path, 1):
        abort.print_error("rank 1 is gone", str)
    abort.print_error("after the run", str)
    assert lines(path) == [(1, "error: rank 1 is gone")]
    assert "rank 1 is gone" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    append_lines(tmp_path / "missing" / "run.log", 0, "text")
    with record_process(tmp_path / "missing" / "run.log", 0):
        warnings.showwarning(UserWarning("x"), UserWarning, "file.py", 1)
    assert list(tmp_path.iterdir()) == []
