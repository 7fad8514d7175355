"""Reward functions of verl and of TRL run as they are; TRL's own give what TRL gets from them."""

import math
import re
from hashlib import sha256
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import trl.rewards

from mrl.config.config import DataConfig, RewardConfig, RewardFunctionConfig
from mrl.data.prompts import load_training
from mrl.data.tokenizer import HFTokenizer
from mrl.errors import UserError
from mrl.rewards.scorer import Scorer
from mrl.types import Rollout
from tests.data.folders import byte_bpe_folder
from tests.rewards.verl.gsm8k import compute_score

GSM8K = Path(__file__).parent / "verl" / "gsm8k.py"
"""verl/utils/reward_score/gsm8k.py (Copyright 2024 Bytedance Ltd., Apache License 2.0) as verl 0.9.1 has it."""

GSM8K_OF_VERL_0_9_1 = "497c6e32b708d0bc8803b5a048ca5983de7756eb9c146abdc56e6f5d28767189"

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {index} and 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {"split": "train", "index": index},
    }
    for index in range(4)
]
"""What verl's examples/data_preprocess/gsm8k.py writes."""

VERL = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **others):
    assert data_source == "openai/gsm8k" and not others
    assert (extra_info["split"], extra_info["num_turns"], extra_info["rollout_reward_scores"]) == ("train", 2, {})
    found = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return float(bool(found) and found[-1] == ground_truth) + bonus

def only_two(solution_str, ground_truth, method="strict"):
    return solution_str == "#### " + ground_truth

def with_facts(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.5, "acc": solution_str.endswith(ground_truth), "pred": solution_str[-1:]}

async def later(data_source, solution_str, ground_truth, extra_info):
    import asyncio
    await asyncio.sleep(0)
    return float(solution_str.endswith(ground_truth))

def many(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(text.endswith(truth)) for text, truth in zip(solution_strs, ground_truths)]

def raises(data_source, solution_str, ground_truth, extra_info):
    raise KeyError(data_source)

def hangs(data_source, solution_str, ground_truth, extra_info):
    while True:
        pass
"""

TRL = """
def mine(completions, reward_model, extra_info, **kwargs):
    assert kwargs["prompts"][0][0]["role"] == "user" and "prompt" not in kwargs
    assert completions[0][0]["role"] == "assistant"
    truths = [one["ground_truth"] for one in reward_model]
    return [float(text[0]["content"].endswith(truth)) for text, truth in zip(completions, truths)]

def sometimes(completions, completion_ids, extra_info, log_metric, log_extra):
    log_metric("num_ids", len(completion_ids[0]))
    log_extra("said", [completions[0][0]["content"]])
    return [None if one["index"] % 2 else 1.0 for one in extra_info]

async def later(completions, **kwargs):
    return [1.0 for _ in completions]

def asked(completions, answer):
    return [float(text[0]["content"].endswith(one)) for text, one in zip(completions, answer)]

def two(completions, **kwargs):
    return [1.0, 2.0]

def number(completions, **kwargs):
    return 1.0

def needs(completions, solution, **kwargs):
    return [1.0]

def knows(completions, trainer_state):
    return [1.0]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "verls.py").write_text(VERL)
    (folder / "trls.py").write_text(TRL)
    byte_bpe_folder(folder / "model")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return HFTokenizer(folder / "model", model_folder=None, chat_template="{{ messages[0]['content'] }}")


def scored(folder, tokenizer, name, texts, **options):
    """The rollouts of verl's rows, read with no settings at all, with these responses."""
    data = DataConfig(train_files=[str(folder / "train.parquet")], shuffle=False)
    prompts = load_training(data, tokenizer, prompt_length=64, seed=0).next(len(texts))
    rollouts = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        rollouts.append(Rollout(prompt, 0, ids, [0.0] * len(ids), "stop", 0))
    kwargs = options.pop("kwargs", {})
    reward = RewardConfig(functions=[RewardFunctionConfig(name, 1.0, kwargs)], max_failed_frac=1.0, **options)
    with Scorer(reward, tokenizer.decode, tokenizer.eos_ids, tokenizer.special_ids) as judge:
        judge.score(rollouts)
    return rollouts


def test_a_row_of_verl_is_read_with_no_settings(folder, tokenizer):
    data = DataConfig(train_files=[str(folder / "train.parquet")], shuffle=False)
    prompt = load_training(data, tokenizer, prompt_length=64, seed=0).next(2)[1]
    assert (prompt.answer, prompt.data_source, prompt.question) == ("2", "openai/gsm8k", ROWS[1]["prompt"])
    assert prompt.extra == {key: ROWS[1][key] for key in ("data_source", "ability", "extra_info")}
    assert prompt.row == ROWS[1]


@pytest.mark.parametrize("truth", [["a", "b"], {"target": ["a"]}, True])
def test_a_ground_truth_of_any_kind_reaches_verls_function_as_it_is(tmp_path, folder, tokenizer, truth):
    (tmp_path / "f.py").write_text(
        f"def f(data_source, solution_str, ground_truth, extra_info):\n    return ground_truth == {truth!r}"
    )
    row = {**ROWS[0], "reward_model": {"style": "rule", "ground_truth": truth}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    assert scored(tmp_path, tokenizer, f"{tmp_path}/f.py:f", ["a"])[0].reward == 1.0


@pytest.mark.parametrize("function", ["compute_score", "only_two", "later", "many"])
def test_functions_of_verl_run_as_they_are(folder, tokenizer, function):
    rollouts = scored(folder, tokenizer, f"{folder}/verls.py:{function}", ["#### 1", "#### 3", "#### 3"])
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 1.0]
    assert not any(rollout.reward_error for rollout in rollouts)


