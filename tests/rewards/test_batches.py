"""Functions that take lists get the samples of a prompt, or all, in one call; those that wait wait together."""

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest
import torch

from mrl.config.config import RewardConfig, RewardFunctionConfig
from mrl.errors import UserError
from mrl.rewards._bound_reward import RewardCall
from mrl.rewards._call_batches import CallBatch, ScoringTask
from mrl.rewards.scorer import Scorer
from mrl.types import Prompt
from tests.rewards.rollouts import TOKENIZER, rollout

FUNCTIONS = """
import asyncio, json, os, time
from trl.rewards import get_repetition_penalty_reward

repeats = get_repetition_penalty_reward(ngram_size=2)

def best(completions, prompts, **columns):
    # how many of its prompt's answers are shorter
    texts = [one[0]["content"] for one in completions]
    same = [[len(text) for text, asked in zip(texts, prompts) if asked == own] for own in prompts]
    return [float(sum(other < len(text) for other in group)) for text, group in zip(texts, same)]

async def later(completions, level, **columns):
    await asyncio.sleep(0.01)
    return [None if one is None else one / len(text[0]["content"]) for text, one in zip(completions, level)]
"""

OWN = """
import asyncio, json, os, time

def noted(completions, file, log_metric, fails=None):
    with open(file, "a") as notes:
        notes.write(json.dumps(completions) + "\\n")
    log_metric("size", len(completions))
    ways = {
        "raise": lambda: {}["missing"],
        "die": lambda: os._exit(3),
        "hang": lambda: time.sleep(600),
        "short": lambda: [1.0],
        "one": lambda: [1.0 if text != fails else float("nan") for text in completions],
    }
    return ways[fails]() if fails in completions else [len(text) / len(completions) for text in completions]

def of_verl(data_sources, solution_strs, ground_truths, extra_infos):
    rank = sorted(solution_strs)
    pairs = zip(solution_strs, ground_truths)
    return [{"score": float(rank.index(text)), "acc": text == truth} for text, truth in pairs]

inside = 0

async def meets(solution_str, ground_truth, together, again=()):
    # returns once so many are inside at the same time
    global inside
    inside += 1
    for way in again:
        if solution_str == way:
            time.sleep(600) if way == "block" else await asyncio.sleep(600)
    while inside < together:
        await asyncio.sleep(0.001)
    return float(len(solution_str))

async def groups_meet(completions, together):
    global inside
    inside += 1
    while inside < together:
        await asyncio.sleep(0.001)
    return [float(len(completions))] * len(completions)

def one(*, prompt, response, answer, extra):
    return 1.0
"""

LIMIT_S = 1.5  # for microseconds of work, on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    (folder / "trls.py").write_text(FUNCTIONS)
    (folder / "own.py").write_text(OWN)
    return folder


def scorer(folder, *functions, scores=None, **options):
    """A scorer of functions of OWN, given as (name, kwargs, batch)."""
    named = [RewardFunctionConfig(f"{folder}/own.py:{name}", 1.0, kwargs, batch) for name, kwargs, batch in functions]
    config = RewardConfig(
        functions=named, **{"max_failed_frac": 1.0, "cache_mb": 0 if scores is None else 1, **options}
    )
    return Scorer(config, TOKENIZER.decode, TOKENIZER.eos_ids, scores=scores)


def groups_of(*groups):
    """Rollouts of prompts with these responses."""
    return [
        rollout(text, uid=uid, sample_index=index)
        for uid, texts in enumerate(groups)
        for index, text in enumerate(texts)
    ]


def calls_in(file):
    return sorted(file.read_text().splitlines())


