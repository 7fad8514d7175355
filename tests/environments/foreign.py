"""Environments as other libraries write them, without a word of mrl."""

import dataclasses


class Counter:
    """TRL: public methods are tools, `get_reward` scores."""

    def reset(self, prompt, goal, **kwargs):
        self.goal, self.count = goal, 0
        return f"Count to {goal}."

    def add(self, by: int) -> int:
        """Adds to the count.

        Args:
            by: How much.
        """
        self.count += by
        return self.count

    def _hidden(self):
        return None

    async def get_reward(self):
        return float(self.count == self.goal)


class Walk:
    """Gymnasium: five values."""

    def __init__(self, length=3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.place = 0
        return f"start {seed} {options['name']}", {"place": 0}

    def step(self, action):
        self.place += len(action)
        over = self.place > 2 * self.length
        return {"place": self.place}, -1.0, self.place >= self.length, over, {"place": self.place, "odd": object()}


@dataclasses.dataclass
class EchoAction:
    message: str
    loud: bool = False


@dataclasses.dataclass
class EchoObservation:
    message: str
    reward: float = 0.0
    done: bool = False


@dataclasses.dataclass
class StepResult:
    observation: EchoObservation
    reward: float | None = None
    done: bool = False


class Echo:
    """OpenEnv's clients: a result with an observation."""

    async def reset(self, seed=None):
        return StepResult(EchoObservation("ready"))

    async def step(self, action: EchoAction):
        assert isinstance(action, EchoAction)
        return StepResult(EchoObservation(f"echo {action.message}"), reward=0.5, done=action.message == "end")


class BaseTool:
    """The interface of verl's tools, as its documentation has it."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self.name = tool_schema.function.name
        self.found = {}

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs):
        self.found["one"] = kwargs["ground_truth"]
        return "one", None

    async def execute(self, instance_id, parameters, **kwargs):
        right = parameters["answer"] == self.found[instance_id]
        return f"{self.config['says']} {right}", 0.25 if right else -0.05, {"right": right}

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0

    async def release(self, instance_id, **kwargs):
        del self.found[instance_id]


class Neither:
    def play(self):
        """Plays."""
