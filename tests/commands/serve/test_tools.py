"""Chats that offer tools, by OpenAI's own client against the application; the engine is a script of what it says."""

import asyncio
import json
import re
import sys
from threading import Thread

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from mrl.commands.serve.app import ServedModel, make_app
from mrl.commands.serve.batching import RequestQueue
from mrl.config.config import DataConfig, ModelConfig
from mrl.data.tokenizer import load_tokenizer
from mrl.environments.formats import base as formats
from tests.data.folders import byte_bpe_folder
from tests.reasoning_families import FAMILIES

TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "How is the weather in Ulm?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_bpe_folder(tmp_path_factory.mktemp("tools"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())


def ask(tokenizer, says, calls, part=7):
    """What `calls(client)` gives where the model says this; and the prompts that it was given."""
    request_queue, prompts = RequestQueue(4000, part, 8, tokenizer.eos_ids), []
    script = [*tokenizer.encode(says), tokenizer.eos_ids[0]]

    def play():
        while (batches := request_queue.next_batches()) is not None:
            for place, batch in enumerate(batches):
                found = []
                for uid, ids in batch.prompts:
                    prompt = next((one for one in prompts if ids[: len(one)] == one), ids)
                    if prompt is ids:
                        prompts.append(ids)
                    at = len(ids) - len(prompt)
                    new = script[at : at + part]
                    found.append((uid, new, [-0.5] * len(new), at + part >= len(script)))
                request_queue.add_tokens(place, found)

    async def asked():
        app = make_app(
            ServedModel("m", 4000, tokenizer, 0, formats.find_format("hermes")), request_queue, "", local=False
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as http:
            return await calls(openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http))

    thread = Thread(target=play)
    thread.start()
    try:
        return asyncio.run(asked()), prompts
    finally:
        request_queue.finish()
        thread.join()


def test_a_call_comes_as_a_call(folder, tokenizer):
    async def calls(client):
        return await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER])

    found, prompts = ask(tokenizer, f"I look.\n{CALL}", calls)
    (choice,) = found.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
    assert choice.message.content.strip() == "I look."
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        QUESTION, tools=[WEATHER], add_generation_prompt=True, return_dict=False
    )
    assert prompts == [tuple(wanted)]


def test_a_streamed_call_is_the_whole_one(tokenizer):
    async def calls(client):
        chunks = await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER], stream=True)
        return [chunk.choices[0] async for chunk in chunks]

    chunks, _ = ask(tokenizer, CALL + "\n" + CALL, calls)
    told = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in told] == [
        (place, "weather", '{"city": "Ulm"}') for place in range(2)
    ]
    assert len({call.id for call in told}) == 2
    assert chunks[-1].finish_reason == "tool_calls" and all(chunk.finish_reason is None for chunk in chunks[:-1])
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""


def test_a_call_may_hold_half_of_a_surrogate_pair(tokenizer):
    """A model may write one as an escape; UTF-8 has no bytes for it."""

    async def calls(client):
        asked = {"model": "m", "messages": QUESTION, "tools": [WEATHER]}
        complete = await client.chat.completions.create(**asked)
        chunks = await client.chat.completions.create(**asked, stream=True)
        return complete.choices[0].message.tool_calls, [c async for c in chunks][-1].choices[0].delta.tool_calls

    found, _ = ask(tokenizer, CALL.replace("Ulm", "\\ud800").replace("weather", "\\udfff"), calls)
    for (call,) in found:
        assert (call.function.name, json.loads(call.function.arguments)) == ("\udfff", {"city": "\ud800"})


@pytest.mark.parametrize(
    "content",
    ["How is the weather?", [{"type": "text", "text": "How is "}, {"type": "text", "text": "the weather?"}]],
)
def test_text_parts_are_one_text(folder, tokenizer, content):
    async def calls(client):
        return await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])

    found, prompts = ask(tokenizer, "It rains.", calls)
    assert found.choices[0].message.content == "It rains."
    asked = [{"role": "user", "content": "How is the weather?"}]
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False
    )
    assert prompts == [tuple(wanted)]


