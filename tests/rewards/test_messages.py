"""What the words of a worker are taken for."""

import math

import pytest

from mrl.rewards import _messages

OUTCOME = {"value": 1.0, "error": "", "lost": False, "facts": {}}


def line(**changed):
    return {"serial": 0, "place": 0, "outcomes": [OUTCOME | changed]}


def test_an_answer_is_read():
    assert _messages.decode(line(), 1).outcomes[0].value == 1.0


@pytest.mark.parametrize(
    "changed",
    [{"value": 10**400}, {"value": math.nan}, {"value": "1"}, {"facts": {"a": 10**400}}, {"facts": 3}, {"error": 1}],
    ids=lambda changed: next(iter(changed)),
)
def test_what_no_worker_writes_is_not_believed(changed):
    assert _messages.decode(line(**changed), 1) is None