def test_reward_kwargs_and_further_facts_of_verl(folder, tokenizer):
    rollouts = scored(folder, tokenizer, f"{folder}/verls.py:compute_score", ["#### 1"], kwargs={"bonus": 0.25})
    assert rollouts[0].reward == 1.25
    rollouts = scored(folder, tokenizer, f"{folder}/verls.py:with_facts", ["1"])
    assert (rollouts[0].reward, rollouts[0].reward_facts) == (0.5, {"score": 0.5, "acc": 1.0, "pred": "1"})


def test_special_tokens_are_no_part_of_what_verl_and_trl_see(tmp_path, tokenizer, folder):
    special = tokenizer.decode([max(tokenizer.special_ids)])
    rollouts = scored(folder, tokenizer, f"{folder}/verls.py:only_two", [f"#### {special}1"])
    assert special in rollouts[0].response_text and rollouts[0].reward == 1.0


@pytest.mark.parametrize("function", ["raises", "hangs"])
def test_a_failure_of_verls_function_fails_its_sample(folder, tokenizer, function):
    (rollout,) = scored(folder, tokenizer, f"{folder}/verls.py:{function}", ["1"], time_limit_s=1.0, error_value=-1.0)
    assert rollout.reward == -1.0
    assert {"raises": "KeyError: 'openai/gsm8k'", "hangs": "time_limit_s"}[function] in rollout.reward_error


def test_functions_of_trl_run_as_they_are(folder, tokenizer):
    assert [one.reward for one in scored(folder, tokenizer, f"{folder}/trls.py:mine", ["1", "3", "3"])] == [1, 0, 1]
    assert [one.reward for one in scored(folder, tokenizer, f"{folder}/trls.py:later", ["1"])] == [1.0]
    assert [one.reward for one in scored(folder, tokenizer, f"{folder}/trls.py:asked", ["1", "3"])] == [1, 0]


def test_no_opinion_of_a_trl_function_counts_nothing_and_its_logs_are_facts(folder, tokenizer):
    rollouts = scored(folder, tokenizer, f"{folder}/trls.py:sometimes", ["12", "34"])
    assert rollouts[0].reward == 1.0 and math.isnan(rollouts[1].reward)  # as in TRL: it has no score, and not 0
    assert [one.reward_parts for one in rollouts] == [{"sometimes": 1.0}, {}]
    assert not any(one.reward_error for one in rollouts)
    assert rollouts[0].reward_facts == {"score": 1.0, "num_ids": float(len(rollouts[0].response_ids)), "said": "12"}


@pytest.mark.parametrize("place", ["trl.rewards", Path(trl.rewards.__file__).with_name("format_rewards.py")])
def test_trls_own_reward_gives_what_trl_gets_from_it(folder, tokenizer, place):
    texts = ["<think>\na\n</think>\nb", "b", "<think>a</think>"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    rollouts = scored(folder, tokenizer, f"{place}:think_format_reward", texts)
    assert [one.reward for one in rollouts] == trl.rewards.think_format_reward(chats)


def test_verls_own_gsm8k_file_gives_what_verl_gets_from_it(folder, tokenizer):
    assert sha256(GSM8K.read_bytes()).hexdigest() == GSM8K_OF_VERL_0_9_1
    texts = ["so #### 1", "#### 1,000", "#### 3 or 4", "no answer"]
    rollouts = scored(folder, tokenizer, f"{GSM8K}:compute_score", texts)
    truths = [row["reward_model"]["ground_truth"] for row in ROWS]
    assert [one.reward for one in rollouts] == [compute_score(*pair) for pair in zip(texts, truths, strict=True)]
    assert [one.reward for one in rollouts] == [1.0, 0.0, 1.0, 0.0]
    flexible = {"method": "flexible", "format_score": 0.1}
    found = scored(folder, tokenizer, f"{GSM8K}:compute_score", texts, kwargs=flexible)
    assert [one.reward for one in found] == [
        compute_score(*pair, **flexible) for pair in zip(texts, truths, strict=True)
    ]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("two", r"it returned list \[1.0, 2.0\], expected a list of one value for one response"),
        ("number", "it returned float 1.0, expected a list of one"),
        ("needs", "missing 1 required positional argument: 'solution'"),
    ],
)
def test_what_a_trl_function_does_wrong_fails_its_sample(folder, tokenizer, function, said):
    assert re.search(said, scored(folder, tokenizer, f"{folder}/trls.py:{function}", ["1"])[0].reward_error)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("verls.py:with_facts", {"bonus": 1}, "unexpected keyword argument 'bonus'"),
        ("trls.py:knows", {}, "it needs 'trainer_state' of TRL's trainer, which is not available in a worker"),
        ("trls.py:sometimes", {"bonus": 1}, "unexpected keyword argument 'bonus'"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_the_start(folder, tokenizer, name, kwargs, message):
    with pytest.raises(UserError, match=message):
        scored(folder, tokenizer, f"{folder}/{name}", ["1"], kwargs=kwargs)
