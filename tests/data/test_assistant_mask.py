"""Where the assistant speaks, against transformers' own mask and against what generation would see."""

import json

import pytest

from mrl.config.config import DataConfig, ModelConfig
from mrl.data.assistant_mask import end_token_warning, render_with_turns
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import UserError
from tests.data.folders import byte_bpe_folder

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (  # as Qwen3: what was thought is shown in the last turn only
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (  # no end token behind an answer
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer_of(folder, template):
    return load_tokenizer(ModelConfig(tokenizer=str(byte_bpe_folder(folder, chat_template=template))), DataConfig())


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("marked"), MARKED)


def talk(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    said = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return [*([{"role": "system", "content": system}] if system else []), *said]


def mask_of(found):
    mask = [0] * len(found.ids)
    for begin, end in found.turns:
        mask[begin:end] = [1] * (end - begin)
    return mask


TALKS = {
    "one turn": talk("two plus two?", "four."),
    "three turns and a system": talk("is it?", "it is", "the?", "four is the answer", "plus?", "two", system="be"),
    "spaces and lines around": talk("what\n", "\n\n is four \n", " plus ", "  two"),
    "many bytes in a character": talk("two 🙂?", "🙂 四 is four🙂", "四", "é"),
    "an empty answer": talk("two?", "", "plus?", "four"),
    "two in a row": [*talk("two?", "four"), {"role": "assistant", "content": "or two"}],
}


@pytest.mark.parametrize("messages", TALKS.values(), ids=TALKS)
def test_the_turns_are_those_of_transformers_where_the_template_marks_them(marked, messages):
    oracle = marked._tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    found = render_with_turns(messages, marked)
    assert found.ids == oracle["input_ids"]
    assert mask_of(found) == oracle["assistant_masks"]


def test_a_turn_begins_where_a_prompt_of_generation_ends(marked):
    messages = TALKS["three turns and a system"]
    found = render_with_turns(messages, marked)
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for (begin, end), index in zip(found.turns, places, strict=True):
        assert found.ids[:begin] == marked.apply_chat_template(messages[:index])
        assert marked.decode(found.ids[begin:end]) == messages[index]["content"] + "<|im_end|>"
    assert render_with_turns(messages, marked, first=places[-1]).turns == found.turns[-1:]


def test_a_template_that_is_not_append_only_is_refused_but_for_the_last_turn(tmp_path):
    tokenizer = tokenizer_of(tmp_path, THINKS)
    messages = talk("two?", "four", "plus?", "two")
    with pytest.raises(UserError, match=r"is not append-only: it renders the first 2 .*train_on_turns=last"):
        render_with_turns(messages, tokenizer)
    found = render_with_turns(messages, tokenizer, first=3)
    ((begin, end),) = found.turns
    assert tokenizer.decode(found.ids[begin:end]) == "<think>\n\n</think>\n\ntwo<|im_end|>"


GLM = (  # as GLM 4: a turn ends where the next role begins
    "[gMASK]<sop>{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.mark.parametrize(
    "template", [ENDLESS, GLM, MARKED.replace("<|im_end|>", "<s>")], ids=["none", "glm", "another"]
)
@pytest.mark.parametrize("messages", [TALKS["one turn"], TALKS["three turns and a system"]], ids=["one", "three"])
def test_a_turn_without_an_end_token_is_refused_and_warned_of(tmp_path, template, messages):
    tokenizer = tokenizer_of(tmp_path, template)
    with pytest.raises(
        UserError, match=r"none of the model.s end tokens \('<\|im_end\|>' \(2\)\).*generation_config.json"
    ):
        render_with_turns(messages, tokenizer)
    assert "rollout.response_length" in end_token_warning(tokenizer)


def test_an_end_token_that_generation_config_names_ends_turns(tmp_path):
    """A base model's tokenizer names another end token than the template writes, as Qwen2.5's."""
    folder = byte_bpe_folder(tmp_path, chat_template=MARKED)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    base = load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())
    assert base.eos_ids == (0,)
    with pytest.raises(UserError, match="end tokens"):
        render_with_turns(TALKS["one turn"], base)
    assert end_token_warning(base) is not None
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    named = load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())
    found = render_with_turns(TALKS["one turn"], named)
    assert [named.decode(found.ids[begin:end]) for begin, end in found.turns] == ["four.<|im_end|>"]
    assert end_token_warning(named) is None


@pytest.mark.parametrize("template", [MARKED, THINKS])
def test_templates_that_write_an_end_token_are_not_warned_of(tmp_path, template):
    assert end_token_warning(tokenizer_of(tmp_path, template)) is None


def test_trl_trains_the_same_tokens_but_for_the_line_ends_that_its_template_counts_in(tmp_path):
    """TRL's template for Qwen2.5 trains the line ends around a turn too, which no model samples up to its end token."""
    from importlib.resources import files

    template = files("trl").joinpath("chat_templates/qwen2_5_training.jinja").read_text()
    tokenizer = tokenizer_of(tmp_path, template)
    messages = TALKS["three turns and a system"]
    found = render_with_turns(messages, tokenizer)
    oracle = tokenizer._tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert found.ids == oracle["input_ids"]
    more = [
        tokenizer.decode([index])
        for index, own, theirs in zip(found.ids, mask_of(found), oracle["assistant_masks"], strict=True)
        if own != theirs
    ]
    assert more == ["\n"] * 6
