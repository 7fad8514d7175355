"""Whatever one client sends, the server answers the next: requests and connections that are wrong in every way."""

import contextlib
import gzip
import http.client
import json
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psutil
import pytest

from tests.commands.serve.server import FIELDS, Server
from tests.data.folders import byte_bpe_folder
from tests.engines.native.tiny import make_checkpoint

pytestmark = pytest.mark.slow

HEALTH_S = 5.0
"""Longest wait for /health; under 1 s where other work leaves the machine alone."""
GROWTH = 256 << 20
"""Bytes of memory that the server may take up and keep."""

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "tiny", "prompt": "what is two", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("hostile") / "tiny", vocab_size=320)
    byte_bpe_folder(folder)
    started = Server(folder.parent, ["serve", str(folder), *FIELDS, "--port", "0"])
    yield Watched(started)
    assert started.stop() == 130, started.output
    assert "Traceback" not in started.output, started.output


class Watched:
    """A server, and how it does between hostile requests."""

    def __init__(self, started):
        self.started, self.address = started, (urlsplit(started.url).hostname, urlsplit(started.url).port)
        self.process = psutil.Process(started.process.pid)
        self.expected = self.post(GOOD)["choices"][0]["token_ids"]
        assert len(self.expected) == 4
        self.memory = self.process.memory_info().rss
        self.slowest_s = 0.0
        self.num_checks = 0

    def post(self, value, path=COMPLETION):
        """What a good client gets."""
        status, body = self.request("POST", path, json.dumps(value).encode())
        assert status == 200, body
        return json.loads(body)

    def request(self, method, path, body=None, headers=None, timeout=60):
        connection = http.client.HTTPConnection(*self.address, timeout=timeout)
        try:
            connection.request(method, path, body, headers or {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def raw(self, data, timeout=20.0):
        """What comes back after these bytes."""
        with self.connect() as connection, contextlib.suppress(OSError):
            connection.sendall(data)
            return self.read_head(connection, timeout)
        return b""

    def connect(self):
        return socket.create_connection(self.address, timeout=30)

    @staticmethod
    def read_head(connection, timeout):
        connection.settimeout(timeout)
        found = b""
        while b"\r\n\r\n" not in found and (part := connection.recv(1 << 16)):
            found += part
        return found

    def check(self, what):
        """The server lives and answers what it answered before."""
        began = time.monotonic()
        status, body = self.request("GET", "/health", timeout=10)
        assert (status, json.loads(body)) == (200, {"status": "ok"}), what
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        assert self.slowest_s < HEALTH_S, what
        assert self.post(GOOD)["choices"][0]["token_ids"] == self.expected, what
        self.num_checks += 1

    def check_memory(self):
        assert self.process.memory_info().rss - self.memory < GROWTH


DEEP = '{"a":' * 3000 + "1" + "}" * 3000
VALUES = [
    "null", "true", "false", "-1", "0", "1", "2", "0.5", "-0.0", "1e-320", "1e-38", "1e-300", "1e308", "1e999", "NaN",
    "-Infinity", "9" * 400, "9" * 5000, "-9223372036854775809", '""', '"x"', '"\\ud800"', '"\\u0000"',
    '"\\ud83d\\ude00"', '"' + "x" * 5000 + '"',
    "[]", "[[]]", "[null]", "[1]", "[1e30]", '["a"]', '["a",1]', "[[1,2],[3]]",
    "[[[1]]]", "{}", '{"a":1}', "[" * 3000 + "]" * 3000, DEEP, '[{"role":"user"}]', '[{"role":3,"content":"a"}]',
    '[{"role":"user","content":[{"type":"text","text":"a"}]}]', '[{"role":"user","content":[{"type":"image_url"}]}]',
    '[{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"' + "[" * 3000 + '"}}]}]',
    '[{"type":"function","function":{"name":"f","parameters":' + DEEP + "}}]", '["' + '","'.join("a" * 100) + '"]',
]  # fmt: skip
FIELD_NAMES = [
    "model", "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "stream", "stream_options",
    "return_token_ids", "frequency_penalty", "presence_penalty", "logit_bias", "user", "metadata", "store", "prompt",
    "max_tokens", "logprobs", "echo", "suffix", "best_of", "messages", "tools", "tool_choice", "parallel_tool_calls",
    "max_completion_tokens", "top_logprobs", "response_format", "nonsense", "\\ud800",
]  # fmt: skip


def generated(count):
    """Requests with one to three fields of any value each."""
    draw = random.Random(31)
    for _ in range(count):
        path = draw.choice([COMPLETION, CHAT])
        fields = {"model": '"tiny"', "max_tokens": "2"}
        fields |= {"prompt": '"is"'} if path == COMPLETION else {"messages": json.dumps(HELLO)}
        fields |= {draw.choice(FIELD_NAMES): draw.choice(VALUES) for _ in range(draw.randint(1, 3))}
        yield path, "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"


def test_no_value_of_a_field_harms_the_next_request(server):
    statuses = {}
    for place, (path, body) in enumerate(generated(220)):
        status, answer = server.request("POST", path, body.encode())
        statuses[status] = statuses.get(status, 0) + 1
        if status == 200 and b"data: " in answer:
            assert answer.endswith(b"data: [DONE]\n\n"), body
        elif status == 200:
            assert json.loads(answer)["choices"], body
        else:
            assert status == 400 and json.loads(answer)["error"]["message"], (status, body[:300])
        if place % 4 == 0:
            server.check(body[:300])
    assert set(statuses) == {200, 400}
    server.check_memory()


def test_the_extremes_of_sampling_are_answered(server):
    extremes = {
        "temperature": [1e-6, 1e6, 0, -0.0], "top_p": [5e-324, 1e-38, 1], "min_p": [5e-324, 1 - 2**-53, 0],
        "top_k": [1, 10**9, 0, -1], "seed": [-(2**63), 2**63 - 1], "n": [256], "max_tokens": [100],
        "stop": [["a"] * 64, ["\0"], ["x" * 4096]],
    }  # fmt: skip
    for name, values in extremes.items():
        for value in values:
            found = server.post({**GOOD, "temperature": 1, name: value})
            assert all(choice["token_ids"] for choice in found["choices"])
        server.check(name)


def head(*lines, path=COMPLETION, method="POST", version="1.1"):
    return "\r\n".join([f"{method} {path} HTTP/{version}", "host: localhost", *lines, "", ""]).encode("latin-1")


JSON_TYPE = "content-type: application/json"
BODY = json.dumps({**GOOD, "max_tokens": 2}).encode()
LENGTH = f"content-length: {len(BODY)}"
ZIPPED = gzip.compress(BODY)
CONNECTIONS = {
    "no HTTP": (b"hello\r\n\r\n", 400),
    "zeros": (b"\0" * 5000, 400),
    "a TLS hello": (bytes.fromhex("16030100a5010000a10303") + b"\0" * 150, 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/1.0": (head(JSON_TYPE, LENGTH, version="1.0") + BODY, 200),
    "no length": (head(JSON_TYPE), 400),
    "a negative length": (head(JSON_TYPE, "content-length: -1"), 400),
    "a length in words": (head(JSON_TYPE, "content-length: ten"), 400),
    "two lengths": (head(JSON_TYPE, LENGTH, "content-length: 3") + BODY, 400),
    "a length of 20 digits": (head(JSON_TYPE, "content-length: " + "9" * 20), 413),
    "a length of 500 digits": (head(JSON_TYPE, "content-length: " + "9" * 500), 400),
    "too short a length": (head(JSON_TYPE, "content-length: 5") + BODY, 400),
    "chunks": (head(JSON_TYPE, "transfer-encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY), 200),
    "no chunks": (head(JSON_TYPE, "transfer-encoding: chunked") + b"zz\r\n", 400),
    "a chunk of all memory": (head(JSON_TYPE, "transfer-encoding: chunked") + b"f" * 40 + b"\r\n", 400),
    "chunks and a length": (head(JSON_TYPE, LENGTH, "transfer-encoding: chunked") + b"0\r\n\r\n", 400),
    "another encoding": (head(JSON_TYPE, "transfer-encoding: gzip") + BODY, 400),
    "gzip": (head(JSON_TYPE, "content-encoding: gzip", f"content-length: {len(ZIPPED)}") + ZIPPED, 415),
    "no type": (head(LENGTH) + BODY, 415),
    "a form": (head(LENGTH, "content-type: application/x-www-form-urlencoded") + BODY, 415),
    "a type with a charset": (head(LENGTH, "content-type: application/json; charset=utf-8") + BODY, 200),
    "long headers": (head("x: " + "y" * 2_000_000), 400),
    "many headers": (head(*[f"x{number}: y" for number in range(200_000)]), 400),
    "a header that is no ASCII": (head(JSON_TYPE, LENGTH, "x: \xff\xfe") + BODY, 200),
    "a long path": (head(path="/" + "a" * 10_000, method="GET"), 404),
    "a path with escapes": (head(path="/%00%ff/../v1/%2e%2e", method="GET"), 404),
    "another host": (head(method="GET", path="/v1/models").replace(b"localhost", b"evil.example"), 400),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", 400),
    "another method": (head(method="DELETE"), 405),
    "an invented method": (head(method="BREW", path="/health"), 405),
    "CONNECT": (head(method="CONNECT", path="localhost:80"), 404),
    "a websocket": (head("connection: upgrade", "upgrade: websocket", method="GET", path="/health"), 200),
    "h2c": (head("connection: upgrade", "upgrade: h2c", method="GET", path="/health"), 200),
    "expect": (head(JSON_TYPE, "content-length: 99999999", "expect: 100-continue"), 413),
    "garbage behind a request": (head(JSON_TYPE, LENGTH) + BODY + b"\0garbage\r\n\r\n", 200),
    "fifty at once": (head(method="GET", path="/health") * 50, 200),
    "a body of GET": (head(LENGTH, method="GET", path="/health") + BODY, 200),
}  # fmt: skip


def test_no_connection_harms_the_next(server):
    wrong = {}
    for what, (data, wanted) in CONNECTIONS.items():
        found = server.raw(data)
        # The server answers before it has read a long head; the reset behind its answer may overtake it.
        is_cut = not found and len(data) > 1_000_000
        if not (found.startswith(b"HTTP/1.1 %d" % wanted) or is_cut):
            wrong[what] = wanted, found[:20]
        server.check(what)
    assert wrong == {}
    server.check_memory()


def test_garbage_behind_an_answer_that_has_begun_ends_the_connection_alone(server):
    stream = json.dumps({**GOOD, "n": 50, "max_tokens": 100, "stream": True}).encode()
    begun = [
        head("transfer-encoding: chunked") + b"5\r\nhello\r\n",
        head(JSON_TYPE, f"content-length: {len(stream)}") + stream,
        head(JSON_TYPE, "content-length: 99999999") + b"{",
    ]
    for data in begun:
        with server.connect() as connection:
            connection.sendall(data)
            assert server.read_head(connection, 20).startswith(b"HTTP/1.1 ")
            with contextlib.suppress(OSError):
                connection.sendall(b"garbage\r\n\r\n" * 10)
        server.check(data[:200])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_leave_at_any_byte(server, stream):
    body = json.dumps({**GOOD, "max_tokens": 60, "n": 8, "stream": stream, "ignore_eos": True}).encode()
    data = head(JSON_TYPE, f"content-length: {len(body)}") + body
    for place, size in enumerate([*range(0, len(data), 16), len(data)]):
        with server.connect() as connection:
            connection.sendall(data[:size])
            if place % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset it
        if place % 5 == 0:
            server.check(size)
    for size in (1, 20, 200, 500):  # of the answer
        with server.connect() as connection:
            connection.sendall(data)
            assert connection.recv(size)
        server.check(size)


def test_the_engine_stops_when_the_client_leaves(server):
    """By processor time: 100 answers of 150 tokens take much more than the rest of one round of them."""
    asked = {**GOOD, "temperature": 1, "max_tokens": 150, "n": 100, "ignore_eos": True}

    def busy_s(seconds):
        before = sum(server.process.cpu_times()[:2])
        time.sleep(seconds)
        return sum(server.process.cpu_times()[:2]) - before

    before = sum(server.process.cpu_times()[:2])
    server.post(asked)
    complete_s = sum(server.process.cpu_times()[:2]) - before
    for stream in (False, True):
        body = json.dumps({**asked, "stream": stream}).encode()
        before = sum(server.process.cpu_times()[:2])
        with server.connect() as connection:
            connection.sendall(head(JSON_TYPE, f"content-length: {len(body)}") + body)
            if stream:
                assert connection.recv(100)
            else:
                time.sleep(0.05)
        while busy_s(0.3) > 0.1:
            pass
        assert sum(server.process.cpu_times()[:2]) - before < 0.6 * complete_s
        server.check(stream)


def test_slow_and_silent_clients_hold_up_nobody(server):
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(server.connect()) for _ in range(100)]
        body = json.dumps({**GOOD, "n": 20, "max_tokens": 100, "stream": True, "logprobs": 0}).encode()
        silent = [stack.enter_context(server.connect()) for _ in range(10)]
        for connection in silent:
            connection.sendall(head(JSON_TYPE, f"content-length: {len(body)}") + body)
        data = head(JSON_TYPE, LENGTH) + BODY
        for place in range(0, 40, 4):
            for number, connection in enumerate(slow):
                connection.sendall(
                    data[place : place + 4] if number % 2 else data[place + 100 : place + 104] * (place > 0)
                )
            server.check(place)
    server.check("they left")


def test_large_bodies_hold_up_nobody(server):
    large = json.dumps({"model": "tiny", "prompt": "a" * 10_000_000}).encode()
    fits = json.dumps({"model": "tiny", "prompt": "a" * 1_000_000}).encode()
    ids = json.dumps({"model": "tiny", "prompt": [1] * 300_000}).encode()
    chat = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "a b " * 200_000}]}).encode()
    bodies = [(COMPLETION, large, 413), (COMPLETION, fits, 400), (COMPLETION, ids, 400), (CHAT, chat, 400)]
    with ThreadPoolExecutor(12) as pool:
        asked = [
            (pool.submit(server.request, "POST", path, body, timeout=300), wanted) for path, body, wanted in bodies
        ]
        while not all(answer.done() for answer, _ in asked):
            began = time.monotonic()
            assert server.request("GET", "/health", timeout=30)[0] == 200
            server.slowest_s = max(server.slowest_s, time.monotonic() - began)
            assert server.slowest_s < HEALTH_S
        for answer, wanted in asked:
            status, body = answer.result()
            assert (status, "message" in json.loads(body)["error"]) == (wanted, True)
    server.check("large")
    server.check_memory()
