"""Agent programs that know only OpenAI's client: what they say and hear is the episode."""

import json
import socket
import struct
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from mrl.environments._endpoint import LARGEST_REQUEST, AgentEndpoint
from mrl.environments.base import Action, ToolCall
from tests.environments.episodes import descendants, pool, replies, said
from tests.rewards.test_scorer import gone

AGENT = Path(__file__).with_name("agent.py")
ROW = {"prompt": "How many?"}
TOOL = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = descendants()
    yield
    assert all(gone(process) for process in descendants() - before)


def agents(what, **kwargs):
    return pool("program", {"command": [sys.executable, str(AGENT), what], **kwargs}, num_workers=2)


def tell(many, name, action):
    many.send(name, action)
    return replies(many, 1)[name]


@pytest.mark.slow
def test_a_conversation_is_an_episode():
    with agents("count") as many:
        for name, seed in (("a", 5), ("b", 6)):
            many.open(name, seed, ROW)
        assert [said(reply) for reply in replies(many, 2).values()] == [[], []]  # the row's prompt says all
        for turn in range(3):
            for name, seed in (("b", 6), ("a", 5)):
                assert said(tell(many, name, Action(f"{name}{turn}"))) == [f"{turn}: {name}{turn} {seed}"]
        for name in "ab":
            last = tell(many, name, Action("four")).observation
            assert (last.terminated, last.reward, last.messages) == (True, 4.0, ())
            many.close(name)


@pytest.mark.slow
def test_a_stream_is_one_too():
    with agents("stream") as many:
        many.open("a", 0, ROW)
        replies(many, 1)
        assert tell(many, "a", Action("seven..")).observation.reward == 7.0


@pytest.mark.slow
def test_tools_are_called_by_the_program():
    with agents("tools", tools=[TOOL]) as many:
        assert [tool["function"]["name"] for tool in many.tools] == ["double"]
        many.open("a", 0, ROW)
        replies(many, 1)
        reply = tell(many, "a", Action("<call>", "", (ToolCall("double", {"x": 21}),)))
        assert [(one["role"], one["content"]) for one in reply.observation.messages] == [("tool", "42")]
        assert tell(many, "a", Action("42")).observation.reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "turns", "words"),
    [
        ("rewrites", 1, 'message 1 is ["assistant", "something else"'),
        ("heats", 0, "'temperature' has no effect"),
        ("dies", 1, "the agent's own mistake"),
        ("tools", 0, "it offers the tools ['double']"),
    ],
)
def test_what_is_no_episode_fails_alone_in_words(what, turns, words):
    with agents(what) as many:
        many.open("a", 0, ROW, label="row 7")
        reply = replies(many, 1)["a"]
        for _ in range(turns):
            assert reply.failure is None
            reply = tell(many, "a", Action("yes"))
        assert reply.failure.cause == "error" and words in reply.failure.message and "row 7" in reply.failure.message
        many.open("b", 0, {"prompt": "other"})
        assert replies(many, 1)["b"].episode == "b"


def test_fields_that_the_config_stands_in_for_may_be_named():
    with agents("heats", ignore=["temperature"]) as many:
        many.open("a", 0, ROW)
        assert said(replies(many, 1)["a"]) == []
        assert tell(many, "a", Action("5")).observation.terminated


def test_a_program_that_is_not_there_is_named():
    with pool("program", {"command": "/no/such/agent"}) as one:
        one.open("a", 0, ROW)
        assert "/no/such/agent" in replies(one, 1)["a"].failure.message


def test_nobody_else_is_let_in():
    endpoint = AgentEndpoint(frozenset())
    try:
        assert httpx.post(f"{endpoint.url}/chat/completions", json={"messages": []}).status_code == 401
        strange = {"authorization": "Bearer é".encode()}
        assert httpx.post(f"{endpoint.url}/chat/completions", headers=strange, json={}).status_code == 401
        key = {"authorization": f"Bearer {endpoint.key}"}
        assert httpx.get(f"{endpoint.url}/models", headers=key).json()["data"][0]["id"] == "policy"
        for path, content, words in (
            ("completions", "{}", "is not served in a run"),
            ("chat/completions", "[]", "not a JSON object"),
            ("chat/completions", "{", "line 1"),
            ("chat/completions", '{"n": 2}', "'n' has no effect"),
            ("chat/completions", "[" * 100_000, "nested"),
            ("chat/completions", '{"user": "\\ud800"}', "surrogate"),
            ("chat/completions", '{"user": NaN}', "NaN"),
            ("chat/completions", "{}", "messages"),
            ("chat/completions", '{"messages": [{"content": "a"}]}', "messages.0.role"),
            ("chat/completions", '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "'image_url'"),
        ):
            answer = httpx.post(f"{endpoint.url}/{path}", headers=key, content=content)
            assert answer.status_code == 400 and words in answer.json()["error"]["message"]
        assert endpoint.requests.empty()
    finally:
        endpoint.close()


def test_a_body_that_cannot_be_read_is_refused_and_the_next_is_read():
    endpoint = AgentEndpoint(frozenset())
    url, key = f"{endpoint.url}/chat/completions", {"authorization": f"bearer {endpoint.key}"}
    try:
        with httpx.Client(headers=key, timeout=60) as client:
            for content, headers, status in (
                (iter([b"{}"]), {}, 411),
                (b"{}", {"content-encoding": "gzip"}, 415),
                (b" " * (LARGEST_REQUEST + 1), {}, 413),
            ):
                answer = client.post(url, content=content, headers=headers)
                assert answer.status_code == status and answer.json()["error"]["message"]
                assert client.get(f"{endpoint.url}/models").status_code == 200
    finally:
        endpoint.close()


@pytest.mark.parametrize("size", [0, 60, 10_000])
def test_a_client_that_leaves_is_noticed(size, capfd):
    """Before the end of its request, or while it waits for its answer; nothing is printed."""
    endpoint = AgentEndpoint(frozenset())
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {endpoint.key}\r\n"
    data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    before = threading.active_count()
    try:
        with socket.create_connection(("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))) as connection:
            connection.sendall(data[:size])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", size == 60, 0))
            asked = endpoint.requests.get(timeout=20) if size > len(data) else None
        if asked is not None:
            assert asked.delivered.get(timeout=20) is False
        ends = time.monotonic() + 20
        while threading.active_count() > before and time.monotonic() < ends:
            time.sleep(0.05)
        assert threading.active_count() == before
    finally:
        endpoint.close()
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_client_that_left_gets_its_answer_when_it_asks_again():
    with agents("hurries") as many:
        many.open("a", 0, ROW)
        replies(many, 1)
        time.sleep(2)  # longer than the program's patience
        last = tell(many, "a", Action("five!")).observation
        assert (last.terminated, last.reward) == (True, 5.0)
