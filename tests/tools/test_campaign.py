"""The command runs its cases for real: each as one process and at its layout."""

import json
import runpy

import pytest

from tests.source import ROOT

pytestmark = pytest.mark.slow

TOOL = runpy.run_path(str(ROOT / "tools" / "campaign.py"))
SEEDS = {"dapo on tp 2, from a model folder": 2, "reinforce_pp on dp 2": 6}
"""What a seed draws changes with `tools/fuzz_layouts/cases.py`; then another one is of this kind."""


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_a_drawn_run_is_the_same_at_its_layout(seed, tmp_path, capsys):
    status = TOOL["main"](["--cases", "1", "--first-seed", str(seed), "--output-dir", str(tmp_path / "campaign")])
    case, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert (status, case["verdict"]) == (0, "same"), case["why"]
    assert summary["cases"] == {"same": 1}
    assert not list((tmp_path / "campaign").iterdir())


def test_it_asks_how_long():
    with pytest.raises(SystemExit):
        TOOL["main"]([])
