"""Reward functions of a user's own, well and ill behaved; they run in worker processes."""

import math
import os
import re
import signal
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
        "true": lambda: True,
    }
    return ways[response]() if response in ways else 1.0


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
