"""Environments of the tests."""

import os
import random
import socket
import time

from mrl.environments._factory import find_environment
from mrl.environments.base import Environment, Observation
from mrl.environments.toolbox import ToolEnvironment


class Adder(ToolEnvironment):
    """Adds with a tool, and rewards the right answer; `rest` says what else it does."""

    def __init__(self, rest="", says=""):
        self.rest, self.says, self.turn, self.numbers = rest, says, 0, []

    @property
    def tools(self):
        return [self.add]

    def add(self, a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b) + "." * 30

    def reset(self, seed, row):
        self.seed = seed
        return Observation.user(self.says) if self.says else Observation()

    def step(self, action):
        self.turn += 1
        if self.rest == "hangs" and "one" in action.text:
            time.sleep(60)
        if self.rest == "dies" and "one" in action.text:
            os._exit(3)
        if self.rest == "raises":
            raise ValueError("no more numbers")
        if self.rest == "silent":
            return Observation()
        if self.rest == "takes":
            self.numbers = bytearray(1 << 30)
        return super().step(action)

    def answered(self, action):
        return Observation(reward=float("4" in action.text), terminated=True, info={"seed": float(self.seed % 997)})


class Faulty(Environment):
    """Does wrong what its row says, in its second turn; or goes on for three."""

    def __init__(self, folder):
        self.folder, self.turn = folder, 0

    def reset(self, seed, row):
        self.fault = row["fault"]
        return Observation()

    def step(self, action):
        self.turn += 1
        if self.turn == 2:
            getattr(self, self.fault, lambda: None)()
        return Observation(reward=1.0, terminated=self.turn == 3) if self.turn == 3 else Observation.user("1")

    def hangs(self):
        time.sleep(600)

    def dies(self):
        os._exit(3)

    def shouts(self):
        raise ValueError("x" * (100 << 20))

    def forks(self):
        for _ in range(200):
            if os.fork() == 0:
                break
        time.sleep(600)

    def writes(self):
        with open(f"{self.folder}/outside", "w", encoding="utf-8") as file:
            file.write("x")

    def connects(self):
        socket.create_connection(("127.0.0.1", 9), timeout=1)


class Echo(Environment):
    """Says what was said, for eight turns; each answer takes up to `most_s`, by no seed."""

    def __init__(self, most_s=0.0):
        self.most_s, self.turn = most_s, 0

    def reset(self, seed, row):
        return Observation()

    def step(self, action):
        self.turn += 1
        time.sleep(random.SystemRandom().choice((0.0, 0.2, 1.0)) * self.most_s)
        if self.turn == 8:
            return Observation(reward=float(len(action.text) % 3), terminated=True)
        return Observation.user(f"<{action.text[:2]}>")


class Many(Environment):
    """One of several environments, which the row names; prompts offer the tools of all."""

    network = True  # one of them needs it

    def __init__(self, worlds):
        self.made = {name: find_environment(*given)[0]() for name, given in worlds.items()}
        self.one = None

    @property
    def tools(self):
        return [tool for world in self.made.values() for tool in getattr(world, "tools", ())]

    def reset(self, seed, row):
        self.one = self.made[row["world"]]
        return self.one.reset(seed, row)

    def step(self, action):
        return self.one.step(action)

    def close(self):
        self.one.close()
