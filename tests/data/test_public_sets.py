"""Raw rows of public data sets become prompts that the named reward scores; see public_rows.py for their shapes."""

import base64
import json
import pickle
import zlib

import pytest

from mrl.config import registry
from mrl.config.config import DataConfig, RewardFunctionConfig
from mrl.data.prompts import load_training, load_validation
from mrl.data.public_sets.base import AmbiguousRowError, UnusableRowError, all_sets, find, recognize
from mrl.data.public_sets.livecodebench import read_pickled_text
from mrl.data.tokenizer import HFTokenizer
from mrl.errors import UserError
from mrl.rewards._arguments import check_types
from tests.data import public_rows
from tests.data.folders import byte_bpe_folder

CASES = public_rows.CASES
READ_RAW = [case for case in CASES if recognize(case[1](7)) in (case[0], "apps")]  # taco has the columns of apps


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return HFTokenizer(byte_bpe_folder(tmp_path_factory.mktemp("tokenizer")))


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("name", "make", "right", "wrong"), CASES)
def test_the_named_reward_scores_right_and_wrong_responses(name, make, right, wrong):
    found = find(name)
    row = found.convert(make(7))
    reward = registry.find("rewards", found.reward["name"], "REWARD")
    kwargs = found.reward.get("kwargs", {}) | ({"test_time_s": 20.0, "limit_s": 60.0} if "python" in right else {})
    given = {"prompt": "", "answer": row["answer"], "extra": row}
    assert reward(response=right, **given, **kwargs)["score"] == 1.0
    assert reward(response=wrong, **given, **kwargs)["score"] < 0.5


@pytest.mark.parametrize(("name", "make"), [case[:2] for case in CASES])
def test_a_row_becomes_chat_messages_an_answer_and_json(name, make):
    row = find(name).convert(make(7))
    assert [message["role"] for message in row["prompt"]] == ["user"] and "7" in row["prompt"][0]["content"]
    assert isinstance(row["answer"], str) and row["answer"]
    assert json.loads(json.dumps(row)) == row


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("name", "make"), [case[:2] for case in READ_RAW])
def test_raw_files_give_the_prompts_of_converted_ones(name, make, suffix, tokenizer, tmp_path):
    rows = [make(number) for number in range(3)]
    raw = write(tmp_path / f"raw{suffix}", rows)
    (tmp_path / "new").mkdir()
    converted = write(tmp_path / "new" / "raw.jsonl", [find(name).convert(row) for row in rows])
    read = [
        load_training(DataConfig(train_files=[file]), tokenizer, prompt_length=4096, seed=0)
        for file in (raw, converted)
    ]
    one, other = ([(p.prompt_ids, p.answer, p.data_source) for p in source.next(3)] for source in read)
    assert one == other
    assert len(read[0].conversions) == 1 and read[1].conversions == ()


@pytest.mark.parametrize(("name", "make"), [case[:2] for case in READ_RAW])
def test_other_columns_of_a_raw_row_are_kept(name, make, tokenizer, tmp_path):
    own = find(name).convert(make(1))
    more = {"difficulty_score": 0, "tags": ["a"]}
    file = write(tmp_path / "raw.jsonl", [make(1) | more | {"difficulty_score": score} for score in (3, 1, 2)])
    data = DataConfig(train_files=[file], order_by="difficulty_score")
    prompts = load_training(data, tokenizer, prompt_length=4096, seed=0).next(3)
    assert [prompt.extra["difficulty_score"] for prompt in prompts] == [1, 2, 3]
    assert prompts[0].extra["tags"] == ["a"] and prompts[0].answer == own["answer"]
    assert all(prompts[0].extra[column] == own[column] for column in own if column not in ("prompt", "answer"))
    assert not set(prompts[0].extra) & set(find(name).consumed) - set(own)


def test_held_out_files_are_converted_too(tokenizer, tmp_path):
    file = write(tmp_path / "test.jsonl", [public_rows.gsm8k(1)])
    (prompt,) = load_validation(DataConfig(val_files=[file]), tokenizer, prompt_length=4096)
    assert (prompt.answer, prompt.data_source) == ("1001", "openai/gsm8k")


def test_columns_that_the_config_names_are_not_converted(tokenizer, tmp_path):
    file = write(tmp_path / "raw.jsonl", [public_rows.gsm8k(1)])
    data = DataConfig(train_files=[file], prompt_key="question")
    (prompt,) = load_training(data, tokenizer, prompt_length=4096, seed=0).next(1)
    assert prompt.text == public_rows.gsm8k(1)["question"] and prompt.answer.endswith("#### 1,001")


