"""Environments of a test's own; each does what it reads."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time

from mrl.environments.base import Environment, Observation

MIB = 1 << 20


class _MuteError(Exception):
    """Has no message."""

    def __str__(self):
        raise KeyboardInterrupt


class _Hostile:
    """Raises whatever is done with it."""

    def __float__(self):
        raise KeyboardInterrupt

    __str__ = __repr__ = __deepcopy__ = __iter__ = lambda self, *_: self.__float__()


class _Strange:
    """Says that it has another class, and raises."""

    @property
    def __class__(self):
        raise SystemExit


class Does(Environment):
    """Does what the action says, and counts the turns."""

    def __init__(self):
        self.turn = 0

    def reset(self, seed, row):
        self.seed, self.row = seed, row
        return self.told("reset") if row.get("begin", "") == "" else self.did(row["begin"])

    def step(self, action):
        self.turn += 1
        return self.did(action.text)

    def close(self):
        if self.row.get("close") == "hang":
            time.sleep(600)

    def told(self, text):
        return Observation.user(f"{text} {self.turn} {self.seed}")

    def did(self, text):
        word, _, rest = text.partition(" ")
        return getattr(self, f"do_{word}", self.told)(rest or word)

    def do_end(self, _):
        return Observation(reward=float(self.turn), terminated=True)

    def do_raise(self, _):
        raise KeyError("missing")

    def do_exit(self, _):
        sys.exit(3)

    def do_die(self, _):
        os._exit(4)

    def do_hang(self, _):
        time.sleep(600)

    def do_spin(self, _):
        while True:
            pass

    def do_large(self, _):
        return Observation.user("x" * (100 * MIB))

    def do_run(self, source):
        """Runs Python; an exception ends the episode."""
        exec(source, {"__name__": "attack"})
        return self.told("ran")

    def do_interrupt(self, _):
        raise KeyboardInterrupt

    def do_generator(self, _):
        raise GeneratorExit

    def do_cancel(self, _):
        raise asyncio.CancelledError

    def do_mute(self, _):
        raise _MuteError

    def do_nested(self, _):
        nested = []
        for _ in range(5000):
            nested = [nested]
        return Observation(({"role": "user", "content": nested},))

    def do_facts(self, _):
        nested = {}
        for _ in range(5000):
            nested = {"a": nested}
        return Observation(info=nested)

    def do_hostile(self, _):
        return Observation(reward=_Hostile())

    def do_strange(self, _):
        return _Strange()

    def do_endless(self, _):
        return Observation(({"role": "user", "content": _Hostile()},), info={"a": _Hostile()})

    def do_nothing(self, _):
        return None

    def do_nan(self, _):
        return Observation(reward=float("nan"))

    def do_assistant(self, _):
        return Observation(({"role": "assistant", "content": "I"},))

    def do_allocate(self, _):
        return Observation.user(str(len(bytearray(4096 * MIB))))

    def do_clock(self, _):
        return Observation.user(str(time.monotonic_ns()))

    def do_start(self, file):
        """A child, a child in a session of its own, and a daemon."""
        code = "import time; time.sleep(600)"
        daemon = f"import os; os.fork() and os._exit(0); os.setsid(); {code}"
        found = [subprocess.Popen([sys.executable, "-c", code], start_new_session=new).pid for new in (False, True)]
        subprocess.Popen([sys.executable, "-c", daemon])
        with open(file, "w", encoding="utf-8") as out:
            out.write(" ".join(map(str, found)))
        return self.told("started")

    def do_many(self, count):
        for _ in range(int(count)):
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)

    def do_write(self, file):
        with open(file, "w", encoding="utf-8") as out:
            out.write("x")
        return self.told("written")

    def do_temporary(self, _):
        with tempfile.NamedTemporaryFile("w", delete=False) as out:
            out.write("x")
        return Observation.user(out.name)

    def do_socket(self, _):
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
        return self.told("socket")

    def do_signal(self, process):
        os.kill(int(process), 0)
        return self.told("signalled")

    def do_strays(self, _):
        for number in range(3, 1024):  # pipes have the numbers that they have in the parent
            with contextlib.suppress(OSError):
                os.write(number, b'{"key": 1, "serial": 0, "observation": {}}\n')
        return self.told("strays")


class Online(Does):
    """Needs the network."""

    network = True


class Counts(Environment):
    """Its first observation differs in every process: no function of its seed."""

    def reset(self, seed, row):
        return Observation.user(str(os.getpid()))

    def step(self, action):
        if action.text == "die":
            os._exit(1)
        return Observation.user("on")


class Refuses(Environment):
    """Cannot be made."""

    def __init__(self):
        raise RuntimeError("no licence")

    def reset(self, seed, row):
        return Observation()

    def step(self, action):
        return Observation()


class NoEnvironment:
    """Neither `reset` nor `step`."""


NUMBER = 3
