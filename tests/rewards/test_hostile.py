"""What a reward function raises or returns fails its sample, and its worker goes on."""

import pytest

from tests.rewards.hostile import WAYS
from tests.rewards.rollouts import rollout, scorer
from tests.rewards.test_scorer import worker_ids


@pytest.mark.parametrize("name", ["does", "does_later"])
def test_a_function_does_not_end_its_worker(name, capfd):
    samples = [rollout(text, uid=uid) for uid, text in enumerate([word for way in WAYS for word in ("well", way)])]
    with scorer(f"tests.rewards.hostile:{name}", max_failed_frac=0.9, time_limit_s=30.0) as judge:
        judge.score([rollout("well")])
        before = worker_ids(judge)
        judge.score(samples)
        assert worker_ids(judge) == before
    for sample in samples:
        assert (sample.reward_error is None) == (sample.response_text == "well"), sample
        assert sample.reward_error is None or "died" not in sample.reward_error
    assert len(capfd.readouterr().err.splitlines()) < 20


def test_a_module_that_exits_is_refused_by_name(tmp_path):
    from mrl.errors import UserError

    (tmp_path / "exits.py").write_text("raise KeyboardInterrupt\n")
    with (
        pytest.raises(UserError, match=r"exits\.py.* does not import: KeyboardInterrupt"),
        scorer(f"{tmp_path}/exits.py:f") as judge,
    ):
        judge.score([rollout("x")])