def test_a_resume_from_rows_without_conversion_is_refused(tokenizer, tmp_path):
    file = write(tmp_path / "raw.jsonl", [public_rows.gsm8k(1)])
    converted = load_training(DataConfig(train_files=[file]), tokenizer, prompt_length=4096, seed=0)
    plain = load_training(DataConfig(train_files=[file], prompt_key="question"), tokenizer, prompt_length=4096, seed=0)
    with pytest.raises(UserError, match="changed since the checkpoint"):
        plain.load_state_dict(converted.state_dict())


def test_a_row_that_lacks_its_tests_is_refused_with_its_place(tokenizer, tmp_path):
    file = write(tmp_path / "raw.jsonl", [public_rows.apps(1), public_rows.apps(2) | {"input_output": ""}])
    with pytest.raises(UserError, match=r"raw\.jsonl:2: columns as in the data set apps"):
        load_training(DataConfig(train_files=[file]), tokenizer, prompt_length=4096, seed=0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "answer": "2", "question": "x", "golden_answers": ["y"]},
        {"messages": [], "nums": [1], "target": 1},
        {"question": "What?", "answer": "No mark."},
        {"text": "x"},
    ],
)
def test_prepared_and_unknown_rows_are_not_recognized(row):
    assert recognize(row) is None


def test_rows_of_several_sets_are_refused_with_their_names(tmp_path, tokenizer):
    row = public_rows.gsm8k(1) | {"golden_answers": ["1001"]}
    with pytest.raises(AmbiguousRowError, match="gsm8k and search-r1"):
        recognize(row)
    assert recognize(public_rows.math(1) | {"images": []}) == "geometry3k"
    file = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(UserError, match=r"rows\.jsonl:1: columns as in the data sets gsm8k and search-r1"):
        load_training(DataConfig(train_files=[str(file)]), tokenizer, prompt_length=4096, seed=0)
    own = DataConfig(train_files=[str(file)], prompt_key="question")
    assert load_training(own, tokenizer, prompt_length=4096, seed=0).num_rows == 1


UNUSABLE = [
    ("gsm8k", public_rows.gsm8k(1) | {"answer": "no mark"}),
    ("math", public_rows.math(1) | {"solution": r"cut: \boxed{1"}),
    ("aime", public_rows.aime(1) | {"answer": "x"}),
    ("dapo-math-17k", public_rows.dapo_math_17k(1) | {"reward_model": None}),
    ("countdown", {"nums": ["1"], "target": 1}),
    ("apps", public_rows.apps(1) | {"input_output": '{"inputs": [], "outputs": []}'}),
    ("apps", public_rows.apps(1) | {"input_output": "[" * 100_000}),
    ("livecodebench", public_rows.livecodebench_function(1) | {"metadata": "{}"}),
    ("search-r1", public_rows.search_r1(1) | {"golden_answers": []}),
    ("geometry3k", public_rows.geometry3k(1)),
]


@pytest.mark.parametrize(("name", "row"), UNUSABLE)
def test_a_row_without_what_the_set_needs_is_unusable(name, row):
    with pytest.raises(UnusableRowError):
        find(name).convert(row)


class Hostile:
    def __reduce__(self):
        return (open, ("was-here", "w"))


@pytest.mark.parametrize("content", [pickle.dumps(Hostile()), pickle.dumps(["x"]), pickle.dumps(1), b"", b"\x80\x04X"])
def test_a_pickle_of_anything_but_a_text_is_refused_and_not_run(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        read_pickled_text(content)
    packed = base64.b64encode(zlib.compress(content)).decode()
    with pytest.raises(UnusableRowError):
        find("livecodebench").convert(public_rows.livecodebench(1) | {"private_test_cases": packed})
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize("protocol", range(1, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", "short", "ä" * 300, "long" * 20_000])
def test_a_pickled_text_is_read_without_an_unpickler(text, protocol):
    assert read_pickled_text(pickle.dumps(text, protocol=protocol)) == text


@pytest.mark.parametrize("name", all_sets())
def test_each_set_names_a_reward_with_valid_arguments_and_its_hub_files(name):
    found = find(name.replace("-", "_"))
    reward = RewardFunctionConfig(**found.reward)
    function = registry.find("rewards", reward.name, "REWARD")
    check_types(function, reward.kwargs)
    registry.find("rewards", reward.name, "CHECK", lambda **kwargs: None)(**reward.kwargs)
    assert found.val or found.num_val
    assert all(file.location.startswith("hf://datasets/") and file.repo.count("/") == 1 for file in found.val)


def test_an_unknown_set_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="Did you mean 'gsm8k'"):
        find("gsm-8k")
