"""What is appended after a turn is what the chat template would have rendered."""

from pathlib import Path

import pytest
import trl

from mrl.config.config import AgentConfig, MultiTurnConfig, RolloutConfig
from mrl.data.tokenizer import CharTokenizer
from mrl.errors import UserError
from mrl.rollout.episodes.episodes import check_environment
from mrl.rollout.episodes.rendering import ChatRendering, PlainRendering
from tests.data.folders import CHATML
from tests.rollout.episodes.templates import FORMATS, QWEN3, chat_tokenizer

QUESTION = [{"role": "user", "content": "what is two plus two?"}]
TURNS = ['<tool_call>\n{"name": "add"}\n</tool_call>', "the answer is four."]
ANSWERS = [
    [{"role": "tool", "name": "add", "content": "4"}, {"role": "tool", "name": "add", "content": "5"}],
    [{"role": "user", "content": "is it?"}],
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


@pytest.fixture(params=FORMATS)
def tokenizer(request, tmp_path):
    return chat_tokenizer(tmp_path, *FORMATS[request.param])


def test_appended_ids_are_those_of_the_whole_conversation(tokenizer):
    """Where a turn's own ids are those that the tokenizer would give its text."""
    chat, messages = ChatRendering(tokenizer, TOOLS), list(QUESTION)
    ids = chat.initial_ids(QUESTION, [])
    for turn, answer in zip(TURNS, ANSWERS, strict=True):
        sampled = [*tokenizer.encode(turn), tokenizer.eos_ids[0]]
        assert chat.decode_turn(sampled) == turn
        ids += [*sampled, *chat.observation_ids(sampled, answer)]
        messages += [{"role": "assistant", "content": turn}, *answer]
        assert ids == tokenizer.apply_chat_template(messages, TOOLS)


def test_a_turn_that_a_stop_string_ended_gets_the_templates_end(tokenizer):
    chat, turn = ChatRendering(tokenizer), tokenizer.encode(TURNS[0])
    after = chat.observation_ids(turn, ANSWERS[0])
    assert after[0] == tokenizer.eos_ids[0]
    assert after[1:] == chat.observation_ids([*turn, tokenizer.eos_ids[0]], ANSWERS[0])


def test_sampled_ids_stay_as_they_are_where_the_tokenizer_would_give_others(tokenizer):
    """The ids of single characters: the same text, and none of it is encoded again."""
    chat = ChatRendering(tokenizer)
    sampled = [token for character in TURNS[1] for token in tokenizer.encode(character)]
    assert sampled != tokenizer.encode(TURNS[1])
    assert chat.decode_turn(sampled) == TURNS[1]
    assert chat.observation_ids(sampled, ANSWERS[1]) == chat.observation_ids(tokenizer.encode(TURNS[1]), ANSWERS[1])


@pytest.mark.parametrize("mode", ["strict", "ignore_strippable", "disable"])
def test_templates_that_append_pass(tokenizer, mode):
    for answer in ANSWERS:
        ChatRendering(tokenizer, TOOLS).check_append_only(mode, answer)


def test_a_template_that_changes_earlier_turns_is_refused_by_name(tmp_path):
    chat = ChatRendering(chat_tokenizer(tmp_path, QWEN3))
    for mode in ("strict", "ignore_strippable"):
        with pytest.raises(UserError, match=f"chat template of '{tmp_path}' is not append-only: after turn"):
            chat.check_append_only(mode, ANSWERS[1])
    chat.check_append_only("disable", ANSWERS[1])


TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
APPENDS = {
    "qwen2_5": "tool user", "llama3": "tool user", "llama3_1": "tool user", "llama3_2": "tool user",
    "phi3": "tool user", "qwen3_instruct_2507": "tool user", "lfm2": "tool user",
    "qwen3": "tool", "gemma3": "user", "deepseek_r1_distill": "", "glm4moe": "", "qwen3_5_think": "",
}  # fmt: skip
"""After which messages the templates of these models, as TRL ships them, append: Qwen3's drops thoughts before a user's
message, DeepSeek's and GLM's whatever follows, Gemma's knows no tools."""


@pytest.mark.parametrize("name", APPENDS)
def test_templates_of_models_append_or_are_refused(name, tmp_path):
    template = (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = chat_tokenizer(tmp_path, template)
    for role, answer in zip(("tool", "user"), ANSWERS, strict=True):
        if role in APPENDS[name].split():
            ChatRendering(tokenizer, TOOLS if role == "tool" else ()).check_append_only("strict", answer)
        else:
            with pytest.raises(UserError, match="is not append-only|chat template of .* failed"):
                ChatRendering(tokenizer, TOOLS if role == "tool" else ()).check_append_only("strict", answer)


def test_qwen3_with_tools_is_taken_and_without_refused(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, (TRL_TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"))
    assert check_environment(episodes_with("calculator"), tokenizer)
    with pytest.raises(UserError, match="is not append-only"):
        check_environment(episodes_with("guess"), tokenizer)


def episodes_with(environment):
    agent = AgentConfig(environment=environment, num_workers=1)
    return RolloutConfig(multi_turn=MultiTurnConfig(enable=True), agent=agent)


def test_white_space_that_a_template_strips_is_told_apart(tmp_path):
    """It ends a message with a line only where another follows."""
    strips = CHATML.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{{ '' if loop.last else '\\n' }}{% endfor %}")
    chat = ChatRendering(chat_tokenizer(tmp_path, strips))
    with pytest.raises(UserError, match="ignore_strippable"):
        chat.check_append_only("strict", ANSWERS[1])
    chat.check_append_only("ignore_strippable", ANSWERS[1])


def test_a_template_that_hides_the_assistant_is_refused(tmp_path):
    hides = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(UserError, match="does not write an assistant's content"):
        ChatRendering(chat_tokenizer(tmp_path, hides)).observation_text(ANSWERS[0])


def test_without_a_template_contents_stand_one_after_the_other():
    tokenizer = CharTokenizer("0123456789<>?#")
    plain = PlainRendering(tokenizer)
    assert plain.initial_ids("<1>", [{"role": "user", "content": "2?"}]) == tokenizer.encode("<1>2?")
    assert plain.observation_ids(tokenizer.encode("5#"), [{"role": "user", "content": ">"}]) == tokenizer.encode(">")
    assert plain.decode_turn(tokenizer.encode("5#")) == "5"
    with pytest.raises(UserError, match="has no chat template"):
        plain.initial_ids(QUESTION, [])
