import json
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from mrl.config.config import DataConfig, ModelConfig
from mrl.data.prompts import VALIDATION_UID, load_training, load_validation
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import UserError
from tests.data.folders import byte_bpe_folder

CHARS = "char:0123456789<>+#"


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    folder = byte_bpe_folder(tmp_path_factory.mktemp("bpe"))
    return load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())


@pytest.fixture(scope="module")
def digits():
    return load_tokenizer(ModelConfig(tokenizer=CHARS), DataConfig())


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbers(count):
    return [{"prompt": str(index), "answer": index} for index in range(count)]


def source(tokenizer, files, *, prompt_length=64, seed=0, **data):
    return load_training(DataConfig(train_files=files, **data), tokenizer, prompt_length=prompt_length, seed=seed)


def only(tokenizer, tmp_path, row, **options):
    """The one prompt of a file with one row."""
    return source(tokenizer, [jsonl(tmp_path / "one.jsonl", [row])], **options).next(1)[0]


def test_each_epoch_shows_every_row_once_in_a_new_order(tmp_path, digits):
    stream = source(digits, [jsonl(tmp_path / "a.jsonl", numbers(37))])
    epochs = [[prompt.text for prompt in stream.next(37)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(str(index) for index in range(37)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert stream.epoch == 3.0


def test_uids_are_stream_positions(tmp_path, digits):
    stream = source(digits, [jsonl(tmp_path / "a.jsonl", numbers(5))])
    assert [prompt.uid for _ in range(4) for prompt in stream.next(3)] == list(range(12))


def test_without_shuffling_rows_come_in_file_order(tmp_path, digits):
    stream = source(digits, [jsonl(tmp_path / "a.jsonl", numbers(4))], shuffle=False)
    assert [prompt.answer for prompt in stream.next(6)] == ["0", "1", "2", "3", "0", "1"]


def test_seed_chooses_the_order(tmp_path, digits):
    files = [jsonl(tmp_path / "a.jsonl", numbers(30))]
    first, again, other = (source(digits, files, seed=seed).next(30) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("overlong", ["error", "drop"])
def test_a_resume_at_any_point_continues_the_same_stream(tmp_path, digits, overlong):
    # With "drop", prompts of two digits are dropped at prompt_length 1, so frontier and uids jump.
    options = {"prompt_length": 2 if overlong == "error" else 1, "overlong_prompts": overlong}
    files = [jsonl(tmp_path / "a.jsonl", numbers(13))]
    whole = source(digits, files, **options).next(40)
    for done in range(40):
        before = source(digits, files, **options)
        assert before.next(done) == whole[:done]
        state = json.loads(json.dumps(before.state_dict()))
        after = source(digits, files, **options)
        after.load_state_dict(state)
        assert after.next(40 - done) == whole[done:]


def test_dropped_prompts_use_up_their_uid(tmp_path, digits):
    stream = source(
        digits, [jsonl(tmp_path / "a.jsonl", numbers(12))], prompt_length=1, overlong_prompts="drop", shuffle=False
    )
    assert [prompt.uid for prompt in stream.next(12)] == [*range(10), 12, 13]
    assert stream.position == 14


def test_the_frontier_stays_where_next_failed(tmp_path, digits):
    stream = source(digits, [jsonl(tmp_path / "a.jsonl", numbers(12))], prompt_length=1, shuffle=False)
    stream.next(8)
    with pytest.raises(UserError, match=r"a.jsonl:11"):
        stream.next(4)
    assert stream.position == 8
    assert [prompt.text for prompt in stream.next(2)] == ["8", "9"]


def test_a_resume_with_other_data_seed_or_order_is_refused(tmp_path, digits):
    first = jsonl(tmp_path / "a.jsonl", numbers(5))
    state = source(digits, [first]).state_dict()
    moved = jsonl(tmp_path / "moved.jsonl", numbers(5))
    source(digits, [moved]).load_state_dict(state)
    with pytest.raises(UserError, match=r"training data changed since the checkpoint: 5 rows .* then, 6 rows"):
        source(digits, [jsonl(tmp_path / "b.jsonl", numbers(6))]).load_state_dict(state)
    with pytest.raises(UserError, match=r"run.seed is 1, but the checkpoint's prompts were ordered with 0"):
        source(digits, [first], seed=1).load_state_dict(state)
    with pytest.raises(UserError, match=r"data.shuffle is False"):
        source(digits, [first], shuffle=False).load_state_dict(state)


def test_a_task_is_a_source_and_its_held_out_side_a_validation_set(digits):
    data = DataConfig(task="addition", task_kwargs={"max_value": 20, "num_train": 50, "num_val": 7})
    stream = load_training(data, digits, prompt_length=16, seed=0)
    prompt = stream.next(1)[0]
    assert prompt.text[0] == "<" and prompt.text[-1] == ">"
    assert prompt.source.startswith("addition train:")
    held_out = load_validation(data, digits, prompt_length=16)
    assert [item.uid for item in held_out] == list(range(VALIDATION_UID, VALIDATION_UID + 7))
    assert not {item.text for item in held_out} & {item.text for item in stream.next(500)}
    other = DataConfig(task="addition", task_kwargs={"max_value": 21, "num_train": 50})
    with pytest.raises(UserError, match=r"the same data.task"):
        load_training(other, digits, prompt_length=16, seed=0).load_state_dict(stream.state_dict())


def test_a_validation_file_is_read_in_order_and_none_is_none(tmp_path, digits):
    data = DataConfig(val_files=[jsonl(tmp_path / "v.jsonl", numbers(4))])
    assert [prompt.text for prompt in load_validation(data, digits, prompt_length=8)] == ["0", "1", "2", "3"]
    assert load_validation(DataConfig(), digits, prompt_length=8) == []


def test_strings_stay_as_they_are_and_other_columns_go_to_extra(tmp_path, chat_tokenizer):
    prompt = only(chat_tokenizer, tmp_path, {"prompt": "two plus two?", "answer": "4", "level": 3, "tags": ["a"]})
    assert prompt.prompt_ids == tuple(chat_tokenizer.encode("two plus two?"))
    assert (prompt.text, prompt.answer, prompt.extra) == ("two plus two?", "4", {"level": 3, "tags": ["a"]})
    assert prompt.source.endswith("one.jsonl:1")


def test_messages_get_the_chat_template_and_the_system_prompt(tmp_path, chat_tokenizer):
    row = {"prompt": [{"role": "user", "content": "two?"}], "answer": 2}
    assert only(chat_tokenizer, tmp_path, row).text == "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
    with_system = only(chat_tokenizer, tmp_path, row, system_prompt="brief").text
    assert with_system.startswith("<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\ntwo?")
    own = {"prompt": [{"role": "system", "content": "long"}, *row["prompt"]], "answer": 2}
    assert "brief" not in only(chat_tokenizer, tmp_path, own, system_prompt="brief").text
    as_string = only(chat_tokenizer, tmp_path, {"prompt": "two?", "answer": 2}, apply_chat_template="always")
    assert as_string.text == "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"


def test_parquet_with_messages_and_nested_answers_reads_like_jsonl(tmp_path, chat_tokenizer):
    rows = [
        {"prompt": [{"role": "user", "content": f"is it {index}?"}], "reward_model": {"ground_truth": str(index)}}
        for index in range(5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    options = {"answer_key": "reward_model.ground_truth", "shuffle": False}
    parquet = source(chat_tokenizer, [str(tmp_path / "a.parquet")], **options).next(5)
    lines = source(chat_tokenizer, [jsonl(tmp_path / "a.jsonl", rows)], **options).next(5)
    assert [(item.prompt_ids, item.answer) for item in parquet] == [(item.prompt_ids, item.answer) for item in lines]
    assert parquet[4].answer == "4"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (49, "49"),
        (49.0, "49"),
        (0.5, "0.5"),
        ("049", "049"),
        (None, None),
        (-3, "-3"),
        pytest.param(10**400, "1" + "0" * 400, id="401 digits"),
    ],
)
def test_answers_are_strings(tmp_path, digits, answer, text):
    assert only(digits, tmp_path, {"prompt": "1", "answer": answer}).answer == text


def test_an_empty_answer_key_means_no_answers(tmp_path, digits):
    prompt = only(digits, tmp_path, {"prompt": "1"}, answer_key="")
    assert prompt.answer is None


def test_prompts_cut_on_the_left_keep_their_end(tmp_path, digits):
    prompt = only(
        digits, tmp_path, {"prompt": "<123456>", "answer": 1}, prompt_length=3, overlong_prompts="truncate_left"
    )
    assert prompt.text == "56>"
    assert prompt.prompt_ids == tuple(digits.encode("56>"))


CONVERSATION = {
    "messages": [
        {"role": "user", "content": "two?", "name": None},
        {"role": "assistant", "content": "four", "name": None},
        {"role": "user", "content": "plus two?", "name": "ann"},
        {"role": "assistant", "content": "is it six", "name": None},
    ],
    "level": 2,
}


def test_of_a_conversation_all_before_the_last_answer_is_the_prompt(tmp_path, chat_tokenizer):
    prompt = only(chat_tokenizer, tmp_path, CONVERSATION)
    assert prompt.text.endswith("four<|im_end|>\n<|im_start|>user\nplus two?<|im_end|>\n<|im_start|>assistant\n")
    assert (prompt.answer, prompt.extra) == ("is it six", {"level": 2})
    assert prompt.question[0] == {"role": "user", "content": "two?"}  # a key without a value is not there
    assert only(chat_tokenizer, tmp_path, {**CONVERSATION, "answer": 6}).answer == "6"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([CONVERSATION]), tmp_path / "one.parquet")
    assert source(chat_tokenizer, [str(tmp_path / "one.parquet")]).next(1)[0].prompt_ids == prompt.prompt_ids
    asked = {**CONVERSATION, "prompt": "two?", "answer": 4}
    assert only(chat_tokenizer, tmp_path, asked).text == "two?"


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"question": "1", "answer": 1}, {}, r"no column 'prompt' \(data.prompt_key\). Columns: question, answer"),
        ({"question": "1", "answer": 1}, {}, r"If 'question' is the prompt, set data.prompt_key=question\.$"),
        ({"question": "1", "input": "2", "answer": 1}, {}, r"Columns: question, input, answer\.$"),
        ({"text": "1", "answer": 1}, {}, r"Columns: text, answer\.$"),
        ({"prompt": "1", "answr": 1}, {}, r"no column 'answer' .* Columns: prompt, answr. Did you mean 'answr'\?$"),
        ({"prompt": "1", "solution": 1}, {}, r"no column 'answer' \(data.answer_key\). Columns: prompt, solution.*''"),
        ({"messages": [{"role": "user", "content": "1"}]}, {}, "no message of the role 'assistant' .* it has user"),
        ({"messages": [{"role": "assistant", "content": "1"}]}, {}, "'messages' begins with an assistant"),
        ({"messages": "1"}, {}, "'messages' holds str '1', expected a string or a list of chat messages"),
        ({"messages": []}, {}, r"'messages' holds list \[\]"),
        ({"prompt": 7, "answer": 1}, {}, "holds int 7, expected a string or a list of chat messages"),
        ({"prompt": [], "answer": 1}, {}, r"holds list \[\], expected a string or a list of chat messages"),
        ({"prompt": [{"role": "user"}], "answer": 1}, {}, ".*lacks a 'role' or 'content'"),
        ({"prompt": "1", "answer": [1]}, {}, "holds list .*expected a string or a number"),
        ({"prompt": "1", "answer": True}, {}, "holds bool True, expected a string or a number"),
        ({"prompt": "", "answer": 1}, {}, "encodes to no tokens"),
        ({"prompt": "1a", "answer": 1}, {}, r"one.jsonl:1: the character tokenizer .* does not know 'a'"),
        ({"prompt": "12345", "answer": 1}, {"prompt_length": 4}, r"one.jsonl:1: the prompt has 5 tokens"),
        ({"prompt": "12345", "answer": 1}, {"prompt_length": 4, "overlong_prompts": "drop"}, "all 1 prompts"),
        ({"prompt": "1", "answer": 1}, {"system_prompt": "be brief"}, "data.system_prompt is set, but"),
        (
            {"prompt": [{"role": "user", "content": "1"}], "answer": 1},
            {"apply_chat_template": "never"},
            "data.apply_chat_template=never",
        ),
        ({"prompt": [{"role": "user", "content": "1"}], "answer": 1}, {}, r"one.jsonl:1: .* has no chat template"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path, digits, row, options, message):
    with pytest.raises(UserError, match=message):
        only(digits, tmp_path, row, **options)


def test_sources_that_cannot_be_used_are_refused(tmp_path, digits):
    with pytest.raises(UserError, match=r"data.train_files is empty and data.task is null"):
        source(digits, [])
    with pytest.raises(UserError, match=r"are both set"):
        source(digits, [jsonl(tmp_path / "a.jsonl", numbers(1))], task="addition")
    with pytest.raises(UserError, match=r"data.val_files: all 1 prompts are longer than rollout.prompt_length=1"):
        data = DataConfig(
            val_files=[jsonl(tmp_path / "v.jsonl", [{"prompt": "12", "answer": 1}])], overlong_prompts="drop"
        )
        load_validation(data, digits, prompt_length=1)


def test_a_wrong_column_deep_in_a_file_is_found_when_it_is_opened(tmp_path, digits):
    rows = [*numbers(50), {"prompt": "1"}, *numbers(3)]
    with pytest.raises(UserError, match=r"a.jsonl:51: no column 'answer'"):
        source(digits, [jsonl(tmp_path / "a.jsonl", rows)])


def data_sources(tokenizer, *args, **options):
    stream = source(tokenizer, *args, shuffle=False, **options)
    return [prompt.data_source for prompt in stream.next(stream.num_rows)]


def test_a_prompt_knows_its_data_set_by_the_column_of_verl_else_by_its_file(tmp_path, digits):
    rows = [{"prompt": "1", "answer": 1, "data_source": "openai/gsm8k"}, {"prompt": "2", "answer": 2}]
    rows.append({"prompt": "3", "answer": 3, "data_source": None})
    files = [jsonl(tmp_path / "sums.jsonl", rows), jsonl(tmp_path / "products.v2.jsonl", numbers(2))]
    parquet = tmp_path / "verl.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["4"], "answer": ["4"], "data_source": ["lighteval/MATH"]}), parquet
    )
    found = data_sources(digits, [*files, str(parquet)])
    assert found == ["openai/gsm8k", "sums", "sums", "products.v2", "products.v2", "lighteval/MATH"]


