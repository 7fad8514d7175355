"""The fields of a request: what OpenAI's clients send is taken, what an engine cannot do is refused by its name."""

import json
import math

import pytest

from mrl.commands.serve.requests import ChatRequest, CompletionRequest, read_request
from mrl.environments.openai_requests import RequestError
from mrl.trainer.validation.ranges import RANGES, in_range

HELLO = [{"role": "user", "content": "hi"}]
DEEP = "[" * 100 + "]" * 100


def completion(**fields):
    return read_request(CompletionRequest, json.dumps({"model": "m", "prompt": "a", **fields}).encode())


def chat(**fields):
    return read_request(ChatRequest, json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def refused(read, **fields):
    with pytest.raises(RequestError) as error:
        read(**fields)
    assert error.value.status == 400 and str(error.value).startswith(f"{error.value.param}: ")
    return error.value.param


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
@pytest.mark.parametrize(
    "value",
    [
        0, -0.0, 1, -1, 5, -2, 0.5, 1.0, 5e-324, 1e-320, 1e-300, 1e-38, 1e-20, 9.9e-7, 1e-6, 1e6, 1.1e6, 1e9, 1e10,
        1e38, 1e300, 10**400, 1 - 2**-53, 1 + 2**-52, 2**31, 2**63, -(10**400),
    ],
)  # fmt: skip
def test_sampling_has_the_ranges_of_a_config(name, value):
    allowed = in_range(value, RANGES[f"rollout.val_kwargs.{name}"]) or (name == "top_k" and value == 0)
    if allowed and not (name == "top_k" and value != int(value)):
        sampling = completion(**{name: value}).sampling(9)
        assert getattr(sampling, name) == (-1 if name == "top_k" and value == 0 else value)
    else:
        assert refused(completion, **{name: value}) == name


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, 2.0, 256]),
        ("temperature", [0, 1, 0.7, 2]),
        ("seed", [0, -1, -(2**63), 2**63 - 1, 5.0]),
        ("stop", ["a", ["a"], [], "", ["a", ""], ["x"] * 64]),
        ("max_tokens", [1, 16.0, 10**30]),
        ("logit_bias", [{}]),
        ("frequency_penalty", [0, 0.0, -0.0]),
        ("presence_penalty", [0]),
        ("logprobs", [0]),
        ("best_of", [1]),
        ("echo", [False]),
        ("suffix", [""]),
        ("stream", [True, False]),
        ("stream_options", [{"include_usage": True}]),
        ("metadata", [{}, {"a": "b"}]),
    ],
)
def test_what_clients_send_is_taken(name, values):
    for value in [*values, None]:
        assert completion(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", [None, 5, ["m"]]),
        ("n", [0, -1, 257, 10**30, 1.5, "1", True, [1]]),
        ("temperature", ["1", True, [1], {}, math.inf, math.nan]),
        ("seed", [2**63, -(2**63) - 1, 0.5, "1", True, 10**30]),
        ("stop", [5, [5], [None], {"a": 1}, ["x"] * 65, "x" * 5000]),
        ("max_tokens", [0, -1, 1.5, "16", True]),
        ("logit_bias", [{"5": 1}, [], 5]),
        ("frequency_penalty", [0.1, -0.1, 2, "0"]),
        ("presence_penalty", [0.1, True]),
        ("logprobs", [1, True, False, 5]),
        ("best_of", [2, 0]),
        ("echo", [True, "no"]),
        ("suffix", ["a"]),
        ("stream", ["yes", 1]),
        ("stream_options", [True, {"other": 1}, {"include_usage": 1}]),
        ("metadata", [5, []]),
        ("nonsense", [None, 1]),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_field(name, values):
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            with pytest.raises(RequestError, match="not valid JSON"):
                completion(**{name: value})
        else:
            assert refused(completion, **{name: value}).split(".")[0] == name


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([""], [""]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([0], [[0]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([[]], [[]]),
    ],
)
def test_a_prompt_has_openai_forms(prompt, prompts):
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 5, True, 0.5, [True], [1, True], [1.5], [-1], [1, -1], ["a", 1], [1, "a"], [[1], "a"], [[1], 2],
     [["a"]], [[[1]]], [None], [[None]], [{}], {"a": 1}],
)  # fmt: skip
def test_another_form_of_prompt_is_refused(prompt):
    assert refused(completion, prompt=prompt) == "prompt"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("messages", [None, [], "hi", [5]]),
        ("tools", [[5], [{"type": "function"}], [{"type": "other", "function": {"name": "f"}}], 5, {}]),
        ("tool_choice", ["required", 5, {"type": "function", "function": {"name": "f"}}]),
        ("parallel_tool_calls", [False, 5]),
        ("response_format", [{"type": "json_object"}, "text"]),
        ("logprobs", [5, "yes"]),
        ("top_logprobs", [1, 20]),
        ("max_completion_tokens", [0, "5"]),
        ("modalities", [["audio"]]),
    ],
)
def test_a_chat_refuses_what_it_cannot_do(name, values):
    for value in values:
        assert refused(chat, **{name: value}).split(".")[0] == name


def test_earlier_calls_reach_the_template_as_objects_and_developers_as_system():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    asked = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ]
    )
    assert asked.templated == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": [1]}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"5", "not a JSON object"),
        (b'{"model": "m", "zz": "\\ud800"}', "surrogate"),
        (DEEP.encode(), "nested"),
        (b'{"model": "m", "prompt": "a", "temperature": NaN}', "NaN"),
        (b'{"model": "m", "prompt": "a", "temperature": 1e999}', "1e999"),
    ],
)
def test_what_is_no_request_is_said(body, words):
    with pytest.raises(RequestError, match=words):
        read_request(CompletionRequest, body)


@pytest.mark.parametrize(
    ("make", "fields", "remedy"),
    [
        (completion, {"frequency_penalty": 0.5}, "Leave the field out"),
        (completion, {"presence_penalty": 0.5}, "Leave the field out"),
        (completion, {"logit_bias": {"5": 1}}, "Leave the field out"),
        (completion, {"logprobs": 5}, "send 0"),
        (completion, {"echo": True}, "Leave the field out"),
        (completion, {"suffix": "a"}, "Leave the field out"),
        (completion, {"best_of": 2}, "with n"),
        (completion, {"stream_options": {"include_obfuscation": True}}, "Leave the field out"),
        (chat, {"response_format": {"type": "json_object"}}, "describe the format in the messages"),
        (chat, {"response_format": {"type": "json_schema", "json_schema": {}}}, "describe the format in the messages"),
        (chat, {"top_logprobs": 5}, "Leave the field out"),
        (chat, {"tool_choice": "required"}, "Ask for the call"),
        (chat, {"parallel_tool_calls": False}, "Leave the field out"),
        (
            chat,
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "Leave the field out",
        ),
    ],
)
def test_a_refusal_says_what_mrl_does_and_what_to_do(make, fields, remedy):
    with pytest.raises(RequestError) as caught:
        make(**fields)
    assert remedy in str(caught.value) and "mrl" in str(caught.value) and "Input should be" not in str(caught.value)
