"""Pools, and what is left of them."""

import psutil

from mrl.environments.base import Action
from mrl.environments.pool import EnvironmentPool

HERE = "tests.environments.own"
PATIENCE_S = 60.0  # for an answer on a busy machine


def pool(name=f"{HERE}:Does", kwargs=None, *, num_workers=1, time_limit_s=30.0, memory_limit_mb=1000, **more):
    return EnvironmentPool(
        name, kwargs or {}, num_workers=num_workers, time_limit_s=time_limit_s, memory_limit_mb=memory_limit_mb, **more
    )


def replies(pool, count):
    """So many replies, by episode."""
    found = {}
    while len(found) < count:
        came = pool.wait(PATIENCE_S)
        assert came, f"{count - len(found)} replies did not come"
        for reply in came:
            assert reply.episode not in found
            found[reply.episode] = reply
    return found


def said(reply):
    """The text of an observation."""
    assert reply.failure is None, reply.failure
    return [message["content"] for message in reply.observation.messages]


def step(pool, episode, text):
    """The reply to a text, of the one episode that is waited for."""
    pool.send(episode, Action(text))
    return replies(pool, 1)[episode]


def descendants():
    """Ids of all processes that descend from this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}
