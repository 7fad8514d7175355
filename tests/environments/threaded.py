"""An environment whose module starts a thread before its worker knows that it needs no network."""

import contextlib
import socket
import threading

from tests.environments.own import Does

start, done, found = threading.Event(), threading.Event(), []


def _make_a_socket():
    start.wait()
    with contextlib.suppress(PermissionError):
        found.append(socket.socket())
    done.set()


threading.Thread(target=_make_a_socket, daemon=True).start()


class Threaded(Does):
    """Does what it reads."""