def test_another_column_names_the_data_set_and_the_reward_still_sees_it(tmp_path, digits):
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": 1, "data_source": "no", "origin": {"set": "yes"}}])
    prompt = source(digits, [file], source_key="origin.set").next(1)[0]
    assert prompt.data_source == "yes"
    assert prompt.extra == {"data_source": "no", "origin": {"set": "yes"}}


@pytest.mark.parametrize("name", ["addition", "mrl.data.synthetic_tasks:Addition"])
def test_a_task_names_its_data_set(digits, name):
    data = DataConfig(task=name, task_kwargs={"num_val": 3, "max_value": 9})
    stream = load_training(data, digits, prompt_length=16, seed=0)
    held_out = load_validation(data, digits, prompt_length=16)
    assert {prompt.data_source for prompt in [*stream.next(5), *held_out]} == {name.rpartition(":")[2]}


@pytest.mark.parametrize("value", [3, ["a"], "", "  ", "a\x1b[2J"])
def test_a_data_set_without_a_readable_name_is_refused(tmp_path, digits, value):
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": 1, "data_source": value}])
    with pytest.raises(UserError, match=r"a.jsonl:1: column 'data_source' holds .*expected the name of a data set"):
        source(digits, [file])


def test_a_source_key_that_the_rows_lack_is_refused(tmp_path, digits):
    file = jsonl(tmp_path / "a.jsonl", numbers(1))
    with pytest.raises(UserError, match=r"a.jsonl:1: no column 'origin' \(data.source_key\)"):
        source(digits, [file], source_key="origin")


