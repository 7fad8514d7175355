"""What a supervised step imitates of a row."""

import json

import pytest

from mrl.config.config import DataConfig, ModelConfig, RolloutConfig
from mrl.data.prompts import load_training
from mrl.data.sft_examples import SftEncoder, SftExample
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import UserError
from tests.data.folders import byte_bpe_folder
from tests.source import ROOT


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    folder = byte_bpe_folder(tmp_path_factory.mktemp("bpe"))
    return load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())


@pytest.fixture(scope="module")
def digits():
    return load_tokenizer(ModelConfig(tokenizer="char:0123456789<>+#"), DataConfig())


def prompt_and_encoder(tokenizer, tmp_path, row, lengths, data):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    config, rollout = DataConfig(train_files=[str(file)], **data), RolloutConfig(**lengths)
    source = load_training(config, tokenizer, prompt_length=rollout.prompt_length, seed=0)
    return source.next(1)[0], SftEncoder(tokenizer, config, rollout)


def example(tokenizer, tmp_path, row, lengths=None, **data):
    """What is imitated of a row."""
    prompt, encoder = prompt_and_encoder(tokenizer, tmp_path, row, lengths or {}, data)
    return encoder.supervised(prompt)


def pieces(tokenizer, found):
    """Text of the prompt, and of each run of the response with whether it is trained."""
    runs = []
    for index, trained in zip(found.response_ids, found.response_mask, strict=True):
        if not runs or runs[-1][1] != trained:
            runs.append(([], trained))
        runs[-1][0].append(index)
    return tokenizer.decode(found.prompt_ids), [(tokenizer.decode(ids), trained) for ids, trained in runs]


def test_of_a_prompt_it_is_the_answer_and_the_end_token(tmp_path, digits):
    found = example(digits, tmp_path, {"prompt": "<1+2>", "answer": 3})
    assert found == SftExample(digits.encode("<1+2>"), digits.encode("3#"), [True, True])


def test_a_named_column_is_taken_and_a_row_without_it_is_refused(tmp_path, digits):
    row = {"prompt": "<1+2>", "answer": "3", "worked": "1+2>3"}
    assert example(digits, tmp_path, row, response_key="worked").response_ids == digits.encode("1+2>3#")
    with pytest.raises(UserError, match="data.response_key=worked gives NoneType"):
        example(digits, tmp_path, {"prompt": "<1+1>", "answer": "2"}, response_key="worked")


@pytest.mark.parametrize("response", ["four", "four<|im_end|>", "<s>four", "<s>four<|im_end|>"])
def test_a_rendered_response_gets_no_second_beginning_or_end_token(tmp_path, response):
    folder = byte_bpe_folder(tmp_path / "bos", bos=True)
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())
    rows = {"": response, "two?": response.removeprefix("<s>"), "<s>two?": response.removeprefix("<s>")}
    for prompt, answer in rows.items():
        found = example(tokenizer, tmp_path, {"prompt": prompt, "answer": answer})
        text = prompt.removeprefix("<s>")
        text_ids = [3, *tokenizer.encode(text)]
        assert found == SftExample(text_ids, tokenizer.encode("four<|im_end|>"), found.response_mask)
        assert all(found.response_mask)
        pair = {"prompt": prompt, "chosen": answer, "rejected": "two"}
        chosen, rejected = prompt_and_encoder(tokenizer, tmp_path, pair, {}, {})[1].pair(
            prompt_and_encoder(tokenizer, tmp_path, pair, {}, {})[0]
        )
        assert chosen == found and rejected.response_ids == tokenizer.encode("two<|im_end|>")


TALK = [
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "plus?"},
    {"role": "assistant", "content": "is it six"},
]
ASKED = "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\nplus?<|im_end|>\n<|im_start|>assistant\n"
ANSWERS = [("four<|im_end|>", True), (BETWEEN, False), ("is it six<|im_end|>", True)]


def test_of_a_conversation_it_is_what_the_assistant_says(tmp_path, chat_tokenizer):
    assert pieces(chat_tokenizer, example(chat_tokenizer, tmp_path, {"messages": TALK})) == (ASKED, ANSWERS)
    thanked = {"talk": [*TALK, {"role": "user", "content": "the answer."}]}
    found = example(chat_tokenizer, tmp_path, thanked, messages_key="talk", system_prompt="be")
    assert pieces(chat_tokenizer, found) == ("<|im_start|>system\nbe<|im_end|>\n" + ASKED, ANSWERS)


