"""A judge over HTTP, against a server that misbehaves in every way: a score, or none with the cause and the sample."""

import gc
import json
import math
import re
import threading
import time
from dataclasses import replace

import pytest

from mrl.config.config import RewardConfig, RewardFunctionConfig
from mrl.errors import UserError
from mrl.rewards.scorer import Scorer
from tests.rewards.judge_server import KEY, judge_server
from tests.rewards.rollouts import TOKENIZER, rollout

ROUNDING = 1e-12


@pytest.fixture(scope="module")
def server():
    with judge_server() as one:
        yield one


@pytest.fixture(autouse=True)
def forgotten(request):
    if "server" in request.fixturenames:
        one = request.getfixturevalue("server")
        one.asked.clear()
        one.times.clear()
        one.most = 0


def scored(name, texts, kwargs, rows=(), **options):
    """Rollouts with these responses, scored by one judge."""
    kwargs = {"model": "m", "timeout_s": 20.0, "limit_s": 40.0, "max_tries": 3, **kwargs}
    options = {"max_failed_frac": 1.0, **options}
    config = RewardConfig(functions=[RewardFunctionConfig(name, 1.0, kwargs)], **options)
    rollouts = [rollout(text, uid=place) for place, text in enumerate(texts)]
    for one, row in zip(rollouts, rows, strict=False):
        one.prompt.row.update(row)
    given = {"JUDGE_KEY": KEY}
    with Scorer(
        config, TOKENIZER.decode, variables=lambda *names: {n: given[n] for n in names if n in given}
    ) as scorer:
        scorer.score(rollouts)
    return rollouts


def test_a_judge_is_asked_for_a_score_on_a_scale(server):
    texts = ['say {"score": 7}', 'say ```json\n{"score": 10, "why": "fine"}\n```', 'say {"score": 0}']
    found = scored("judge", texts, {"url": server.url, "scale": [0, 10], "request": {"max_tokens": 5}})
    assert [one.reward for one in found] == pytest.approx([0.7, 1.0, 0.0], abs=ROUNDING)
    assert [one.reward_error for one in found] == [None] * 3
    path, key, body = server.asked[0]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", None, "m", 0)
    assert body["max_tokens"] == 5
    (message,) = body["messages"]
    assert "<1+2>" in message["content"] and "from 0 (useless) to 10 (perfect)" in message["content"]
    assert "<right_answer>\n3\n</right_answer>" in message["content"]


WAYS = {
    "status 500": "status 500.*tries: 3",
    "status 404": "status 404",
    "elsewhere": "status 307",
    "body <html>": "not a chat completion: '<html>'",
    'body {"choices": []}': "not a chat completion",
    "null": "not a chat completion",
    "huge": "a reply of more than 1048576 bytes",
    "slow": "no answer within [0-9.]+ s",
    "drip": "no answer within [0-9.]+ s",
    "hangup": "RemoteProtocolError|ReadError",
    'cut {"score": 1}': "truncated at its length limit",
    "say well": "not a JSON object: 'well'",
    'say {"score": "1"}': "'score' is not a number from 0 to 1",
    'say {"score": true}': "'score' is not a number",
    'say {"score": NaN}': "'score' is not a number",
    'say {"score": 1e999}': "'score' is not a number",
    f'say {{"score": {10**400}}}': "'score' is not a number from 0 to 1",
    f'say {{"score": -{10**400}}}': "'score' is not a number from 0 to 1",
    f'say {{"score": {"9" * 5000}}}': "not a JSON object",
    'say {"score": "\\ud800"}': "'score' is not a number",
    f'say {{"score": {"[" * 9000}': "not a JSON object",
    f"body {'[' * 100_000}": "not a chat completion",
    'body {"choices": [{"message": {"content": "\\ud800"}}]}': "not a JSON object",
    'say {"score": 1.5}': "'score' is not a number from 0 to 1",
    'say {"score": 1, "score": 0}': "it repeats a key",
    'say I give {"score": 1}': "not a JSON object",
    'say {"value": 1}': "'score' is not a number",
}


