"""Reward functions that raise, or return, what ends a process that does not expect it."""

import asyncio


class MuteError(Exception):
    """Has no message."""

    def __str__(self):
        raise KeyboardInterrupt


class Hostile:
    """Raises whatever is done with it."""

    def __float__(self):
        raise KeyboardInterrupt

    __str__ = __repr__ = lambda self: self.__float__()


def _deep(number=0):
    return _deep(number + 1)


def _raised(error):
    raise error


WAYS = {
    "interrupt": lambda: _raised(KeyboardInterrupt()),
    "generator": lambda: _raised(GeneratorExit()),
    "cancel": lambda: _raised(asyncio.CancelledError()),
    "exit": lambda: _raised(SystemExit(3)),
    "mute": lambda: _raised(MuteError()),
    "deep": _deep,
    "hostile": Hostile,
    "hostile score": lambda: {"score": Hostile()},
    "hostile fact": lambda: {"score": 1.0, "fact": Hostile()},
    "hostile key": lambda: {"score": 1.0, Hostile(): 1.0},
}


def does(*, prompt, response, answer, extra):
    """Does what the response names."""
    return WAYS[response]() if response in WAYS else 1.0


async def does_later(*, prompt, response, answer, extra):
    """The same, among others that wait."""
    await asyncio.sleep(0.01)
    return WAYS[response]() if response in WAYS else 1.0
