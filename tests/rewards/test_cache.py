"""No score is computed twice, and no cut or foreign line of the cache's files becomes one."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.config.config import RewardConfig, RewardFunctionConfig
from mrl.rewards._bound_reward import Outcome
from mrl.rewards._cache import MIB, ScoreCache
from mrl.rewards.scorer import Scorer
from tests.e2e import runs
from tests.rewards.judge_server import judge_server
from tests.rewards.rollouts import END, TOKENIZER, rollout

COUNTED = """
def counted(*, prompt, response, answer, extra, file, add=0.0):
    with open(file, "a") as notes:
        notes.write(response + "\\n")
    if response == "bad":
        raise ValueError("bad")
    return {"score": len(response) + add, "pred": response}
"""


@pytest.fixture
def counted(tmp_path):
    (tmp_path / "mine.py").write_text(COUNTED)
    return tmp_path


def scored(folder, texts, *, cache_mb=1, uid=0, kwargs=None, answer="3", replica="replica0"):
    """The rollouts with these responses, and what was called for them."""
    notes = folder / "notes"
    notes.write_text("")
    named = RewardFunctionConfig(f"{folder}/mine.py:counted", 1.0, {"file": str(notes), **(kwargs or {})})
    config = RewardConfig(functions=[named], max_failed_frac=1.0, cache_mb=cache_mb)
    rollouts = [rollout(text, uid=uid + place, answer=answer) for place, text in enumerate(texts)]
    with Scorer(config, TOKENIZER.decode, TOKENIZER.eos_ids, scores=folder / "scores" / replica) as judge:
        judge.score(rollouts)
    return rollouts, notes.read_text().split()


def test_the_same_sample_is_scored_once(counted):
    first, called = scored(counted, ["ab", "c", "ab", "bad", "bad"])
    assert [one.reward for one in first[:3]] == [2.0, 1.0, 2.0] and called == ["ab", "c", "bad"]
    assert [one.reward_cached for one in first] == [False, False, True, False, True]
    assert "ValueError: bad" in first[4].reward_error and "train.jsonl:5" in first[4].reward_error
    again, called = scored(counted, ["c", "ab", "new", "bad"])
    assert called == ["new", "bad"]  # a failure is no score
    assert [one.reward for one in again[:3]] == [1.0, 2.0, 3.0]
    assert [one.reward_facts for one in again[:2]] == [{"score": 1.0, "pred": "c"}, {"score": 2.0, "pred": "ab"}]
    assert [one.reward_cached for one in again] == [True, True, False, False]
    assert scored(counted, ["ab"], replica="replica7")[1] == []  # another layout finds what the other wrote


def test_another_row_other_tokens_another_function_is_another_score(counted):
    scored(counted, ["ab"])
    assert scored(counted, ["ab"])[1] == []
    assert scored(counted, ["ab"], answer="4")[1] == ["ab"]
    assert scored(counted, [f"ab{END}"])[1] == ["ab"]  # the same text, another token
    assert scored(counted, ["ab"], kwargs={"add": 1.0})[0][0].reward == 3.0
    (counted / "mine.py").write_text(COUNTED.replace("len(response)", "2 * len(response)"))
    assert scored(counted, ["ab"])[0][0].reward == 4.0
    assert scored(counted, ["ab"], cache_mb=0)[1] == ["ab"]


def test_a_judge_is_not_asked_again_whatever_its_limits(tmp_path):
    texts = ['say {"score": 1}', 'say {"score": 0.5}', 'say {"score": 1}', "say no"]
    with judge_server() as server:
        for kwargs in ({}, {"concurrency": 3, "max_tries": 1}):
            given = {"url": server.url, "model": "m", "max_tries": 2, **kwargs}
            config = RewardConfig(functions=[RewardFunctionConfig("judge", 1.0, given)], max_failed_frac=1.0)
            with Scorer(config, TOKENIZER.decode, scores=tmp_path / "scores" / "replica0") as judge:
                rollouts = [rollout(text) for text in texts]
                judge.score(rollouts)
            assert [one.reward for one in rollouts[:3]] == [1.0, 0.5, 1.0]
        assert server.times == {texts[0]: 1, texts[1]: 1, "say no": 3}


OUTCOMES = [[Outcome(float(place), facts={"pred": f"ß\n{place}"})] for place in range(6)]


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000), junk=st.binary(max_size=30))
def test_a_file_cut_anywhere_holds_true_scores_only(tmp_path_factory, cut, junk):
    folder = tmp_path_factory.mktemp("scores")
    cache = ScoreCache(folder, "replica0", 1)
    for place, outcomes in enumerate(OUTCOMES):
        cache.put([(f"key{place}", outcomes)])
    cache.close()
    file = folder / "replica0.jsonl"
    data = file.read_bytes()
    whole = data[: cut % (len(data) + 1)]
    file.write_bytes(whole + junk)
    cache = ScoreCache(folder, "replica0", 1)
    cache.put([("after", OUTCOMES[0])])
    cache.close()
    cache = ScoreCache(folder, "replica0", 1)
    found = [cache.get(f"key{place}") for place in range(len(OUTCOMES))]
    cache.close()
    assert cache.get("after") == OUTCOMES[0]
    assert all(one in (None, outcomes) for one, outcomes in zip(found, OUTCOMES, strict=True))
    assert sum(one is not None for one in found) >= whole.count(b"\n")


def test_the_files_stay_within_the_limit_and_what_is_used_stays(tmp_path):
    cache = ScoreCache(tmp_path, "replica0", 1)
    long = [Outcome(1.0, facts={"pred": "x" * 1000})]
    cache.put([("used", OUTCOMES[1])])
    for place in range(3000):
        cache.put([(f"key{place}", long)])
        assert cache.get("used") == OUTCOMES[1]
    cache.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= MIB
    assert sorted(path.name for path in tmp_path.iterdir()) == ["replica0.jsonl", "replica0.old.jsonl"]
    again = ScoreCache(tmp_path, "replica0", 1)
    assert again.get("used") == OUTCOMES[1] and again.get("key2999") == long and again.get("key0") is None
    again.close()


def test_a_folder_that_takes_nothing_costs_nothing_but_the_scores(tmp_path):
    (tmp_path / "file").write_text("")
    cache = ScoreCache(tmp_path / "file" / "scores", "replica0", 1)
    cache.put([("key", OUTCOMES[0])])
    assert cache.get("key") == OUTCOMES[0]
    cache.close()


KILLS = """
import os, signal, time
import psutil

