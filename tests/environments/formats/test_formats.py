"""Tool calls as vLLM's parsers read them; what is none becomes a sentence for the model, and never an exception."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.environments.base import ToolCall
from mrl.environments.formats import base
from mrl.errors import UserError
from tests.environments.formats.vllm_oracle import read_by_vllm

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "F.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "items": {"type": "array", "items": {"type": "integer"}},
                    "either": {"type": ["integer", "string"]},
                    "perhaps": {"type": "integer", "nullable": True},
                },
            },
        },
    }
]
FORMATS = ("hermes", "llama3_json", "qwen3_coder")
LINEAR_S = 20.0  # for texts of 200,000 characters; the square of that takes hours

names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
plain = st.text(st.characters(codec="utf-8", exclude_characters="<>{}|", exclude_categories=["C"]), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | plain | st.floats(-1e6, 1e6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(st.builds(ToolCall, names, st.dictionaries(names, values, max_size=3)), max_size=3)


def written(form, call):
    """A call as a model writes it."""
    if form == "hermes":
        return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
    if form == "llama3_json":
        return json.dumps({"name": call.name, "parameters": call.arguments})
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{inside}</function>\n</tool_call>"


def read(form, text, max_calls=100, *, prompt=""):
    return base.parse_action(text, base.find_format(form), TOOLS, max_calls, prompt=prompt)


@pytest.mark.slow
@pytest.mark.vllm
@given(plain, calls)
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_written_calls_are_read_as_vllm_reads_them(form, before, made):
    text = before + (";" if form == "llama3_json" else "\n").join(written(form, call) for call in made)
    found = read(form, text)
    assert (found.tool_calls, found.errors, found.text) == (tuple(made), (), text)
    assert (found.content, found.tool_calls) == (before, read_by_vllm(form, text, TOOLS)[1])


TYPED = {
    "text": " two\nlines ",
    "count": "-7",
    "share": "0.25",
    "flag": "True",
    "items": "[1, 2]",
    "either": "x",
    "perhaps": "null",
    "unknown": "3",
}


@pytest.mark.vllm
def test_qwen_values_get_the_types_of_the_schema():
    text = "I call.\n" + written("qwen3_coder", ToolCall("f", TYPED))
    found = read("qwen3_coder", text)
    assert found.tool_calls[0].arguments == {
        "text": " two\nlines ",
        "count": -7,
        "share": 0.25,
        "flag": True,
        "items": [1, 2],
        "either": "x",
        "perhaps": None,
        "unknown": "3",
    }
    content, told = read_by_vllm("qwen3_coder", text, TOOLS)
    assert (found.content.strip(), found.tool_calls[0].name) == ((content or "").strip(), told[0].name)
    same = found.tool_calls[0].arguments.keys() - {"perhaps"}  # vLLM does not know the schemas' "nullable"
    assert {key: told[0].arguments[key] for key in same} == {key: found.tool_calls[0].arguments[key] for key in same}


@pytest.mark.vllm
@pytest.mark.parametrize("form", FORMATS)
def test_two_calls_of_one_message(form):
    made = (ToolCall("f", {"text": "a"}), ToolCall("g", {}))
    text = (";" if form == "llama3_json" else "").join(written(form, call) for call in made)
    assert read(form, text).tool_calls == made == read_by_vllm(form, text, TOOLS)[1]
    one = read(form, text, max_calls=1)
    assert one.tool_calls == made[:1] and "at most 1 in one message" in one.errors[0]
    assert read(form, "no call, 3 < 4").content == "no call, 3 < 4"


BROKEN = {
    "hermes": [
        ("<tool_call>{'name': 1}</tool_call>", "no JSON"),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "expected an object"),
        ('<tool_call>{"name": "f"}</tool_call>', "'arguments' are missing"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no 'name'"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "no JSON"),
        ("<tool_call>[" + "[" * 100_000, "nested too deeply"),
        ("<tool_call>", "no JSON"),
        ('<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "no JSON"),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}', "no JSON"),
        ('<|python_tag|>{"name": "f"', "no JSON"),
        ('{"name": "f", "parameters": 3}', "expected an object"),
        ('{"parameters": {}}', "no 'name'"),
        ('{"name": "f", "parameters": {"x": ' + "[" * 100_000, "nested too deeply"),
    ],
    "qwen3_coder": [
        ("<tool_call>f(1)</tool_call>", "no '<function=NAME>'"),
        ("<tool_call><function=f><parameter=count>many</parameter></function></tool_call>", "'many' is no integer"),
        ("<tool_call><function=f><parameter=items>[1e999]</parameter></function></tool_call>", "is no array"),
        ("<tool_call><function=f><parameter", "its parameters begin with"),
        ('<tool_call><function=f>{"count": 1}</function></tool_call>', "its parameters begin with"),
        ("<tool_call><function=f><parameter=x>1</parameter><parameter=x>2</parameter></function></tool_call>", "twice"),
        ("<tool_call><function=f><parameter=x", "a parameter without '>'"),
    ],
}


@pytest.mark.parametrize(("form", "text", "why"), [(form, *case) for form in FORMATS for case in BROKEN[form]])
def test_what_is_no_call_becomes_a_sentence(form, text, why):
    found = read(form, text)
    assert found.tool_calls == () and len(found.errors) == 1
    assert why in found.errors[0] and len(found.errors[0]) < 300


@given(st.lists(st.sampled_from(['{"name": "f", "parameters": {}}', "{", "}", "<tool_call>", "</tool_call>", '"', "x",
                                 "<function=f>", "<parameter=count>", "</parameter>", "[", "<|python_tag|>", "1"]),
                max_size=12))  # fmt: skip
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("form", FORMATS)
def test_no_text_raises(form, parts):
    text = "".join(parts)
    found = read(form, text)
    assert found.text == text and text.startswith(found.content[:0])


PARTS = ["{", '{"a":', "<tool_call>", "<tool_call>{", "<parameter=", '{"', "<function=f>", "<think>",
         "<tool_call></think>", "</function></tool_call>", "<tool_call><function=f>",
         "<tool_call><function=f><tool_call><function=f></function></tool_call>"]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("form", FORMATS)
def test_long_texts_are_read_in_linear_time(form, part):
    start = time.monotonic()
    read(form, part * (200_000 // len(part)))
    read(form, "x" + part * (200_000 // len(part)))
    assert time.monotonic() - start < LINEAR_S


def test_an_unknown_format_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'hermes'"):
        base.find_format("herms")


TAGS = ["</parameter>", "</function>", "</tool_call>", "<parameter=p>", "<tool_call>", "<function=g>", "</think>", "{",
        "}", '"', "\n", "<a>", "x", " "]  # fmt: skip
tagged = st.lists(st.sampled_from(TAGS), max_size=8).map("".join)


def is_ambiguous(text):
    """Whether qwen3_coder, which has no escapes, cannot write this text as a value."""
    joined = "".join(text.split())
    ends = "</function>" in joined
    ends_in_thought = ends and "</think>" in joined.partition("</function>")[2]  # reads as a call inside a thought
    return "</parameter><parameter=" in f"{joined}</parameter>" or (ends and "<function=" in joined) or ends_in_thought


EXAMPLE = written("qwen3_coder", ToolCall("g", {"a": "1", "b": "2"}))


@given(tagged)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("after", ["", "another"])
def test_a_text_argument_may_hold_tags(form, after, text):
    if form == "qwen3_coder" and is_ambiguous(text):
        return
    made = [ToolCall("f", {"text": text}), *([ToolCall("f", {"count": 7})] if after else [])]
    found = read(form, ("; " if form == "llama3_json" else "\n").join(written(form, call) for call in made))
    assert (found.tool_calls, found.errors) == (tuple(made), ())


@pytest.mark.parametrize("text", [
    "<a></parameter></a>", "x </function> y", "x </tool_call> y", "<parameter=p>", "</parameter></function>", EXAMPLE,
    "</parameter>\n</function>\n</tool_call> y", f"First {EXAMPLE} then {EXAMPLE}.",
    f"{EXAMPLE}</function></tool_call>", "<tool_call>\n<function=g>", "</think>",
])  # fmt: skip
def test_qwen_values_may_hold_tags_and_whole_calls(text):
    made = (ToolCall("f", {"text": text}), ToolCall("f", {"text": "b", "count": 2}))
    for calls in (made[:1], made[1:], made, made[::-1], made[:1] * 2):
        found = read("qwen3_coder", "\n".join(written("qwen3_coder", call) for call in calls))
        assert (found.tool_calls, found.errors) == (tuple(calls), ())


def test_two_functions_in_one_block_are_two_calls():
    first, second = written("qwen3_coder", ToolCall("f", {"text": "a"})), "<function=f>\n</function>\n</tool_call>"
    text = first.removesuffix("</tool_call>") + second
    found = read("qwen3_coder", text)
    assert (found.tool_calls, found.errors) == ((ToolCall("f", {"text": "a"}), ToolCall("f")), ())


@pytest.mark.parametrize(
    "missing", ["</tool_call>", "</function>\n</tool_call>", "</parameter>\n</function>\n</tool_call>"]
)
def test_the_last_qwen_call_may_lack_its_closing_tags(missing):
    made = ToolCall("f", {"text": "a"})
    text = written("qwen3_coder", made)
    assert text.endswith(missing)
    assert read("qwen3_coder", text.removesuffix(missing)).tool_calls == (made,)


REAL, IDEA = ToolCall("f", {"text": "real"}), ToolCall("f", {"text": "an idea"})
# {idea}: a call that is not to be made; {real}: one that is; {tag}: what begins a call
THOUGHTS = {
    "a call": "<think>I could {idea}, but no.</think>It is 5.",
    "a call, then a real one": "<think>I could {idea}, but no.</think>\n\n{real}",
    "a tag that is mentioned": "<think>I could write {tag} here.</think>It is 5.",
    "a tag, then a real call": "<think>Not {tag}, or {tag}.</think>{real}",
    "opened by the prompt": "I could {idea}, but no.\n</think>\n\nIt is 5.",
    "opened by the prompt, then a call": "I could {idea}.\n</think>\n\n{real}",
    "a tag, opened by the prompt": "I could write {tag}, no.\n</think>\n\nIt is 5.",
    "a tag and a call, opened by the prompt": "Not {tag}, no.\n</think>\n\n{real}",
    "not closed": "<think>I could {idea}",
    "not closed, after white space": "\n<think>\nI could {idea} or write {tag}",
    "two thoughts": "<think>a {idea}</think> Well. <think>b {idea}</think> It is 5.",
    "two thoughts, then a call": "<think>a {idea}</think><think>b {tag}</think>{real}",
    "the second not closed": "<think>a</think> <think>b {idea}",
    "closed twice": "<think>a</think> or {idea}</think>{real}",
    "a call between thoughts": "<think>a</think>{real}<think>b {idea}</think>",
    "empty": "<think>\n\n</think>\n\n{real}",
    "a closing tag at the end": "{idea}</think>",
}


def filled(form, text):
    tag = '{"name": "f"' if form == "llama3_json" else "<tool_call>"
    whole = {"{idea}": written(form, IDEA), "{real}": written(form, REAL), "{tag}": tag}
    for name, part in whole.items():
        text = text.replace(name, part)
    return text


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("text", THOUGHTS.values(), ids=THOUGHTS)
def test_calls_in_a_thought_are_not_made(form, text):
    made = (REAL,) if "{real}" in text else ()
    whole = filled(form, text)
    found = read(form, whole)
    assert (found.tool_calls, found.errors) == (made, ())
    assert found.content == (whole[: whole.index(written(form, REAL))] if made else whole)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "text", ["I could {idea}", "{idea}", "{tag}", "<think>{idea}", "{idea}</think>5", "a</think>{real}"]
)
def test_a_message_whose_prompt_opened_a_thought_begins_inside_it(form, text):
    found = read(form, filled(form, text), prompt="assistant\n<think>\n")
    assert (found.tool_calls, found.errors) == ((REAL,) if "{real}" in text else (), ())
