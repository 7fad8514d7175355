"""The HTTP side alone: keys, sizes, clients that leave or stall. Nothing generates but where a test says so."""

import asyncio
import contextlib
import json
import socket
import time
from threading import Thread

import httpx
import pytest

from mrl.commands.serve import http_server
from mrl.commands.serve.app import ServedModel, make_app
from mrl.commands.serve.batching import MAX_WAITING, RequestQueue
from mrl.commands.serve.http_server import make_server
from mrl.config.config import DataConfig, ModelConfig
from mrl.data.tokenizer import load_tokenizer
from mrl.environments.formats import base as formats
from tests.data.folders import byte_bpe_folder

LONGEST = 4000
JSON_TYPE = (b"content-type", b"application/json")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = byte_bpe_folder(tmp_path_factory.mktemp("app"))
    tokenizer = load_tokenizer(ModelConfig(tokenizer=str(folder)), DataConfig())
    return ServedModel("m", LONGEST, tokenizer, 0, formats.find_format("hermes"))


@pytest.fixture
def request_queue(served):
    return RequestQueue(LONGEST, 8, 8, served.tokenizer.eos_ids)


class Client:
    """An ASGI client that sends a body in parts and leaves when it is told to."""

    def __init__(self, *parts, headers=(JSON_TYPE,), path="/v1/completions"):
        self.scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": list(headers), "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        self.incoming = asyncio.Queue()
        for place, part in enumerate(parts):
            self.incoming.put_nowait({"type": "http.request", "body": part, "more_body": place < len(parts) - 1})
        self.sent = []

    async def send(self, message):
        self.sent.append(message)

    def leave(self):
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self):
        message = await self.incoming.get()
        if message["type"] == "http.disconnect":
            self.leave()  # a server says so as often as it is asked
        return message

    def ask(self, app):
        return asyncio.ensure_future(app(self.scope, self.receive, self.send))

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def error(self):
        return json.loads(b"".join(message.get("body", b"") for message in self.sent))["error"]


def body(**fields):
    return json.dumps({"model": "m", "prompt": "four", "temperature": 0, **fields}).encode()


async def until_open(request_queue):
    """The first batches; answers arrive from another thread."""
    while not (batches := await asyncio.to_thread(request_queue.next_batches)):
        pass
    return batches


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_rounds", [0, 1, 2])
def test_answers_whose_client_leaves_are_withdrawn(served, request_queue, stream, num_rounds):
    async def run():
        client = Client(body(n=3, stream=stream, max_tokens=100))
        asking = client.ask(make_app(served, request_queue, "", local=False))
        batches = await until_open(request_queue)
        assert sum(len(batch.prompts) for batch in batches) == 3
        for _ in range(num_rounds):
            for place, batch in enumerate(batches):
                request_queue.add_tokens(place, [(uid, [60] * 8, [-1.0] * 8, False) for uid, _ in batch.prompts])
            batches = request_queue.next_batches()
        client.leave()
        await asyncio.wait_for(asking, 10)
        assert request_queue.next_batches() == []
        return client

    client = asyncio.run(run())
    assert [message for message in client.sent if not message.get("more_body", stream)] == []


def test_a_client_that_has_left_already_opens_nothing(served, request_queue):
    async def run():
        app = make_app(served, request_queue, "", local=False)
        for parts in ([body(stream=True)], [body()], []):
            client = Client(*parts)
            client.leave()
            await asyncio.wait_for(client.ask(app), 10)
        await asyncio.sleep(0.2)
        assert request_queue.next_batches() == []

    asyncio.run(run())


