"""An environment that a script passed: it runs in this process and keeps the rules of a pool of workers."""

import asyncio

import pytest

import mrl
from mrl.config.user_code import named_objects
from mrl.distributed.worker_processes import event_loop
from mrl.environments._object_pool import ObjectPool
from mrl.environments.base import Action

NAME = "python-object:__main__.Echo"


def lend(title: str) -> str:
    """Lends a book.

    Args:
        title: Title of the book.
    """
    return title


class Echo(mrl.Environment):
    closed = 0

    def __init__(self, first="begin"):
        self.first = first

    @property
    def tools(self):
        return (lend,)

    def reset(self, seed, row):
        row["seen"] = True
        return mrl.Observation.user(f"{self.first} {seed}")

    def step(self, action):
        ways = {"raise": ValueError("lost"), "stop": KeyboardInterrupt()}
        if action.text in ways:
            raise ways[action.text]
        return "text" if action.text == "malformed" else mrl.Observation.user(action.text, reward=0.5)

    def close(self):
        Echo.closed += 1


@pytest.fixture
def pool():
    with named_objects({NAME: Echo}), ObjectPool(NAME, {"first": "hello"}) as one:
        yield one


def reply(pool):
    (one,) = pool.wait(0.0)
    assert pool.poll() == []
    return one


def test_episodes_are_answered_each_by_an_object_of_its_own(pool):
    assert pool.tools[0]["function"]["name"] == "lend"
    row = {"answer": "1"}
    pool.open("a", 7, row)
    assert reply(pool).observation.messages[0]["content"] == "hello 7"
    assert row == {"answer": "1"}  # it has a copy
    pool.open("b", 8, row)
    pool.send("a", Action("again"))
    assert {one.episode: one.observation.reward for one in pool.poll()} == {"a": 0.5, "b": None}
    before = Echo.closed
    pool.close("a")
    pool.close("a")
    assert Echo.closed == before + 1


@pytest.mark.parametrize(("text", "cause"), [("raise", "error"), ("malformed", "malformed")])
def test_a_failure_ends_its_episode_only_and_says_where(pool, text, cause):
    for name in ("a", "b"):
        pool.open(name, 0, {}, label=f"row {name}")
    pool.poll()
    pool.send("a", Action(text))
    failed = reply(pool)
    assert failed.failure.cause == cause and "row a, turn 1" in failed.failure.message
    pool.close("a")
    pool.send("b", Action("on"))
    assert reply(pool).observation.reward == 0.5


def test_the_stop_button_stops(pool):
    pool.open("a", 0, {})
    with pytest.raises(KeyboardInterrupt):
        pool.send("a", Action("stop"))


async def later(loops):
    await asyncio.sleep(0)
    loops.append(asyncio.get_running_loop())
    return "done"


def test_coroutines_share_a_loop_also_inside_that_of_a_notebook():
    loops = []

    async def cell():
        return event_loop.run(later(loops))

    assert event_loop.run(later(loops)) == asyncio.run(cell()) == event_loop.run(later(loops)) == "done"
    assert len(set(loops)) == 1


def test_an_environment_that_cannot_be_made_is_named():
    with named_objects({NAME: lambda: 1 / 0}), pytest.raises(mrl.UserError, match="ZeroDivisionError"):
        ObjectPool(NAME, {})
    with pytest.raises(mrl.UserError, match="python-object"):
        ObjectPool(NAME, {})
