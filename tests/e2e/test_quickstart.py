"""README's first command: its warm start is weak on purpose, and does not depend on rounding or layout.

`tools/check_quickstart.py` measures the rest of what README says of it, on ten seeds.
"""

import runpy

import pytest

from tests.e2e import runs
from tests.source import ROOT

pytestmark = pytest.mark.slow

CHECK = runpy.run_path(str(ROOT / "tools" / "check_quickstart.py"))


def warm_start(folder, overrides, ranks):
    """Its lines, then those of step 0 and of one step."""
    words = ["train", str(ROOT / "configs" / "quickstart.yaml"), f"run.output_dir={folder}/run"]
    return runs.in_pool(folder, [*words, *CHECK["QUIET"], *CHECK["ONE_STEP"], *overrides], ranks)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return warm_start(tmp_path_factory.mktemp("single"), [], 1)


def test_the_warm_start_ends_in_a_weak_policy(single):
    (step_0,) = [row for row in single if row["phase"] == "train" and row["step"] == 0]
    assert step_0["val/num_prompts"] > 0
    assert step_0["val/accuracy"] < CHECK["WEAK"]
    (step_1,) = [row for row in single if row["phase"] == "train" and row["step"] == 1]
    assert 0.05 < step_1["critic/score/mean"] < CHECK["WEAK"]  # something to learn from


@pytest.mark.parametrize("layout", ["tp2"])
def test_every_step_of_the_warm_start_is_the_same_at_another_layout(layout, single, tmp_path):
    found = [row for row in warm_start(tmp_path, CHECK["LAYOUTS"][layout], 2) if row["phase"] == "warm_start"]
    assert CHECK["difference"]([row for row in single if row["phase"] == "warm_start"], found) < CHECK["SAME"]