def trl_gives(functions, rows, chats, ids):
    """What GRPOTrainer has of its reward functions for these rows, [samples, functions]."""
    from trl import GRPOTrainer  # here: it takes seconds to import

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        state=SimpleNamespace(global_step=0),
        environments=None,
        async_loop=loop,
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[str(function) for function in functions],
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    found = GRPOTrainer._calculate_rewards(trainer, rows, [row["prompt"] for row in rows], chats, ids)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("batch", [None, "replica"])
def test_functions_of_trl_give_what_trls_trainer_gets_from_them(folder, batch):
    names = [
        "trl.rewards:accuracy_reward",
        "trl.rewards:think_format_reward",
        *(f"{folder}/trls.py:{name}" for name in ("repeats", "best", "later")),
    ]
    texts = [["<think>1</think>$3$", r"\boxed{3}", "a a a a", "$4$"], [r"\boxed{5}", "b", "cc", "$5$"]]
    questions = [[{"role": "user", "content": text}] for text in ("1+2", "2+3")]
    solutions, levels = ["$3$", "none"], [4, None]
    rollouts, rows, chats, ids = [], [], [], []
    for uid, group in enumerate(texts):
        row = {"prompt": questions[uid], "solution": solutions[uid], "level": levels[uid]}
        for index, text in enumerate(group):
            rollouts.append(rollout(text, uid=uid, sample_index=index))
            rollouts[-1].prompt = Prompt(uid, (1,), "", None, {}, "f", "", questions[uid], row)
            rows.append(row)
            chats.append([{"role": "assistant", "content": text}])
            ids.append(rollouts[-1].response_ids)
    functions = [RewardCall(name, {})._function for name in names]
    wanted = trl_gives(functions, rows, chats, ids)
    assert wanted.isnan().any() and (wanted[:, 3] > 0).any()
    config = RewardConfig(
        functions=[RewardFunctionConfig(name, 1.0, {}, batch) for name in names], num_workers=2, time_limit_s=60.0
    )
    with Scorer(config, TOKENIZER.decode, TOKENIZER.eos_ids) as judge:
        judge.score(rollouts)
        labels = judge._labels
    assert [one.reward_error for one in rollouts] == [None] * 8
    given = torch.tensor([[one.reward_parts.get(label, math.nan) for label in labels] for one in rollouts])
    torch.testing.assert_close(given, wanted, rtol=0, atol=0, equal_nan=True)
    total = torch.tensor([one.reward for one in rollouts])
    torch.testing.assert_close(total, wanted.nansum(dim=1))


def test_a_call_has_the_samples_of_a_prompt_in_their_order(folder, tmp_path):
    rollouts = groups_of(["a", "bb", "ccc"], ["d"], ["e", "ff"])
    mixed = [rollouts[place] for place in (4, 2, 0, 5, 3, 1)]
    with scorer(folder, ("noted", {"file": str(tmp_path / "notes")}, None), num_workers=2) as judge:
        judge.score(mixed)
    assert calls_in(tmp_path / "notes") == ['["a", "bb", "ccc"]', '["d"]', '["e", "ff"]']
    assert [one.reward for one in rollouts] == [1 / 3, 2 / 3, 1.0, 1.0, 0.5, 1.0]
    assert [one.reward_facts["size"] for one in rollouts] == [3.0, 3.0, 3.0, 1.0, 2.0, 2.0]


def test_a_call_has_all_samples_where_the_config_says_so(folder, tmp_path):
    rollouts = groups_of(["a", "bb"], ["d"])
    functions = ("noted", {"file": str(tmp_path / "notes")}, "replica"), ("of_verl", {}, None), ("one", {}, None)
    with scorer(folder, *functions) as judge:
        judge.score(rollouts[::-1])
    assert calls_in(tmp_path / "notes") == ['["a", "bb", "d"]']
    assert [one.reward_parts["of_verl"] for one in rollouts] == [0.0, 1.0, 0.0]
    assert [one.reward for one in rollouts] == pytest.approx([1 + 1 / 3, 2 + 2 / 3, 1 + 1 / 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("raise", "KeyError: 'missing'"),
        ("die", "the worker process died over it (exit status 3)"),
        ("hang", f"it took longer than reward.time_limit_s={LIMIT_S / 3:g} for each of 3 samples"),
        ("short", "expected a list of 3 values, one for each response"),
    ],
)
def test_a_call_that_fails_fails_its_samples_alone(folder, tmp_path, fails, said):
    rollouts = groups_of(["a", "bb"], ["c", fails, "d"], ["e"])
    functions = ("noted", {"file": str(tmp_path / "notes"), "fails": fails}, None), ("one", {}, None)
    with scorer(folder, *functions, time_limit_s=LIMIT_S / 3) as judge:
        judge.score(rollouts)
    assert [math.isnan(one.reward) for one in rollouts] == [False, False, True, True, True, False]
    for place, one in enumerate(rollouts[2:5]):
        assert said in one.reward_error and f"(uid 1, sample {place})" in one.reward_error
        assert one.reward_parts == {"one": 1.0}


