"""kill -9 before any operation on a file: the newest commit that was done, or the one that was being made, is there."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.run_dir.commit_kills import Committer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def committer():
    with Committer() as started:
        yield started


def check(committer, folder, saves, kill_at, **config):
    """Whether the kill came at all; what a start finds is the last commit or the one before it, and all is whole."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    killed = committer.run(folder, saves, kill_at, **config) is None
    found, later = committer.go_on(folder, (saves[-1][0] + 1, "later"), **config)
    step, text, steps, left, notes = found
    may = [saves[-1]] if not killed else [saves[-1], *saves[-2:-1]]
    assert (step, text) in may or (killed and len(saves) == 1 and step is None), (kill_at, saves, step, text)
    assert left == [] and notes == []
    assert steps[-1:] == ([step] if step is not None else [])
    assert later[:2] == [saves[-1][0] + 1, "later"]
    return killed


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_a_kill_before_each_operation_of_a_commit_leaves_a_whole_one(committer, tmp_path, again):
    saves = [(1, "first"), (1 if again else 2, "second")]
    num_kills = 1
    while check(committer, tmp_path / "run", saves, num_kills, keep_last=1):
        num_kills += 1
    assert num_kills > 15  # files written, renamed and removed


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.text("ab", max_size=2)), min_size=1, max_size=5),
    keep_last=st.integers(1, 3),
    keep_best=st.integers(0, 2),
    kill_at=st.integers(1, 60),
)
def test_a_kill_in_any_series_of_commits_leaves_a_whole_one(committer, tmp_path, steps, keep_last, keep_best, kill_at):
    step, saves = 0, []
    for ahead, text in steps:  # 0 ahead: the same step again
        step += ahead
        saves.append((step, text))
    check(committer, tmp_path / "run", saves, kill_at, keep_last=keep_last, keep_best=keep_best)
