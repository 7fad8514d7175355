"""What the terminal shows: lines without one, a live panel on a real one, and nothing that a response could steer."""

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.observability.loggers.base import Opening
from mrl.observability.loggers.console import ConsoleState, PlainConsole, RichConsole, spark
from mrl.observability.run_log import sample_rows
from mrl.types import Prompt, Rollout
from tests.observability.folders import config, logging, metrics_of, row, run_steps


def opening(tmp_path, **settings):
    return Opening(config(tmp_path, **settings), RunDir(tmp_path), None)


def test_without_a_terminal_each_step_is_a_line(tmp_path, capsys):
    with logging(tmp_path, console="rich", num_steps=2) as (_, log):
        log.note("hello")
        log.evaluation(0, {"val/accuracy": 0.25, "val/reward/mean": 0.5})
        run_steps(log, 1, 2)
        log.step(2, {"timing_s/save_checkpoint": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hello"
    assert lines[1] == "evaluation after step 0: accuracy 0.250   reward 0.5"
    assert lines[2] == "evaluation after step 1: accuracy 0.125 (-0.125)"
    assert lines[3] == "  1+2= -> answer of step 1  answer 3  reward 1"
    assert lines[4].startswith("training 1/2 | reward 0.1  length 3.33 | entropy 0.1 | tokens/s/rank 1k | left 0:0")
    assert sum(line.startswith("training 2/2") for line in lines) == 1


def test_an_evaluation_tells_each_of_several_data_sets(tmp_path, capsys):
    with logging(tmp_path, console="plain", num_steps=1) as (_, log):
        log.evaluation(0, {"val-core/gsm8k/reward/mean@1": 0.25, "val-core/a\x1b[2J/acc/mean@1": 0.5})
        log.evaluation(1, {"val/accuracy": 0.5, "val-core/gsm8k/reward/mean@1": 0.25})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "evaluation after step 0: gsm8k 0.25   a\\x1b[2J 0.5"
    assert lines[1] == "evaluation after step 1: accuracy 0.500"


def test_a_long_warm_start_is_ten_lines(tmp_path, capsys):
    with logging(tmp_path, console="plain", warm_start=200) as (_, log):
        for step in range(1, 201):
            log.warm_start(step, {"actor/loss": 1 / step})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warm start")]
    assert len(lines) == 11
    assert lines[-1].startswith("warm start 200/200 | loss 0.005")


def test_off_is_silent(tmp_path, capsys):
    with logging(tmp_path, console="off") as (_, log):
        log.note("hello")
        run_steps(log, 1, 2)
    assert capsys.readouterr().out == ""


HOSTILE = "\x1b[2J\x1b]0;title\x07 [bold]no markup[/bold]\r\n\u202e"


@pytest.mark.parametrize("kind", [PlainConsole, RichConsole])
def test_a_response_cannot_steer_the_terminal(tmp_path, kind):
    screen = io.StringIO()
    logger = kind(opening(tmp_path), Console(file=screen, width=200, highlight=False, color_system=None))
    logger.samples("val", 0, [row(prompt=HOSTILE, response=HOSTILE, answer=HOSTILE)])
    logger.note(HOSTILE)
    logger.close()
    shown = screen.getvalue()
    assert not set("\x1b\x07\r\u202e") & set(shown)
    assert shown.count(r"\x1b[2J\x1b]0;title\x07 [bold]no markup[/bold]\r\n\u202e") == 4


@pytest.mark.parametrize("width", [60, 80, 150])
def test_the_panel_fits_and_shows_what_people_watch(tmp_path, width):
    screen = io.StringIO()
    logger = RichConsole(
        opening(tmp_path, num_steps=8), Console(file=screen, width=width, highlight=False, color_system=None)
    )
    for step in range(1, 5):
        logger.record("train", step, metrics_of(step))
    logger.phase("step 5, gen")
    logger._console.print(logger._panel())
    logger.close()
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for word in ("4/8  50%", "reward", "0.4", "response length", "entropy", "tokens/s/rank", "step 5, gen", "▁"):
        assert word in text, word


def test_an_evaluation_before_a_step_does_not_hide_it_and_tells_the_change(tmp_path):
    shown = ConsoleState(opening(tmp_path, warm_start=3))
    assert shown.record("warm_start", 3, {"warm_start/loss": 1.0})
    assert not shown.record("val", 0, {"val/accuracy": 0.2})
    assert (shown.phase, shown.step, shown.latest) == ("train", 0, {"val/accuracy": 0.2})
    assert not shown.record("val", 1, {"val/accuracy": 0.3})
    assert shown.record("train", 1, {"critic/score/mean": 0.5})
    assert not shown.record("train", 1, {"timing_s/save_checkpoint": 0.5})
    assert shown.latest["val/accuracy"] == 0.3


def test_spark_spans_the_whole_history():
    assert spark([0.0, 7.0], 16) == "▁█"
    assert spark([float(i) for i in range(160)], 16)[::15] == "▁█"
    assert spark([1.0, float("nan"), 1.0], 4) == "▁▁"
    assert spark([1.0], 4) == ""


CHILD = """
import pathlib, sys
from tests.observability.folders import logging, run_steps
with logging(pathlib.Path(sys.argv[1]), console="rich") as (run, log):
    log.phase("step 1, gen")
    run_steps(log, 1, 3)
    raise RuntimeError("the loop failed")
"""


@pytest.mark.slow
def test_on_a_real_terminal_the_panel_is_drawn_and_left_whole_when_the_loop_fails(tmp_path):
    parent, child = pty.openpty()
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), TERM="xterm", PYTHONIOENCODING="utf-8")
    command = [sys.executable, "-c", CHILD, str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=child, stderr=subprocess.PIPE, env=environment)
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 65536):
            shown += chunk
    except OSError:  # Linux's way to say that the other end of a terminal is closed
        pass
    _, errors = process.communicate()
    os.close(parent)
    text = re.sub(r"\x1b\[[\d;]*m", "", shown.decode())  # without colours
    assert b"RuntimeError: the loop failed" in errors
    assert "after step 3" in text
    assert "answer of step 1" in text
    assert "╭─ mrl" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_progress_inside_a_phase_is_a_line_each_half_minute_and_the_panel_s_corner(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("mrl.observability.loggers.console.time.monotonic", lambda: now[0])
    screen = io.StringIO()
    plain = PlainConsole(opening(tmp_path), Console(file=screen, width=200))
    for later_s in range(0, 70, 5):
        now[0] = 100.0 + later_s
        plain.progress(f"gen: {later_s} of 70 prompts")
    assert screen.getvalue().splitlines() == ["gen: 30 of 70 prompts", "gen: 60 of 70 prompts"]
    rich = RichConsole(opening(tmp_path), Console(file=screen, width=200))
    rich.progress("gen: 5 of 70 prompts")
    rich._console.print(rich._panel())
    rich.close()
    assert "gen: 5 of 70 prompts" in screen.getvalue()


@pytest.mark.parametrize("kind", [PlainConsole, RichConsole])
def test_samples_omit_the_system_prompt(tmp_path, kind):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    prompt = Prompt(0, (1,), "<system>Be brief.</s><user>1+2?</s>", "3", question=messages)
    rollout = Rollout(prompt, 0, [1], [0.0], "stop", 0, "3", 1.0)
    rows = sample_rows([rollout], phase="val", num_samples=1)
    screen = io.StringIO()
    logger = kind(opening(tmp_path), Console(file=screen, width=200, highlight=False, color_system=None))
    logger.samples("val", 0, rows)
    logger.close()
    assert "1+2?" in screen.getvalue() and "Be brief" not in screen.getvalue()
    assert rows[0]["prompt"] == prompt.text and rows[0]["question"] == "1+2?"