def test_withdrawn_answers_make_room_at_once(served, request_queue):
    async def run():
        app = make_app(served, request_queue, "", local=False)
        full = body(prompt=["a"] * 16, n=256)
        for _ in range(3):
            client = Client(full)
            asking = client.ask(app)
            while not request_queue._submitted:
                await asyncio.sleep(0.01)
            busy = Client(body())
            await busy.ask(app)
            assert busy.status == 503 and "try again later" in busy.error["message"]
            client.leave()
            await asking
            assert client.sent == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 20, "n": 256}, "n"),
        ({"prompt": ["a"] * (MAX_WAITING + 1)}, "n"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": [5, 10**400]}, "prompt"),
        ({"prompt": [[5], [10**9]]}, "prompt.1"),
        ({"prompt": "a b " * LONGEST}, "prompt"),
        ({"prompt": "a" * 65 * LONGEST}, "prompt"),
        ({"prompt": [5] * LONGEST}, "prompt"),
        ({"max_tokens": 10**4000}, "prompt"),
        ({"model": "other"}, "model"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_what_can_never_be_served_is_no_busy_server(served, request_queue, fields, param):
    async def run():
        client = Client(body(**fields))
        await client.ask(make_app(served, request_queue, "", local=False))
        return client

    client = asyncio.run(run())
    assert (client.status, client.error["param"]) == (400, param)
    assert len(client.error["message"]) < 500


@pytest.mark.parametrize(
    ("headers", "parts", "status"),
    [
        ([], [body()], 415),
        ([(b"content-type", b"text/plain")], [body()], 415),
        ([JSON_TYPE, (b"content-encoding", b"gzip")], [body()], 415),
        ([JSON_TYPE, (b"content-length", b"99999999")], [b"{"], 413),
        ([JSON_TYPE], [b"{", b" " * (2 << 20), b" " * (2 << 20)], 413),
    ],
)
def test_a_body_is_refused_before_it_is_read(served, request_queue, headers, parts, status):
    async def run():
        client = Client(*parts, headers=headers)
        await client.ask(make_app(served, request_queue, "", local=False))
        return client

    assert asyncio.run(run()).status == status


def test_large_bodies_are_held_in_bounded_number(served, request_queue, monkeypatch):
    monkeypatch.setattr(http_server, "MAX_BODIES", 1)
    large = b" " * 1_000_000

    async def run():
        app = make_app(served, request_queue, "", local=False)
        slow = Client()
        slow.incoming.put_nowait({"type": "http.request", "body": large, "more_body": True})
        waiting = slow.ask(app)
        await asyncio.sleep(0.1)
        second = Client(large)
        await second.ask(app)
        assert second.status == 503
        slow.leave()
        await waiting
        third = Client(large)
        await third.ask(app)
        assert third.status == 400 and "not valid JSON" in third.error["message"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200), ("bearer secret", 200), ("secret", 401), ("Basic secret", 401), (None, 401),
        ("Bearer other", 401), ("Bearer secret secret", 401),
    ],
)  # fmt: skip
def test_the_key_is_a_bearer_token(served, request_queue, header, status):
    async def run():
        transport = httpx.ASGITransport(make_app(served, request_queue, "secret", local=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {} if header is None else {"authorization": header}
            found = await client.get("/v1/models", headers=headers)
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/nothing", headers=headers)).status_code == (404 if status == 200 else 401)
            return found

    found = asyncio.run(run())
    assert found.status_code == status
    assert found.headers.get("www-authenticate") == (None if status == 200 else "Bearer")


async def answers_much(scope, receive, send):
    """An application that reads all and answers with 64 MB, or with one byte."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(64 if scope["path"] == "/much" else 0):
        await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": b"x"})


@pytest.fixture
def impatient(monkeypatch):
    """Address of a server with limits of half a second."""
    monkeypatch.setattr(http_server, "REQUEST_S", 0.5)
    monkeypatch.setattr(http_server, "STALL_S", 0.5)
    server = make_server(answers_much)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listening.getsockname()
    server.should_exit = True
    thread.join()


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: a\r\n", b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc"],
)
def test_a_request_that_does_not_end_is_given_up(impatient, begun):
    with socket.create_connection(impatient, timeout=20) as connection:
        connection.sendall(begun)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_a_client_that_sends_byte_by_byte_is_given_up(impatient):
    with socket.create_connection(impatient, timeout=20) as connection, contextlib.suppress(OSError):
        began = time.monotonic()
        while time.monotonic() - began < 20:
            connection.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < 10


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_given_up(impatient):
    with socket.create_connection(impatient, timeout=20) as connection:
        connection.sendall(b"GET /much HTTP/1.1\r\nhost: a\r\n\r\n")
        time.sleep(2)
        num_bytes = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                num_bytes += len(part)
    assert num_bytes < 64 << 20


def test_requests_in_time_are_answered_on_one_connection(impatient):
    with socket.create_connection(impatient, timeout=20) as connection:
        for _ in range(4):
            for part in (b"POST / HTTP/1.1\r\nhost: a\r\n", b"content-length: 3\r\n\r\n", b"abc"):
                connection.sendall(part)
                time.sleep(0.1)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    with httpx.stream("GET", f"http://127.0.0.1:{impatient[1]}/much", timeout=60) as answer:
        assert sum(len(part) for part in answer.iter_bytes()) == (64 << 20) + 1
