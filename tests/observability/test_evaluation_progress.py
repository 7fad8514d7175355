"""What `mrl evaluate` shows while it samples."""

import io
import time

from rich.console import Console

from mrl.observability.evaluation_progress import ProgressLine
from mrl.observability.loggers.console import PROGRESS_S


def test_lines_are_rare_where_there_is_no_terminal(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file = io.StringIO()
    line = ProgressLine(Console(file=file, width=120))
    for second in range(int(2.5 * PROGRESS_S)):
        now[0] = float(second)
        line.progress(f"gen: {second} of 99 prompts")
        line.record("val", 0, {"val/accuracy": 0.5})
    line.close()
    assert file.getvalue().splitlines() == [f"gen: {PROGRESS_S * k:.0f} of 99 prompts" for k in (1, 2)]


def test_a_terminal_has_one_line_that_changes_and_goes():
    file = io.StringIO()
    line = ProgressLine(Console(file=file, force_terminal=True, width=80))
    line.close()  # nothing was shown
    assert file.getvalue() == ""
    line.progress("gen: 1 of 2 prompts")
    line.progress("gen: 2 of 2 prompts")
    line.close()
    assert "of 2 prompts" in file.getvalue() and file.getvalue().count("\n") <= 2
