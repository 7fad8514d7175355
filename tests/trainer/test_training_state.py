"""What a commit's state may hold."""

from pathlib import Path

import pytest

from mrl.errors import UserError
from mrl.trainer.training_state import parse_state

STATE = {"step": 1, "policy_version": 1, "source": {}, "history": {}, "reference": None}


@pytest.mark.parametrize("value", [None, [0.1, None], [0.1, 2.0]])
def test_an_entropy_coefficient_and_what_moved_it_are_taken_up(value):
    assert parse_state(STATE | {"entropy_ctrl": value}, Path("step-00000001")).state["entropy_ctrl"] == value


@pytest.mark.parametrize("value", [[0.1], ["x", 1.0], [None, 1.0], [0.1, 1.0, 2.0], 0.1])
def test_what_no_run_leaves_of_it_is_refused(value):
    with pytest.raises(UserError, match="missing or wrong type: entropy_ctrl"):
        parse_state(STATE | {"entropy_ctrl": value}, Path("step-00000001"))
