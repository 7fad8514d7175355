"""The command line of an acceptance tool: what a run that is interrupted leaves."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from acceptance import tool
from acceptance.result import Result
from acceptance.vllm_table import PAGE


@dataclass
class Interrupted:
    """A run that hears Ctrl-C while a check is under way."""

    folder: Path
    results: list[Result]
    versions: dict[str, str] = field(default_factory=lambda: {"vllm": "0.32.0"})

    def run(self) -> list[Result]:
        raise KeyboardInterrupt


@pytest.mark.parametrize("answered", [True, False])
def test_what_was_asked_before_ctrl_c_is_on_the_page(answered, tmp_path, capsys):
    results = [Result("vllm", "start", "works", "", {}, 1.0, "start.log")] if answered else []
    assert tool.run("accept_vllm", PAGE, [], lambda: Interrupted(tmp_path, results)) == 130
    told = capsys.readouterr()
    assert ("vllm works here in all checks that ran: 1 work, 0 fail" in told.out) is answered
    assert told.err == (
        "accept_vllm: interrupted; the page has the results so far.\n"
        if answered
        else "accept_vllm: interrupted before the first result; no page was written.\n"
    )
    assert bool(list(tmp_path.glob("*.md"))) is answered