def test_the_conversation_of_the_docs_is_one(tmp_path, chat_tokenizer):
    docs = (ROOT / "mrl" / "docs" / "own_data.md").read_text(encoding="utf-8")
    row = json.loads(docs.split("<!-- conversation -->\n```json\n")[1].split("\n```")[0])
    found = example(chat_tokenizer, tmp_path, row)
    said = [text for text, trained in pieces(chat_tokenizer, found)[1] if trained]
    assert said == ["42<|im_end|>", "21<|im_end|>"]


def test_of_the_last_turn_only_all_before_it_is_the_prompt(tmp_path, chat_tokenizer):
    row = {"messages": TALK}
    found = example(chat_tokenizer, tmp_path, row, train_on_turns="last")
    prompt, _ = prompt_and_encoder(chat_tokenizer, tmp_path, row, {}, {})
    assert found.prompt_ids == list(prompt.prompt_ids)
    assert pieces(chat_tokenizer, found)[1] == ANSWERS[2:]


def test_messages_may_answer_messages(tmp_path, chat_tokenizer):
    """TRL's prompt and completion."""
    row = {"prompt": TALK[:1], "completion": TALK[1:]}
    options = {"answer_key": "", "response_key": "completion"}
    assert pieces(chat_tokenizer, example(chat_tokenizer, tmp_path, row, **options)) == (ASKED, ANSWERS)
    row = {"prompt": TALK[:3], "completion": TALK[3:]}  # an answer in the prompt is not trained
    found = example(chat_tokenizer, tmp_path, row, **options)
    assert pieces(chat_tokenizer, found) == (ASKED + "four<|im_end|>" + BETWEEN, ANSWERS[2:])
    with pytest.raises(UserError, match="gives chat messages, but the prompt is a plain string"):
        example(chat_tokenizer, tmp_path, {"prompt": "two?", "completion": TALK[1:2]}, **options)


def test_too_long_is_refused_or_cut_on_the_right(tmp_path, digits, chat_tokenizer):
    row, lengths = {"prompt": "<1>", "answer": "12345"}, {"prompt_length": 8, "response_length": 4}
    with pytest.raises(UserError, match=r"6 tokens with its end token, more than rollout.response_length=4"):
        example(digits, tmp_path, row, lengths)
    found = example(digits, tmp_path, row, lengths, overlong_responses="truncate_right")
    assert found == SftExample(digits.encode("<1>"), digits.encode("1234"), [True] * 4)

    whole = example(chat_tokenizer, tmp_path, {"messages": TALK})
    count = len(whole.prompt_ids) + len(whole.response_ids)
    for limits in (
        {"prompt_length": count - 5, "response_length": 2},
        {"prompt_length": count - 1, "response_length": 1},
    ):
        left = count - sum(limits.values())
        if left:
            with pytest.raises(
                UserError, match=f"the conversation has {count} tokens, more than rollout.prompt_length"
            ):
                example(chat_tokenizer, tmp_path, {"messages": TALK}, limits)
        found = example(chat_tokenizer, tmp_path, {"messages": TALK}, limits, overlong_responses="truncate_right")
        assert found.response_ids == whole.response_ids[: len(whole.response_ids) - left]
        assert found.response_mask == whole.response_mask[: len(whole.response_mask) - left]


def test_a_conversation_cut_on_the_left_keeps_its_last_answer(tmp_path, chat_tokenizer):
    """Cut where the prompt of the last answer is as long as it may be, so also in the middle of an answer."""
    whole = example(chat_tokenizer, tmp_path, {"messages": TALK})
    ids, trained = whole.prompt_ids + whole.response_ids, [False] * len(whole.prompt_ids) + whole.response_mask
    last = example(chat_tokenizer, tmp_path, {"messages": TALK}, train_on_turns="last")
    before = len(last.prompt_ids)
    for cut in range(before):
        lengths = {"prompt_length": before - cut, "response_length": len(last.response_ids)}
        found = example(chat_tokenizer, tmp_path, {"messages": TALK}, lengths, overlong_prompts="truncate_left")
        assert found.prompt_ids + found.response_ids == ids[cut:]
        kept = [False, *trained[cut + 1 :]]  # nothing predicts the first token
        assert [False] * len(found.prompt_ids) + found.response_mask == kept


def test_a_conversation_with_nothing_left_to_imitate_is_refused(tmp_path, chat_tokenizer):
    row = {"prompt": TALK[:1], "completion": [{"role": "user", "content": "plus plus plus"}, *TALK[1:2]]}
    options = {"answer_key": "", "response_key": "completion", "overlong_responses": "truncate_right"}
    with pytest.raises(UserError, match=r"one.jsonl:1: no assistant token is left to train on within the 26"):
        example(chat_tokenizer, tmp_path, row, {"prompt_length": 24, "response_length": 2}, **options)