@pytest.mark.slow
def test_a_judge_that_misbehaves_gives_no_score_and_the_sample_is_named(server):
    """Never 0: and what it does well beside that counts."""
    texts = [text for way in WAYS for text in (way, 'say {"score": 1}')]
    start = time.monotonic()
    found = scored("judge", texts, {"url": server.url, "concurrency": 64, "timeout_s": 1.5, "limit_s": 4.0})
    assert time.monotonic() - start < 60
    for place, (way, said) in enumerate(WAYS.items()):
        bad, well = found[2 * place], found[2 * place + 1]
        assert (well.reward, well.reward_error) == (1.0, None)
        assert math.isnan(bad.reward) and bad.reward_parts == {}
        named = f"reward 'judge' failed on train.jsonl:{2 * place + 1} (uid {2 * place}, sample 0): "
        assert bad.reward_error.startswith(f"{named}the judge gave no score: ")
        assert re.search(said, bad.reward_error), (way, bad.reward_error)
    assert server.times["status 404"] == server.times["elsewhere"] == 1  # not worth another try
    assert server.times["status 500"] == 3


def test_a_busy_judge_is_asked_again(server):
    (one,) = scored("judge", ['busy {"score": 0.25}'], {"url": server.url})
    assert (one.reward, server.times['busy {"score": 0.25}']) == (0.25, 3)


def test_the_key_comes_from_the_environment_and_is_told_to_nobody(server):
    (one,) = scored("judge", ["status 401"], {"url": server.url, "key_env": "JUDGE_KEY"})
    assert server.asked[0][1] == f"Bearer {KEY}"
    assert "status 401" in one.reward_error and KEY not in one.reward_error and "***" in one.reward_error


def test_so_many_questions_are_asked_at_a_time(server):
    texts = [f'wait {{"score": {place / 40}}}' for place in range(40)]
    found = scored("judge", texts, {"url": server.url, "concurrency": 5})
    assert [one.reward for one in found] == [place / 40 for place in range(40)]
    assert 1 < server.most <= 5


def test_a_judge_that_is_down_costs_no_more_than_a_few_questions():
    with judge_server() as gone:
        url = gone.url
    texts = ["say 1"] * 400
    start = time.monotonic()
    found = scored("judge", texts, {"url": url, "concurrency": 4, "max_tries": 1})
    assert time.monotonic() - start < 20
    assert all(math.isnan(one.reward) for one in found)
    assert "ConnectError" in found[0].reward_error
    assert "not asked" in found[-1].reward_error and "gave no score 8 times in a row" in found[-1].reward_error


def test_too_many_failures_stop_asking(server):
    with pytest.raises(UserError, match=r"samples could not be scored.*status 404"):
        scored("judge", ["status 404"] * 300, {"url": server.url, "concurrency": 2}, max_failed_frac=0.01)
    assert len(server.asked) <= 12


def test_a_slow_judge_ends_when_the_job_is_told_to_stop(server, caplog):
    """Silently: what asyncio says of tasks that nobody waits for would stand in a user's terminal, at any time."""
    config = RewardConfig(functions=[RewardFunctionConfig("judge", 1.0, {"url": server.url, "model": "m"})])
    with Scorer(config, TOKENIZER.decode) as scorer:
        start = time.monotonic()
        scorer.score([rollout("slow", uid=place) for place in range(50)], lambda: time.monotonic() > start + 0.1)
    assert time.monotonic() - start < 10
    assert not [one.name for one in threading.enumerate() if one.name == "mrl judges"]
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_what_is_filled_into_the_template_is_not_looked_through(server):
    template = "{level} <response>\n{response}\n</response> {answer}"
    text = 'say {"score": 1} {answer} {prompt}'
    scored("judge", [text], {"url": server.url, "prompt": template}, [{"level": "{response}"}])
    assert server.asked[0][2]["messages"][0]["content"].startswith(
        '{response} <response>\nsay {"score": 1} {answer} {p'
    )
    (one,) = scored("judge", ["say 1"], {"url": server.url, "prompt": "{response} {levle}"})
    assert "contains {levle}, but the row has no such column" in one.reward_error


