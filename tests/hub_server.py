"""A local server that answers what snapshot_download asks of a hub about one repository."""

import hashlib
import http.server
import json
import os
import threading
from contextlib import contextmanager


def etag(data):
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(body=True)

    def do_HEAD(self):
        self._answer(body=False)

    def _answer(self, *, body):
        server, path = self.server, self.path.split("?")[0]
        if path.startswith(f"{server.api}/tree"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": etag(data)}
                for name, data in server.files.items()
            ]
            self._send(json.dumps(listed).encode(), body=body)
        elif path.startswith(server.api):
            self._send(json.dumps({"id": server.repo, "sha": server.commit, "siblings": []}).encode(), body=body)
        elif server.gated and "/resolve/" in path:
            self._send(b"", body=body, status=403, **{"X-Error-Code": "GatedRepo"})
        elif (name := path.partition(f"/resolve/{server.commit}/")[2]) in server.files:
            if body:
                server.sent.append(name)
            self._send(server.files[name], body=body)
        elif server.repo not in path:  # the hub hides which repositories are private
            self._send(b"", body=body, status=401, **{"X-Error-Code": "RepoNotFound"})
        else:
            self.send_error(404)

    def _send(self, data, *, body, status=200, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{etag(data)}"')
        self.send_header("X-Repo-Commit", self.server.commit)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def serve(kind, repo, commit, files, *, gated=False):
    """Yields the running server; `sent` lists the files that it sent.

    Args:
        kind: "models" or "datasets".
        repo: OWNER/NAME.
        commit: Commit of the newest revision.
        files: Path in the repository -> content.
        gated: Refuse the files to an account that has not accepted the terms.
    """
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.api, server.repo, server.commit = f"/api/{kind}/{repo}", repo, commit
    server.files, server.sent, server.gated = files, [], gated
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client_environment(server, home):
    """Environment variables of a process that asks this server and caches in the folder `home`."""
    return {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "TRANSFORMERS_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