VERL = {"prompt": [{"role": "user", "content": "two?"}], "reward_model": {"style": "rule", "ground_truth": "4"}}


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        ({"prompt": None}, "column 'prompt' holds NoneType"),
        ({"prompt": []}, "column 'prompt' holds list"),
        ({"prompt": [{"role": "user", "content": None}]}, ".*lacks a 'role' or 'content'"),
        ({"reward_model": None}, "column 'reward_model' is null"),
    ],
    ids=["prompt", "messages", "content", "reward_model"],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_later_row_of_verls_data_that_lacks_something_is_named_when_the_data_are_opened(
    tmp_path, chat_tokenizer, gap, words, kind
):
    rows = [VERL, VERL, VERL | gap, VERL]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        jsonl(path, rows)
    with pytest.raises(UserError, match=rf"a.{kind}:{2 if kind == 'parquet' else 3}: {words}"):
        source(chat_tokenizer, [str(path)])


@pytest.mark.parametrize(
    ("values", "kind", "answers"),
    [
        ([0.1, 49.0, -2.5], pyarrow.float32(), ["0.1", "49", "-2.5"]),
        ([0.1, 49.0, -2.5], pyarrow.float16(), ["0.1", "49", "-2.5"]),
        ([0.1, 49.0, 1e-7], pyarrow.float64(), ["0.1", "49", "1e-07"]),
        ([Decimal("18.50"), Decimal("49.00"), Decimal("-100")], pyarrow.decimal128(9, 2), ["18.5", "49", "-100"]),
    ],
    ids=str,
)
def test_numbers_as_answers_are_the_text_that_was_written(tmp_path, digits, values, kind, answers):
    table = pyarrow.table({"prompt": ["1", "2", "3"], "answer": pyarrow.array(values, kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    found = source(digits, [str(tmp_path / "a.parquet")], shuffle=False).next(3)
    assert [prompt.answer for prompt in found] == answers


def test_a_rendered_prompt_has_one_beginning_token(tmp_path):
    template = "<s>{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    folder = byte_bpe_folder(tmp_path / "bos", bos=True, chat_template=template)
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())
    messages = [{"role": "user", "content": "two?"}]
    chat = only(tokenizer, tmp_path, {"prompt": messages, "answer": "4"})
    text = only(tokenizer, tmp_path, {"prompt": chat.text, "answer": "4"})
    assert text.prompt_ids == chat.prompt_ids == (3, *tokenizer.encode("<|im_start|>two?<|im_end|>"))