def test_a_row_of_which_nothing_can_be_asked_fails_alone(server):
    config = RewardConfig(functions=[RewardFunctionConfig("judge", 1.0, {"url": server.url, "model": "m"})])
    odd, well = rollout('say {"score": 1}'), rollout('say {"score": 1}', uid=1)
    odd.prompt = replace(odd.prompt, question=[5])
    with Scorer(config, TOKENIZER.decode) as scorer:
        scorer.score([odd, well])
    assert "could not be filled in: AttributeError" in odd.reward_error and math.isnan(odd.reward)
    assert well.reward == 1.0


def test_a_score_after_a_word(server):
    texts = ["say fine. Score: 8", "say fine. Score: **4**", "say Score: 1 Score: 10", "say Score: none", "say 7"]
    found = scored("judge", texts, {"url": server.url, "score_after": "Score:", "scale": [0, 10]})
    assert [one.reward for one in found[:2]] == pytest.approx([0.8, 0.4], abs=ROUNDING)
    assert all("expected 'Score:' once, followed by a number" in one.reward_error for one in found[2:])


CRITERIA = [{"name": "right", "text": "It is right.", "weight": 3}, {"text": "It rambles.", "weight": -1}]


def test_a_rubric_is_the_weighted_mean_of_its_criteria(server):
    texts = [
        f"say {json.dumps(said)}" for said in ({"right": 4, "c2": 0}, {"right": 2, "c2": 4}, {"right": 0, "c2": 4})
    ]
    found = scored("rubric", texts, {"url": server.url, "scale": [0, 4], "criteria": CRITERIA})
    assert [one.reward for one in found] == pytest.approx([1.0, (3 * 0.5 - 1) / 3, -1 / 3], abs=ROUNDING)
    assert found[1].reward_facts == {"right": 0.5, "c2": 1.0}
    assert "- right: It is right.\n- c2: It rambles." in server.asked[0][2]["messages"][0]["content"]


def test_a_rubric_of_the_row_and_a_reply_that_does_not_fit_it(server):
    rows = [{"rubric": CRITERIA}, {"rubric": CRITERIA[:1]}, {"rubric": [{"text": "", "weight": 0}]}, {}]
    texts = [f"say {json.dumps({'right': 1, 'c2': 0})}"] * 4
    found = scored("rubric", texts, {"url": server.url}, rows)
    assert (found[0].reward, found[0].reward_facts) == (1.0, {})
    assert "criterion 'c2' is missing in the reply or unknown" in found[1].reward_error
    assert "criterion 1 has the weight 0" in found[2].reward_error
    assert "the row has no column 'rubric'" in found[3].reward_error


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("judge", {"url": "localhost:80"}, "expected one that begins with http"),
        ("judge", {"url": "http://h", "modle": "m"}, "unexpected keyword argument 'modle'"),
        ("judge", {"url": "http://h", "key_env": "NO_KEY"}, "key_env=NO_KEY: this environment variable is not set"),
        ("judge", {"url": "http://h", "scale": [1, 1]}, "expected two numbers, the lower one first"),
        ("judge", {"url": "http://h", "prompt": "good?"}, r"contains neither \{response\}"),
        ("judge", {"url": "http://h", "request": {"stream": True}}, "request contains 'stream'"),
        ("judge", {"url": "http://h", "concurrency": 0}, "concurrency=0"),
        ("judge", {"url": "http://h", "limit_s": 0}, "seconds above 0"),
        ("rubric", {"url": "http://h", "criteria": []}, "expected a list of mappings"),
        ("rubric", {"url": "http://h", "criteria": [{"text": "a", "weight": -1}]}, "no criterion has a weight above 0"),
        ("rubric", {"url": "http://h", "criteria": [{"text": "a", "wieght": 1}]}, "criterion 1 is"),
        ("rubric", {"url": "http://h", "score_after": "x"}, "does not support score_after"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_the_start(name, kwargs, message):
    with pytest.raises(UserError, match=message):
        scored(name, [], kwargs)
