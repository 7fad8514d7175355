"""What OpenAI's clients send is read as they mean it, and what they cannot mean is refused with its field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.environments.openai_requests import (
    MAX_DEPTH,
    ROLES,
    RequestError,
    call_arguments,
    chat_messages,
    has_key,
    parse_json,
)

HELLO = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def text(*texts):
    return [{"type": "text", "text": one} for one in texts]


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ("hello", "hello"),
        ("", ""),
        (text("hello"), "hello"),
        (text("What is ", "1+1?"), "What is 1+1?"),
        (text(""), ""),
    ],
)
@pytest.mark.parametrize("role", ROLES)
def test_a_content_is_one_text(role, given, content):
    assert chat_messages([{"role": role, "content": given}]) == [{"role": role, "content": content}]


def test_an_assistant_that_calls_tools_may_say_nothing():
    for said in ({"content": None}, {}, {"content": ""}):
        (message,) = chat_messages([{"role": "assistant", **said, "tool_calls": [CALL]}])
        assert message["content"] == "" and message["tool_calls"] == [CALL]
    assert call_arguments(CALL, "-") == {"a": 1}


def test_fields_that_clients_send_as_null_are_left_out():
    echoed = {"role": "assistant", "content": "a", "tool_calls": None, "audio": None, "refusal": None, "name": None}
    assert chat_messages([echoed]) == [{"role": "assistant", "content": "a"}]
    assert chat_messages([{**echoed, "tool_calls": [], "reasoning_content": "b"}]) == [
        {"role": "assistant", "content": "a", "reasoning_content": "b"}
    ]


def calls(value):
    return [HELLO, {"role": "assistant", "tool_calls": value}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        (5, "messages"),
        ([HELLO, 5], "messages.1"),
        ([[HELLO]], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"content": "a"}], "messages.0.role"),
        ([{"role": None, "content": "a"}], "messages.0.role"),
        ([{"role": 3, "content": "a"}], "messages.0.role"),
        ([{"role": ["user"], "content": "a"}], "messages.0.role"),
        ([{"role": "User", "content": "a"}], "messages.0.role"),
        ([{"role": "function", "name": "f", "content": "a"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "assistant", "content": None}], "messages.0.content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": True}], "messages.0.content"),
        ([{"role": "user", "content": {"a": 1}}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": ["a"]}], "messages.0.content.0"),
        ([{"role": "user", "content": [*text("a"), {"text": "b"}]}], "messages.0.content.1"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content.0.text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0.type",
        ),
        ([HELLO, {"role": "user", "content": [*text("a"), {"type": "input_audio"}]}], "messages.1.content.1.type"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], "messages.0.content.0.type"),
        ([{**HELLO, "name": 5}], "messages.0.name"),
        ([{"role": "tool", "content": "a", "tool_call_id": 5}], "messages.0.tool_call_id"),
        ([{**HELLO, "tool_calls": [CALL]}], "messages.0.tool_calls"),
        ([{**HELLO, "audio": {"id": "1"}}], "messages.0.audio"),
        ([{**HELLO, "images": ["AAAA"]}], "messages.0.images"),
        (calls("f"), "messages.1.tool_calls"),
        (calls({"a": 1}), "messages.1.tool_calls"),
        (calls([5]), "messages.1.tool_calls.0"),
        (calls([CALL, {"function": {"name": "f"}}]), "messages.1.tool_calls.1"),
        (calls([{**CALL, "type": "custom"}]), "messages.1.tool_calls.0.type"),
        (calls([{"function": {"name": 5, "arguments": "{}"}}]), "messages.1.tool_calls.0"),
        *[
            (calls([{"function": {"name": "f", "arguments": arguments}}]), "messages.1.tool_calls.0.function.arguments")
            for arguments in ("", "5", "[]", "{", '{"a": NaN}', "[" * 5000, '"\\ud800"', None, 5, ["a"])
        ],
    ],
)
def test_what_is_no_message_is_refused_by_its_field(messages, param):
    with pytest.raises(RequestError) as refused:
        chat_messages(messages)
    assert refused.value.param == param and str(refused.value).startswith(f"{param}: ")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(values, st.booleans())
def test_json_is_read_as_it_was_written(value, ascii_only):
    written = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(written) == parse_json(written.encode()) == value


@given(st.binary(max_size=40) | st.text(st.characters(exclude_categories=[]), max_size=40))
def test_no_text_does_more_than_be_refused(content):
    try:
        json.dumps(parse_json(content), ensure_ascii=False, allow_nan=False).encode()
    except RequestError as error:
        str(error).encode()


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "{} {}", "nul", "NaN", "-Infinity", '{"a": Infinity}', "1e999", "-1e400", '"\ud800"', '"\\udfff"',
        '{"\\ud800": 1}', "[" * 100_000, '{"a":' * 100_000, "1" * 5000, b"\xff", b"\xed\xa0\x80", "{}".encode("utf-16"),
        "\ufeff{}", '"\t"', "'a'", "{a: 1}", "[1,]", "// a\n1",
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(content):
    with pytest.raises(RequestError) as refused:
        parse_json(content)
    assert refused.value.status == 400 and len(str(refused.value)) < 500


def test_json_may_be_as_deep_as_said():
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deep)
    with pytest.raises(RequestError):
        parse_json(f"[[{deep}]]")


@pytest.mark.parametrize(
    ("header", "is_right"),
    [
        (b"Bearer secret", True),
        (b"bearer secret", True),
        (b"BEARER secret", True),
        (b"Bearer   secret ", True),
        (b"secret", False),
        (b"", False),
        (b"Bearer", False),
        (b"Bearer ", False),
        (b"Bearersecret", False),
        (b"Basic secret", False),
        (b"Bearer Bearer secret", False),
        (b"Bearer secret2", False),
        (b"Bearer secre", False),
        (b"Bearer\tsecret", False),
        ("Bearer é".encode(), False),
    ],
)
def test_a_key_is_a_bearer_token(header, is_right):
    assert has_key(header, "secret") is is_right


def test_a_key_may_have_any_characters():
    assert has_key("Bearer schlüssel".encode(), "schlüssel")
