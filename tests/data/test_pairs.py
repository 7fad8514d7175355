"""What a step of DPO learns from a row: the better and the worse response to one prompt."""

import json

import pytest

from mrl.config.config import DataConfig, RolloutConfig
from mrl.data.prompts import load_training
from mrl.data.sft_examples import SftEncoder, SftExample
from mrl.errors import UserError
from tests.data.test_sft_examples import ASKED, TALK, chat_tokenizer, digits, pieces  # noqa: F401

END = "<|im_end|>"


def pair(tokenizer, tmp_path, row, lengths=None, **data):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    config, rollout = DataConfig(train_files=[str(file)], **data), RolloutConfig(**(lengths or {}))
    prompt = load_training(config, tokenizer, prompt_length=rollout.prompt_length, seed=0).next(1)[0]
    return SftEncoder(tokenizer, config, rollout).pair(prompt)


def says(content):
    return {"role": "assistant", "content": content}


def test_texts_follow_the_prompt_and_end(tmp_path, digits):  # noqa: F811
    row = {"prompt": "<1+2>", "chosen": "3", "rejected": "12"}
    chosen, rejected = pair(digits, tmp_path, row)
    assert chosen == SftExample(digits.encode("<1+2>"), digits.encode("3#"), [True, True])
    assert rejected == SftExample(digits.encode("<1+2>"), digits.encode("12#"), [True] * 3)
    named = {"q": "<1+2>", "good": "3", "bad": "12"}
    keys = {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad"}
    assert pair(digits, tmp_path, named, **keys) == (chosen, rejected)


@pytest.mark.parametrize("form", ["prompt and turns", "two conversations"])
def test_messages_follow_the_template(form, tmp_path, chat_tokenizer):  # noqa: F811
    asked, chosen, rejected = TALK[:1], [says("four")], [says("is it two")]
    row = (
        {"prompt": asked, "chosen": chosen, "rejected": rejected}
        if form == "prompt and turns"
        else {"chosen": asked + chosen, "rejected": asked + rejected}
    )
    better, worse = pair(chat_tokenizer, tmp_path, row)
    assert pieces(chat_tokenizer, better) == (ASKED, [("four" + END, True)])
    assert pieces(chat_tokenizer, worse) == (ASKED, [("is it two" + END, True)])
    better, _ = pair(chat_tokenizer, tmp_path, row, system_prompt="be")
    assert pieces(chat_tokenizer, better)[0] == "<|im_start|>system\nbe<|im_end|>\n" + ASKED


def test_a_response_of_several_turns_is_trained_where_the_assistant_speaks(tmp_path, chat_tokenizer):  # noqa: F811
    rows = {"chosen": TALK, "rejected": [TALK[0], says("two")]}
    better, worse = pair(chat_tokenizer, tmp_path, rows)
    assert [trained for _, trained in pieces(chat_tokenizer, better)[1]] == [True, False, True]
    assert pieces(chat_tokenizer, worse)[1] == [("two" + END, True)]


def test_what_is_too_long_is_refused_or_cut(tmp_path, digits):  # noqa: F811
    row = {"prompt": "<1+2>", "chosen": "3", "rejected": "12345"}
    lengths = {"prompt_length": 5, "response_length": 4}
    with pytest.raises(UserError, match=r"one.jsonl:1: the response to imitate has 6 tokens .* more than"):
        pair(digits, tmp_path, row, lengths)
    _, rejected = pair(digits, tmp_path, row, lengths, overlong_responses="truncate_right")
    assert rejected.response_ids == digits.encode("1234")


CONVERSATIONS = {"chosen": TALK[:2], "rejected": [TALK[0], says("two")]}
REFUSED = [
    ({"prompt": "<1>", "chosen": "1"}, "no column 'rejected' .data.rejected_key. with the worse of two responses"),
    ({"prompt": "<1>", "rejected": "1"}, "no column 'chosen' .data.chosen_key. with the better"),
    ({"prompt": "<1>", "chosen": "1", "rejected": "1"}, "both responses have the same tokens"),
    ({"prompt": "<1>", "chosen": "1", "rejected": None}, "data.rejected_key=rejected gives NoneType"),
    ({"chosen": "1", "rejected": "2"}, "no column 'prompt' .* must be complete conversations"),
    ({"chosen": TALK[:2], "rejected": TALK[:2]}, "neither is preferred"),
    ({"chosen": TALK, "rejected": TALK[:2]}, "one conversation is the beginning of the other"),
    ({"chosen": TALK[:2], "rejected": TALK[2:]}, "first differ in message 0"),
    (
        {"chosen": TALK, "rejected": [*TALK[:2], {"role": "user", "content": "no"}, says("no")]},
        "first differ in message 2",
    ),
    ({"chosen": [{"role": "user"}], "rejected": TALK}, "lacks a 'role' or 'content'"),
]


@pytest.mark.parametrize(("row", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_a_row_that_is_no_pair_is_refused_by_its_line(row, said, tmp_path, chat_tokenizer):  # noqa: F811
    with pytest.raises(UserError, match=rf"one\.jsonl:1: .*{said}"):
        pair(chat_tokenizer, tmp_path, row)


def test_a_misnamed_column_is_named(tmp_path, digits):  # noqa: F811
    row = {"prompt": "<1+2>", "better": "3", "worse": "12"}
    with pytest.raises(UserError, match=r"no column 'beter' .data.chosen_key."):
        pair(digits, tmp_path, row, chosen_key="beter", rejected_key="worse")