def test_a_value_that_is_none_fails_its_sample_alone(folder, tmp_path):
    rollouts = groups_of(["a", "one", "d"])
    with scorer(folder, ("noted", {"file": str(tmp_path / "notes"), "fails": "one"}, None)) as judge:
        judge.score(rollouts)
    assert [one.reward_error is None for one in rollouts] == [True, False, True]


@pytest.mark.slow
def test_calls_that_wait_wait_together_and_one_that_hangs_fails_alone(folder):
    texts = [str(number) for number in range(20)]
    with scorer(folder, ("meets", {"together": 20}, None), time_limit_s=60.0) as judge:
        samples = groups_of(texts)
        judge.score(samples)
    assert [one.reward for one in samples] == [float(len(text)) for text in texts]
    with scorer(folder, ("meets", {"together": 1, "again": ["hang", "block"]}, None), time_limit_s=LIMIT_S) as judge:
        samples = groups_of([*texts, "hang", "a", "block", "b"])
        judge.score(samples)
    failed = [one.response_text for one in samples if one.reward_error]
    assert failed == ["hang", "block"]
    assert all("longer than reward.time_limit_s" in one.reward_error for one in samples if one.reward_error)


def test_groups_wait_together_too(folder):
    samples = groups_of(["a", "b"], ["c"], ["d", "e", "f"])
    with scorer(folder, ("groups_meet", {"together": 3}, None), time_limit_s=60.0) as judge:
        judge.score(samples)
    assert [one.reward for one in samples] == [2.0, 2.0, 1.0, 3.0, 3.0, 3.0]


def test_a_group_is_scored_once_and_again_where_one_of_its_samples_is_another(folder, tmp_path):
    def scored(*groups):
        (tmp_path / "notes").write_text("")
        functions = ("noted", {"file": str(tmp_path / "notes"), "fails": "raise"}, None), ("one", {}, None)
        with scorer(folder, *functions, scores=tmp_path / "scores" / "replica0") as judge:
            judge.score(rollouts := groups_of(*groups))
        return rollouts, calls_in(tmp_path / "notes")

    first, calls = scored(["a", "bb"], ["c", "raise"])
    assert len(calls) == 2 and not any(one.reward_cached for one in first)
    again, calls = scored(["a", "bb"], ["c", "raise"])
    assert calls == ['["c", "raise"]']  # a failure is no score
    assert [one.reward_cached for one in again] == [True, True, False, False]
    assert [one.reward for one in again[:2]] == [one.reward for one in first[:2]]
    other, calls = scored(["a", "b"], ["c"])
    assert calls == ['["a", "b"]', '["c"]'] and other[0].reward == 1.5


def test_a_batch_for_a_function_of_one_sample_is_refused(folder):
    with pytest.raises(UserError, match=r"own.py:one' has batch=group, but takes one sample at a time"):
        scorer(folder, ("one", {}, "group"))
    config = RewardConfig(functions=[RewardFunctionConfig("exact_match", 1.0, {}, "replica")])
    with pytest.raises(UserError, match="'exact_match' has batch=replica"):
        Scorer(config, TOKENIZER.decode)


def test_every_row_is_in_one_call():
    order = [(uid % 7, uid) for uid in range(50)]
    for reach in ("sample", "group", "replica"):
        for waits in (False, True):
            bundle = CallBatch((0, 2), reach, waits)
            tasks = bundle.tasks(bundle.units(order), 3)
            assert sorted(row for task in tasks for row in task.rows) == list(range(50))
            assert all(isinstance(task, ScoringTask) and task.calls == (0, 2) for task in tasks)
    assert CallBatch((0,), "replica", False).units([]) == []
