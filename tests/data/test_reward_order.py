"""Order by past rewards: what the function sees, the order that follows, what a resume restores, and bad results."""

import json
import math
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.config.config import DataConfig, code_names, load, orders_by_rewards
from mrl.data.prompt_order import EpochOrder, call_here
from mrl.data.prompts import load_training
from mrl.data.reward_order import RewardOrder, RowRewards
from mrl.data.row_sources import JsonlRows, RowSource
from mrl.data.tokenizer import HFTokenizer
from mrl.errors import UserError
from mrl.trainer.validation.data import data_rules
from tests.data.folders import byte_bpe_folder
from tests.source import PACKAGE

EASY_FIRST = "def order(rows, rewards):\n    return [-(past.mean or 0.0) for past in rewards]\n"
PAGE = (PACKAGE / "docs" / "own_data.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"<!-- order_by -->\n```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HFTokenizer(byte_bpe_folder(tmp_path_factory.mktemp("tokenizer")))


class Numbered(RowSource):
    """Rows without content."""

    fingerprint = "numbered"

    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size

    def row(self, index):
        return {"number": index}

    def source(self, index):
        return f"rows:{index}"

    def data_source(self, index):
        return "rows"


def code(folder, text):
    (folder / "curriculum.py").write_text(text)
    return f"{folder}/curriculum.py:order"


def rows_file(folder, count=12):
    file = folder / "rows.jsonl"
    rows = [{"prompt": f"{number}", "answer": f"{number}", "level": number} for number in range(count)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def source(folder, tokenizer, name, **data):
    config = DataConfig(train_files=[rows_file(folder)], order_by=name, **data)
    return load_training(config, tokenizer, prompt_length=64, seed=1)


def reward(uid, sample):
    """A reward of a sample that is no function of the row."""
    return random.Random(f"{uid} {sample}").choice([0.0, 0.25, 1.0])


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_is_sorted_by_the_mean_rewards_so_far_and_ties_are_in_the_order_of_the_epoch(
    shuffle, tmp_path, tokenizer
):
    stream = source(tmp_path, tokenizer, code(tmp_path, EASY_FIRST), shuffle=shuffle)
    ties = EpochOrder(12, 1, shuffle=shuffle)
    seen = {row: [] for row in range(12)}
    for epoch in range(4):
        expected = [ties.row_at(12 * epoch + place) for place in range(12)]
        expected.sort(key=lambda row: -(sum(seen[row]) / len(seen[row]) if seen[row] else 0.0))
        prompts = stream.next(12)
        assert [int(prompt.answer) for prompt in prompts] == expected
        for prompt in prompts:
            rewards = [reward(prompt.uid, sample) for sample in range(3)]
            seen[int(prompt.answer)] += rewards
            stream.record_rewards([prompt.uid] * 3, rewards)


def test_the_function_is_called_once_per_epoch_with_rows_and_rewards(tmp_path, tokenizer):
    log = tmp_path / "log"
    text = (
        "import json\n"
        "def order(rows, rewards):\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        json.dump([[row['level'], past.count, past.mean] for row, past in zip(rows, rewards)], file)\n"
        "        file.write('\\n')\n"
        "    assert len(rows) == len(rewards) == 12 and rows[-1]['level'] == 11 and len(rewards[2:5]) == 3\n"
        "    return [0] * len(rows)\n"
    )
    stream = source(tmp_path, tokenizer, code(tmp_path, text), shuffle=False)
    uids = [prompt.uid for prompt in stream.next(12)]
    stream.record_rewards([uids[3], uids[3], uids[5]], [1.0, 0.5, 0.0])
    stream.next(13)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert calls[0] == [[row, 0, None] for row in range(12)]
    assert calls[1] == [[row, {3: 2, 5: 1}.get(row, 0), {3: 0.75, 5: 0.0}.get(row)] for row in range(12)]
    assert calls[1] == calls[2] and len(calls) == 3


def train(stream, steps, held=()):
    """Draws 5 prompts in each step and trains on the oldest 5 of those that it holds."""
    held, drawn = list(held), []
    for _ in steps:
        held += stream.next(5 if held else 10)
        drawn += held[-5:]
        taken, held = held[:5], held[5:]
        for prompt in taken:
            stream.record_rewards([prompt.uid] * 2, [reward(prompt.uid, sample) for sample in range(2)])
        stream.release(held[0].uid)
    return [(prompt.uid, prompt.answer) for prompt in drawn], held


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 13))
def test_a_resumed_stream_goes_on_where_it_stopped_with_samples_in_flight(cut, tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("run")
    name = code(folder, EASY_FIRST)
    whole, _ = train(source(folder, tokenizer, name), range(14))
    first, second = (source(folder, tokenizer, name) for _ in range(2))
    one, held = train(first, range(cut))
    second.peek(8)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [second.at(prompt.uid) for prompt in held] == held
    assert second.state_dict() == first.state_dict()
    other, _ = train(second, range(cut, 14), held)
    assert one + other == whole


def test_looking_ahead_changes_nothing(tmp_path, tokenizer):
    stream, plain = (source(tmp_path, tokenizer, code(tmp_path, EASY_FIRST)) for _ in range(2))
    for number in range(5):
        stream.peek(12)
        assert stream.state_dict() == plain.state_dict()
        (prompt,), (same,) = stream.next(1), plain.next(1)
        assert prompt == same
        for each in (stream, plain):
            each.record_rewards([prompt.uid], [float(number)])


def test_the_order_of_a_million_rows_is_a_few_megabytes(tmp_path):
    size, name = 1_000_000, code(tmp_path, "def order(rows, rewards):\n    return range(len(rows), 0, -1)\n")
    order, again = (RewardOrder(Numbered(size), name, EpochOrder(size, 0, shuffle=False)) for _ in range(2))
    order.prepare(0, call_here)
    order.record(range(0, size, 50), [0.5] * 20_000)
    text = json.dumps(order.state_dict())
    assert len(text) < 5e6
    again.load_state_dict(json.loads(text), 7)
    assert [again.row_at(place) for place in (0, 7, size - 1)] == [size - 1, size - 8, 0]


@pytest.mark.parametrize("kind", ["np.asarray({})", "torch.tensor({})", "(x for x in {})", "tuple({})"])
def test_numbers_of_other_libraries_are_numbers(kind, tmp_path):
    values = [2, math.inf, True, -math.inf]
    text = "import numpy as np, torch\ninf = float('inf')\n"
    text += f"def order(rows, rewards):\n    return {kind.format(values)}\n"
    order = RewardOrder(Numbered(4), code(tmp_path, text), EpochOrder(4, 0, shuffle=False))
    order.prepare(0, call_here)
    assert [order.row_at(place) for place in range(4)] == [3, 2, 0, 1]


BAD = {
    "None": "return None",
    "11 values for 12 rows": "return [0] * 11",
    "nan for row 2 (": "return [0, 0, float('nan'), *[0] * 9]",
    "'1' for row 11 (": "return [0] * 11 + ['1']",
    "None for row 0 (": "return [past.mean for past in rewards]",
    "{0: 0": "return {row: 0 for row in range(12)}",
    "'aaaaaaaaaaaa'": "return 'a' * 12",
    "ZeroDivisionError: division by zero": "return [1 / 0]",
    "KeyError: 'difficulty'": "return [row['difficulty'] for row in rows]",
    "TypeError": "return (1 + None for row in rows)",
}


@pytest.mark.parametrize(("part", "body"), BAD.items())
def test_bad_results_are_refused_with_what_came(part, body, tmp_path, tokenizer):
    stream = source(tmp_path, tokenizer, code(tmp_path, f"def order(rows, rewards):\n    {body}\n"))
    for draw in (stream.peek, stream.next):
        with pytest.raises(UserError) as caught:
            draw(2)
        assert str(caught.value).startswith("data.order_by: '") and part in str(caught.value)
    assert stream.position == 0


@pytest.mark.parametrize(
    ("name", "text"), [("curriculum.py:sort", EASY_FIRST), ("curriculum.py:order", "order = 3"), ("nowhere:order", "")]
)
def test_what_names_no_function_is_refused(name, text, tmp_path, tokenizer):
    code(tmp_path, text)
    with pytest.raises(UserError, match=r"^data\.order_by: "):
        source(tmp_path, tokenizer, f"{tmp_path}/{name}" if ".py" in name else name)


@pytest.mark.parametrize("missing", ["curriculum.py", "nowhere.py:order"])
def test_a_file_without_function_and_a_missing_file_are_refused_when_the_config_is_loaded(missing, tmp_path):
    code(tmp_path, EASY_FIRST)
    with pytest.raises(UserError):
        load({"data": {"order_by": str(tmp_path / missing)}})


def test_a_path_is_absolute_and_counts_as_code_and_a_column_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = code(tmp_path, EASY_FIRST)
    config = load({"data": {"order_by": "curriculum.py:order"}})
    assert config.data.order_by == name and code_names(config)["data.order_by"] == [name]
    for column in ("curriculum", "curriculum.order", "my level.x"):
        config = load({"data": {"order_by": column}})
        assert config.data.order_by == column and not orders_by_rewards(config.data)
        assert code_names(config)["data.order_by"] == []


def change(state, key, value):
    return {**state, "order_state": {**state["order_state"], key: value}}


def test_damaged_state_is_refused(tmp_path, tokenizer):
    """With the errors that the reader of a checkpoint reports as such."""
    stream = source(tmp_path, tokenizer, code(tmp_path, EASY_FIRST))
    stream.next(3)
    stream.record_rewards([0, 1], [1.0, 2.0])
    state = json.loads(json.dumps(stream.state_dict()))
    (entry,) = state["order_state"]["epochs"]
    bad = [change(state, key, value) for key in ("counts", "sums") for value in (None, "", "####", "eJxjYAAAAAEAAQ==")]
    bad += [change(state, "epochs", value) for value in ([], None, [[0, 11, entry[2]]], [[0, 12, "x"]], [[0]])]
    bad += [change(state, "counts", state["order_state"]["sums"]), {**state, "order_state": {}}]
    for each in bad:
        with pytest.raises((ValueError, LookupError, TypeError)):
            source(tmp_path, tokenizer, code(tmp_path, EASY_FIRST)).load_state_dict(each)


def test_another_function_or_a_column_is_another_order(tmp_path, tokenizer):
    state = source(tmp_path, tokenizer, code(tmp_path, EASY_FIRST)).state_dict()
    for other in ("level", None):
        with pytest.raises(UserError, match=r"data\.order_by"):
            source(tmp_path, tokenizer, other).load_state_dict(state)


def test_it_is_refused_where_it_cannot_work(tmp_path):
    files, name = [rows_file(tmp_path)], code(tmp_path, EASY_FIRST)
    config = load({"data": {"train_files": files, "order_by": name}})
    assert not list(data_rules(config))
    (broken,) = data_rules(config, supervised=True)
    assert broken.startswith("data.order_by") and "algorithm.name" in broken
    assert not list(data_rules(load({"data": {"train_files": files, "order_by": "level"}}), supervised=True))
    (broken,) = data_rules(load({"data": {"train_files": files, "order_by": name, "train_weights": [1]}}))
    assert broken.startswith("data.order_by") and "train_weights" in broken


def test_the_example_of_the_documentation(tmp_path, tokenizer):
    """Rows of which some samples are right come before new rows, and those before rows that are always right."""
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 10
    (tmp_path / "curriculum.py").write_text(EXAMPLE)
    stream = source(tmp_path, tokenizer, f"{tmp_path}/curriculum.py:hardest_useful_first", shuffle=False)
    first = stream.next(12)
    assert [int(prompt.answer) for prompt in first] == list(range(12))
    stream.record_rewards([0, 0, 1, 1, 2, 2], [1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert [int(prompt.answer) for prompt in stream.next(12)] == [1, *range(3, 12), 0, 2]


def test_rows_of_a_damaged_file_are_reported_as_such(tmp_path):
    file = rows_file(tmp_path)
    rows = JsonlRows(file, lambda row, source: None)
    (tmp_path / "rows.jsonl").write_text("x" * 1000)
    name = code(tmp_path, "def order(rows, rewards):\n    return [row['level'] for row in rows]\n")
    order = RewardOrder(rows, name, EpochOrder(12, 0, shuffle=False))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: not JSON"):
        order.prepare(0, call_here)


def test_rows_have_a_count_and_a_mean():
    assert RowRewards(0, None) == RowRewards(count=0, mean=None) != RowRewards(1, 0.0)


def test_the_function_is_tried_with_rewards_before_the_run(tmp_path, tokenizer):
    seen = tmp_path / "seen.jsonl"
    text = (
        "import json\n"
        "def order(rows, rewards):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        file.write(json.dumps([(past.count, past.mean) for past in rewards]) + '\\n')\n"
        "    return [row['level'] for row in rows]\n"
    )
    stream = source(tmp_path, tokenizer, code(tmp_path, text))
    before = stream.state_dict()
    stream.check_order()
    none, invented = map(json.loads, seen.read_text().splitlines())
    assert none == [[0, None]] * 12
    assert [0, None] in invented and {mean for count, mean in invented if count} == {0.0, 0.5, 1.0}
    assert stream.state_dict() == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def order(rows): return [0 for _ in rows]", "takes 1 positional argument"),
        ("def order(rows, rewards): return [past.average for past in rewards]", "average"),
        ("def order(rows, rewards): return [1 / (1 - (past.mean or 0)) for past in rewards]", "invented rewards"),
        ("def order(rows, rewards): return [None if past.mean else 0 for past in rewards]", "invented rewards"),
        ("def order(rows, rewards): return [past.mean if past.count else 'new' for past in rewards]", "'new'"),
    ],
)
def test_a_function_that_would_fail_later_fails_before_the_run(text, said, tmp_path, tokenizer):
    stream = source(tmp_path, tokenizer, code(tmp_path, text))
    with pytest.raises(UserError) as caught:
        stream.check_order()
    assert said in str(caught.value) and "data.order_by" in str(caught.value)
