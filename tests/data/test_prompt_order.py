"""Orders of the training rows: exact shares, complete epochs, and the same row at a position after any other."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.config.config import Config, DataConfig, load
from mrl.data.prompt_order import BLOCK, EpochOrder, MixedOrder, SortedOrder, column_values, shares
from mrl.data.prompts import load_training, load_validation
from mrl.data.row_sources import JsonlRows
from mrl.data.tokenizer import HFTokenizer
from mrl.errors import UserError
from mrl.trainer.validation.data import data_rules
from mrl.trainer.validation.ranges import range_rules
from tests.data.folders import byte_bpe_folder
from tests.data.test_hub_files import cache, fill  # noqa: F401


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HFTokenizer(byte_bpe_folder(tmp_path_factory.mktemp("tokenizer")))


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0.01, 100)), min_size=1, max_size=6),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_block_of_a_mix_has_the_shares_and_every_part_complete_epochs(parts, seed, shuffle):
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    order = MixedOrder(sizes, weights, seed, shuffle=shuffle)
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    drawn = [order.row_at(position) for position in range(2 * BLOCK)]
    for part, (start, size, share) in enumerate(zip(starts, sizes, shares(weights, BLOCK), strict=True)):
        own = [row - start for row in drawn if start <= row < start + size]
        for block in (drawn[:BLOCK], drawn[BLOCK:]):
            assert sum(start <= row < start + size for row in block) == share, part
        for first in range(0, len(own) - size + 1, size):
            assert sorted(own[first : first + size]) == list(range(size))
    assert [order.row_at(position) for position in (1999, 3, 1000, 0)] == [drawn[p] for p in (1999, 3, 1000, 0)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [([1, 1], [500, 500]), ([2, 1], [667, 333]), ([1, 1, 1], [334, 333, 333]), ([1e-9, 1], [1, 999])],
)
def test_shares_are_rounded_by_largest_remainder(weights, expected):
    assert shares(weights, 1000) == expected


def test_parts_of_a_mix_are_spread_and_equal_parts_differ():
    order = MixedOrder([100, 100], [1, 1], 0, shuffle=True)
    drawn = [order.row_at(position) for position in range(100)]
    assert 30 < sum(row < 100 for row in drawn) < 70
    one, other = ([row % 100 for row in drawn if (row < 100) is first][:20] for first in (True, False))
    assert one != other


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_come_by_value_and_ties_in_the_order_of_the_epoch(shuffle):
    values = [3, 1, 2, 1, 3, 1, 2, 1]
    order = SortedOrder(values, "level", EpochOrder(8, 0, shuffle=shuffle))
    epochs = [[order.row_at(8 * epoch + place) for place in range(8)] for epoch in range(6)]
    for rows in epochs:
        assert sorted(rows) == list(range(8)) and [values[row] for row in rows] == sorted(values)
    assert (len({tuple(rows) for rows in epochs}) > 1) is shuffle
    if not shuffle:
        assert epochs[0] == [1, 3, 5, 7, 2, 6, 0, 4]
    assert order.row_at(0) == epochs[0][0]


@pytest.mark.parametrize(
    "rows", [[{"level": 1}, {"other": 1}], [{"level": 1}, {"level": "1"}], [{"level": float("nan")}]]
)
def test_values_without_an_order_are_refused_with_their_row(rows, tmp_path):
    file = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=rf"rows\.jsonl:{len(rows)}: .*column 'level'"):
        column_values(JsonlRows(file, lambda row, source: None), "level")


def source(tokenizer, **data):
    return load_training(DataConfig(**data), tokenizer, prompt_length=64, seed=1)


@pytest.fixture
def files(tmp_path):
    rows = [{"prompt": f"{number}", "answer": f"{number}", "level": -number} for number in range(40)]
    return [
        write(tmp_path / f"{name}.jsonl", part)
        for name, part in (("a", rows[:10]), ("b", rows[10:20]), ("c", rows[20:]))
    ]


SETTINGS = [
    {},
    {"train_weights": [3.0, 1.0, 1.0]},
    {"order_by": "level"},
    {"order_by": "level", "shuffle": False},
    {"train_max_samples": 7},
]


@pytest.mark.parametrize("data", SETTINGS, ids=str)
def test_a_resumed_stream_goes_on_where_it_stopped(data, files, tokenizer):
    through = source(tokenizer, train_files=files, **data)
    prompts = through.next(90)
    first, second = (source(tokenizer, train_files=files, **data) for _ in range(2))
    assert first.next(37) == prompts[:37]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.next(53) == prompts[37:]
    assert [second.at(uid) for uid in (89, 0, 45)] == [prompts[uid] for uid in (89, 0, 45)]


def test_another_order_is_refused_at_a_resume_and_old_checkpoints_have_none(files, tokenizer):
    mixed, plain = (
        source(tokenizer, train_files=files, train_weights=[3.0, 1.0, 1.0]),
        source(tokenizer, train_files=files),
    )
    with pytest.raises(UserError, match="train_weights"):
        plain.load_state_dict(mixed.state_dict())
    old = plain.state_dict()
    del old["order"]
    plain.load_state_dict(old)
    with pytest.raises(UserError, match="train_weights"):
        mixed.load_state_dict(old)


def test_the_order_of_weights_is_the_one_that_earlier_checkpoints_name(files, tokenizer):
    state = source(tokenizer, train_files=files, train_weights=[3.0, 1.0, 1.0]).state_dict()
    assert state["order"] == "data.train_weights=[3.0, 1.0, 1.0]" and "order_state" not in state
    assert source(tokenizer, train_files=files, order_by="level").state_dict()["order"] == "data.order_by=level"
    assert source(tokenizer, train_files=files[:1], train_weights=[2.0]).state_dict()["order"] == ""


def test_the_files_of_a_name_on_the_hub_are_one_part_with_epochs_of_its_own(cache, files, tokenizer):  # noqa: F811
    """As if they were one file."""
    folder = fill(cache, *(f"data/train-0000{part}-of-00002.jsonl" for part in range(2)))
    for part in range(2):
        (folder / f"data/train-0000{part}-of-00002.jsonl").write_bytes(Path(files[part]).read_bytes())
    joined = write(
        cache / "joined.jsonl", [json.loads(line) for file in files[:2] for line in Path(file).read_text().splitlines()]
    )
    hub, one = (
        source(tokenizer, train_files=[first, files[2]], train_weights=[3.0, 1.0]) for first in ("acme/sums", joined)
    )
    drawn = [[prompt.answer for prompt in each.next(BLOCK + 60)] for each in (hub, one)]
    assert drawn[0] == drawn[1]
    counts = Counter("hub" if int(answer) < 20 else "file" for answer in drawn[0][:BLOCK])
    assert counts == {"hub": 750, "file": 250}
    assert hub.state_dict()["order"] == one.state_dict()["order"]
    assert hub.num_rows == 40


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_chosen_rows_do_not_depend_on_the_seed(shuffle, files, tokenizer):
    data = DataConfig(train_files=files, val_files=files, train_max_samples=7, val_max_samples=7, shuffle=shuffle)
    chosen = [
        {p.answer for p in load_training(data, tokenizer, prompt_length=64, seed=seed).next(7)} for seed in range(3)
    ]
    held_out = [prompt.answer for prompt in load_validation(data, tokenizer, prompt_length=64)]
    assert chosen == [set(held_out)] * 3 and len(held_out) == 7
    assert (held_out == [str(number) for number in range(7)]) is not shuffle


def test_more_samples_than_rows_are_all_rows(files, tokenizer):
    every = source(tokenizer, train_files=files)
    assert source(tokenizer, train_files=files, train_max_samples=40).state_dict() == every.state_dict()


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"train_weights": [1, 1]}, "data.train_weights has 2"),
        ({"train_weights": [0, 1, 1]}, "data.train_weights[0]=0"),
        ({"train_weights": [1, -1, 1]}, "data.train_weights[1]=-1"),
        ({"train_weights": [1, 1, float("inf")]}, "data.train_weights[2]=inf"),
        ({"train_weights": [1, float("nan"), 1]}, "data.train_weights[1]=nan"),
        ({"train_weights": [1, 1, 1e-6]}, "data.train_weights[2]"),
        ({"train_weights": [1, 1, 1], "order_by": "level"}, "data.order_by"),
        ({"train_weights": [1, 1, 1], "train_max_samples": 3}, "data.train_max_samples"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(data, key, files):
    config: Config = load({"data": {"train_files": files, **data}})
    assert [rule for rule in (*range_rules(config), *data_rules(config)) if rule.startswith(key)]
