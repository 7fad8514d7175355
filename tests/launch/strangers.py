"""What a process that is none of the job's does at the ports of a job, and a run that holds still for it.

`algorithm.name=tests.launch.strangers:Held`: update 3 of each rank waits until the file HELD_UNTIL is there.
"""

import contextlib
import os
import pickle
import socket
import threading
import time
from base64 import b64encode
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import TCPStore

from mrl.algorithms.grpo import Grpo

HELD_UNTIL = "HELD_UNTIL"
WAIT_S = 5


class Held(Grpo):
    updates = 0

    def weigh(self, minibatch, reduce):
        self.updates += 1
        until = Path(os.environ[HELD_UNTIL])
        while self.updates == 3 and not until.exists():
            Path(f"{until}-{os.getpid()}").touch()
            time.sleep(0.1)
        super().weigh(minibatch, reduce)


class Payload:
    """A pickle of it makes a file where it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def listening(processes):
    """(address, port, process) of every socket of these processes that listens."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.append((each.laddr.ip, each.laddr.port, process))
    return found


def speak_garbage(port):
    """Bytes that mean nothing, then many, then silence."""
    for words in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 65536):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger:
            stranger.sendall(words)
            time.sleep(0.1)


def write_payloads(ports, mark, keys=()):
    """Puts a pickle that runs into every key that a store at these ports has, and into others; how many it had."""
    payload = pickle.dumps(Payload(mark))
    stores = stores_at(ports)
    known = [(store, key) for store in stores for key in store.list_keys()]
    for store, key in [*known, *((store, key) for store in stores for key in keys)]:
        store.set(key, b64encode(payload) if "torch.rendezvous" in key else payload)
    return len(known)


def write_for_watchdog(ports, values):
    """Sets names of the watchdog's, under the prefix that its names have."""
    for store in stores_at(ports):
        for prefix in {key.rpartition("watchdog/")[0] for key in store.list_keys() if "watchdog/" in key}:
            for name, value in values.items():
                store.set(f"{prefix}watchdog/{name}", value)


def stores_at(ports):
    """Connections to the stores at these ports; another server leaves a client waiting for ever."""
    found = []

    def connect(port):
        with contextlib.suppress(RuntimeError):
            found.append(TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=WAIT_S)))

    threads = [threading.Thread(target=connect, args=(port,), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S / len(threads))
    return found