@pytest.mark.parametrize(
    "says",
    [
        "It rains.",
        '<tool_call>{"name": "weather", "argu</tool_call>',
        "<tool_call>5",
        CALL.replace('"Ulm"', "1e999"),
        pytest.param(
            CALL.replace('"Ulm"', "[" * 1500 + "]" * 1500),
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 13), reason="this Python reads JSON that is nested so deep"
            ),
        ),
    ],
)
def test_what_is_no_call_is_text(tokenizer, says):
    async def calls(client):
        whole = await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER])
        chunks = await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER], stream=True)
        streamed = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        return whole.choices[0], "".join(streamed)

    (choice, streamed), _ = ask(tokenizer, says, calls)
    assert choice.message.content == streamed == says
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_tools_that_are_not_offered_are_not_read(tokenizer):
    async def calls(client):
        return await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER], tool_choice="none")

    found, prompts = ask(tokenizer, CALL, calls)
    assert found.choices[0].message.content == CALL
    assert prompts == [tuple(tokenizer.apply_chat_template(QUESTION))]


def test_a_conversation_goes_on_behind_a_call(folder, tokenizer):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    later = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]

    async def calls(client):
        return await client.chat.completions.create(model="m", messages=later, tools=[WEATHER])

    found, prompts = ask(tokenizer, "It rains.", calls)
    assert found.choices[0].message.content == "It rains."
    as_object = {**call, "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    wanted = tokenizer.apply_chat_template([later[0], {**later[1], "tool_calls": [as_object]}, later[2]], [WEATHER])
    assert prompts == [tuple(wanted)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "'image_url'",
        ),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        (
            {"messages": [*QUESTION, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "messages.1.tool_calls.0: expected an object with function.name",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(tokenizer, fields, words):
    async def calls(client):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**{"model": "m", "messages": QUESTION, "tools": [WEATHER], **fields})
        return refused.value.message

    message, _ = ask(tokenizer, "-", calls)
    assert words in message


THOUGHT = f"I could call {CALL}, or not.\n</think>\n\n"


@pytest.mark.parametrize("opened", [True, False], ids=["by the template", "by the model"])
@pytest.mark.parametrize(("answer", "num_calls"), [("It rains.", 0), (CALL, 1)])
def test_a_call_in_a_thought_is_text(tmp_path, opened, answer, num_calls):
    template = TEMPLATE.replace("|>assistant\n", "|>assistant\n<think>\n") if opened else TEMPLATE
    folder = byte_bpe_folder(tmp_path, chat_template=template)
    says = ("" if opened else "<think>\n") + THOUGHT + answer

    async def calls(client):
        whole = await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER])
        chunks = await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER], stream=True)
        return whole.choices[0].message, [chunk.choices[0].delta async for chunk in chunks]

    (whole, deltas), _ = ask(load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig()), says, calls)
    assert whole.content == "".join(delta.content or "" for delta in deltas) == says.removesuffix(CALL)
    streamed = [call for delta in deltas for call in delta.tool_calls or []]
    assert len(whole.tool_calls or []) == len(streamed) == num_calls


def test_a_thought_that_the_template_opened_and_nothing_closed_calls_nothing(tmp_path):
    folder = byte_bpe_folder(tmp_path, chat_template=TEMPLATE.replace("|>assistant\n", "|>assistant\n<think>\n"))

    async def calls(client):
        return await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER])

    found, _ = ask(load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig()), f"I could {CALL}", calls)
    assert found.choices[0].message.tool_calls is None


@pytest.mark.parametrize("family", ["Magistral", "Command A", "MedGemma", "Gemma 4", "gpt-oss, analysis"])
@pytest.mark.parametrize("opened", [True, False], ids=["by the template", "by the model"])
def test_reasoning_between_special_tokens_calls_nothing(tmp_path, family, opened):
    opening, closing = FAMILIES[family]
    template = TEMPLATE.replace("|>assistant\n", f"|>assistant\n{opening}") if opened else TEMPLATE
    folder = byte_bpe_folder(tmp_path, chat_template=template)
    own = AutoTokenizer.from_pretrained(folder)
    tags = re.findall(r"<\|?\w+\|?>|\[/?THINK\]", opening + closing)
    own.add_special_tokens({"additional_special_tokens": [*dict.fromkeys(tags), "<|image|>"]})
    own.save_pretrained(folder)

    async def calls(client):
        return await client.chat.completions.create(model="m", messages=QUESTION, tools=[WEATHER])

    def answered(says):
        tokenizer = load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())
        return ask(tokenizer, ("" if opened else opening) + says, calls)[0].choices[0].message

    inside = f"I <|image|> could {CALL}, or not."
    assert len(answered(f"{inside}{closing}{CALL}").tool_calls) == 1
    assert answered(f"{inside}{closing}It rains.").tool_calls is None
    cut = answered(inside)
    assert cut.tool_calls is None and "<|im_end|>" not in cut.content and "<|image|>" not in cut.content