def counted(*, prompt, response, answer, extra):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(prompt + response + "\\n")
        notes.flush()
    if sum(1 for _ in open(os.environ["NOTES"])) == int(os.environ["KILL_AT"]):
        time.sleep(2)  # the trainer takes in what was answered: on a busy machine it may not have had its turn
        os.kill(psutil.Process().parent().ppid(), signal.SIGKILL)  # worker, keeper, trainer
        time.sleep(60)
    return float(len(response))
"""


@pytest.mark.slow
def test_a_resume_after_a_kill_in_the_middle_of_scoring_computes_nothing_twice(tmp_path):
    (tmp_path / "mine.py").write_text(KILLS)
    notes = tmp_path / "notes"
    overrides = [
        f"reward={{functions: [{{name: '{tmp_path}/mine.py:counted'}}]}}",
        "train={num_steps: 2, batch_size: 8, minibatch_size: 8, warm_start: {num_steps: 1}}",
        "checkpoint.interval=1",
    ]
    killed = runs.fork(tmp_path, overrides, NOTES=str(notes), KILL_AT="45")
    killed.join(runs.TIMEOUT_S)
    before = notes.read_text().splitlines()
    assert len(before) == 45, (tmp_path / "output.txt").read_text()[-2000:]
    rest = runs.fork(tmp_path, overrides, NOTES=str(notes), KILL_AT="0")
    rest.join(runs.TIMEOUT_S)
    assert rest.exitcode == 0, (tmp_path / "output.txt").read_text()[-2000:]
    calls = notes.read_text().splitlines()
    assert len(calls) > 50 and len(calls) - len(set(calls)) <= 1  # the one that was not answered
    timings = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    assert max(row.get("perf/reward/num_cached", 0.0) for row in timings) > 0
