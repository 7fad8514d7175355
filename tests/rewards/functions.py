"""Reward functions of a user's own, well and ill behaved; they run in worker processes."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time


def num_chars(*, prompt, response, answer, extra, factor=1):
    return factor * len(response)


def shows_arguments(*, prompt, response, answer, extra):
    given = (prompt, response, answer, extra)
    wanted = ("<1+2>", "3", "3", {"level": 4, "response_length": 2, "finish_reason": "stop"})
    if given != wanted:
        raise ValueError(f"got {given}")
    extra["level"] = "changed"  # must not reach another sample or the rollout
    return 1


def imports_torch(*, prompt, response, answer, extra):
    return "torch" in sys.modules


def prints(*, prompt, response, answer, extra):
    sys.stdout.write("a reward function's own output")
    sys.stdout.flush()
    return len(sys.stdin.read())


def own_process_id(*, prompt, response, answer, extra):
    return os.getpid()


class _Two:
    """Like a tensor of two elements."""

    def __float__(self):
        raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")


def does_what_it_reads(*, prompt, response, answer, extra):
    """Fails in the way that the response names."""
    ways = {
        "raise": lambda: {}["missing"],
        "exit": lambda: sys.exit(3),
        "end": lambda: os._exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "loop": lambda: [None for _ in iter(int, 1)],
        "sleep": lambda: time.sleep(600),
        "backtrack": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
        "nan": lambda: math.nan,
        "inf": lambda: math.inf,
        "text": lambda: "1",
        "nothing": lambda: None,
        "two": lambda: _Two(),
        "true": lambda: True,
    }
    return ways[response]() if response in ways else 1.0


def starts_processes(*, prompt, response, answer, extra):
    """Leaves processes behind, as the response says, and writes their ids into the file `answer`."""
    kinds, _, then = response.partition(" then ")
    sleep = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    for kind in kinds.split():
        if kind == "program":
            _note(answer, subprocess.Popen(sleep).pid)
        elif kind == "session":
            _note(answer, subprocess.Popen(sleep, start_new_session=True).pid)
        elif kind == "daemon":  # forks twice, so that its parent is gone
            child = os.fork()
            if child == 0:
                os.setsid()
                if os.fork() == 0:
                    _note(answer, os.getpid())
                    time.sleep(600)
                os._exit(0)
            os.waitpid(child, 0)
    while len(_noted(answer)) < len(kinds.split()):
        time.sleep(0.01)
    if then == "hang":
        time.sleep(600)
    elif then == "die":
        os._exit(3)
    return 1


def _note(path, process_id):
    with open(path, "a", encoding="ascii") as file:
        file.write(f"{process_id}\n")


def _noted(path):
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def comes_back_twice(*, prompt, response, answer, extra):
    """A fork whose child returns, raises or exits like the parent, with another value."""
    child = os.fork()
    if child == 0:
        if response == "raise":
            raise ValueError("in the child")
        if response == "exit":
            sys.exit(0)
        return 1000
    os.waitpid(child, 0)
    return len(response)


def writes_everywhere(*, prompt, response, answer, extra):
    """Stray bytes into every file descriptor of the process, as the response asks."""
    strays = {
        "byte": b"x",
        "lines": b"\n\n",
        "zeros": bytes(64),
        "json": b'{"index": 0, "outcomes": [{"value": 7.0, "error": "", "lost": false}]}\n',
        "list": b"[1]\n",
        "refusal": b'{"refusal": ""}\n',
        "deep": b"[" * 100_000 + b"\n",
        "long": b"y" * (1 << 21),
    }
    if response in strays:
        for number in range(3, 40):
            with contextlib.suppress(OSError):
                os.write(number, strays[response])
    return len(response)


def allocates(*, prompt, response, answer, extra):
    """Takes memory in the way that the response names."""
    if response == "here":
        return len(bytearray(1 << 40))
    if response == "program":
        return subprocess.run([sys.executable, "-c", "x = bytearray(1 << 40)"], check=True).returncode
    if response == "touched":  # ten gigabytes, page by page
        held = []
        for _ in range(10 << 10):
            held.append(bytearray(b"1") * (1 << 20))
        return len(held)
    if response == "many":  # each below the limit, together above it
        program = "import time; x = bytearray(150 << 20); x[::4096] = b'1' * 38400; time.sleep(600)"
        children = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
        return children[0].wait()
    return 1


def steers_the_terminal(*, prompt, response, answer, extra):
    raise ValueError(f"\x1b]0;title\x07 \x1b[2J {response}")


NOT_A_FUNCTION = 3


def says_more(*, prompt, response, answer, extra):
    """A mapping, as verl's functions return; the response says which."""
    ways = {
        "verl": {"score": 0.5, "acc": True, "pred": "7", "tries": 3, "why": None, "odd": math.nan},
        "empty": {},
        "text": {"score": "1"},
        "nan": {"score": math.nan},
        "key": {"score": 1, "a\nb": 2.0},
        "many": {"score": 1, **{f"k{i}": i for i in range(100)}},
    }
    return ways[response]
