"""An OpenAI-compatible server that does what the response under judgement says, well or ill."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-very-secret"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = asked["messages"][-1]["content"].partition("<response>\n")[2].partition("\n</response>")[0]
        word, _, rest = said.partition(" ")
        server = self.server
        with server.lock:
            server.asked.append((self.path, self.headers.get("authorization"), asked))
            server.times[said] += 1
            times = server.times[said]
        with suppress(BrokenPipeError, ConnectionResetError):
            getattr(self, f"way_{word}", self.way_say)(rest, times)

    def reply(self, body, status=200, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def way_say(self, rest, times, reason="stop"):
        self.reply({"choices": [{"message": {"role": "assistant", "content": rest}, "finish_reason": reason}]})

    def way_cut(self, rest, times):
        self.way_say(rest, times, "length")

    def way_wait(self, rest, times):
        server = self.server
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
        time.sleep(0.05)
        with server.lock:
            server.now -= 1
        self.way_say(rest, times)

    def way_busy(self, rest, times):  # twice, then well
        if times <= 2:
            self.reply({"error": "busy"}, (429, 503)[times - 1], retry_after="0")
        else:
            self.way_say(rest, times)

    def way_status(self, rest, times):
        self.reply({"error": f"no, {self.headers.get('authorization')}"}, int(rest), retry_after="0")

    def way_body(self, rest, times):
        self.reply(rest.encode())

    def way_null(self, rest, times):
        self.reply({"choices": [{"message": {"content": None}}]})

    def way_huge(self, rest, times):
        self.reply(b"x" * (3 << 20))

    def way_slow(self, rest, times):
        self.server.ended.wait(20.0)

    def way_drip(self, rest, times):
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        while not self.server.ended.wait(0.05):
            self.wfile.write(b" ")

    def way_hangup(self, rest, times):
        self.close_connection = True
        self.connection.close()

    def way_elsewhere(self, rest, times):
        self.reply({}, 307, location="http://127.0.0.1:1/v1/chat/completions")


@contextmanager
def judge_server():
    """The server, with `url`, `asked` (path, key, body), and the `most` questions with "wait" that it had at a time."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.handle_error = lambda *args: None
    server.ended = threading.Event()
    server.lock, server.asked, server.times, server.now, server.most = threading.Lock(), [], Counter(), 0, 0
    server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
