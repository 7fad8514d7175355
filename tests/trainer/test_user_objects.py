"""Names of the Python objects that a script passes, and the mistakes that are refused before anything starts."""

import functools
import operator
import sys
import types

import pytest

import mrl
from mrl.config import user_code
from mrl.config.config import RewardFunctionConfig
from mrl.trainer.user_objects import describe_objects, objects_notes, with_objects
from mrl.trainer.validation.parallel import build_parallel_layout
from mrl.trainer.validation.unused_settings import unused_setting_rules
from tests.source import ROOT


def score(*, prompt, response, answer, extra):
    return 1.0


class Game(mrl.Environment):
    def reset(self, seed, row):
        return mrl.Observation()

    def step(self, action):
        return mrl.Observation(terminated=True)


class Silent(mrl.Logger):
    def record(self, phase, step, metrics):
        pass


CONFIG = mrl.load_config(str(ROOT / "configs" / "quickstart.yaml"))
HERE = f"{ROOT}/tests/trainer/test_user_objects.py"


def test_an_object_of_a_module_has_a_path_that_loads_it():
    assert user_code.path_of(score) == f"{HERE}:score"
    assert user_code.load(f"{HERE}:score") is score
    assert user_code.path_of(functools.wraps) == f"{functools.__file__}:wraps"


@pytest.fixture
def main_function(monkeypatch):
    """A function of the script itself."""
    made = types.FunctionType(score.__code__, {}, "score", None, None)
    made.__module__, made.__qualname__ = "__main__", "score"
    monkeypatch.setattr(sys.modules["__main__"], "score", made, raising=False)
    return made


def test_what_only_this_process_has_gets_a_name_of_its_own(main_function):
    things = [main_function, lambda: 0, lambda: 1, functools.partial(score, prompt=""), Game(), operator.itemgetter(1)]
    assert [user_code.path_of(thing) for thing in things] == [None] * len(things)
    taken = {}
    for thing in things:
        taken[user_code.object_name(thing, taken)] = thing
    assert next(iter(taken)) == "python-object:__main__.score"
    assert [user_code.target_of(name) for name in taken][1:3] == ["lambda", "lambda"]
    assert user_code.object_name(main_function, taken) == next(iter(taken))
    with pytest.raises(mrl.UserError, match="python-object"):
        user_code.load(next(iter(taken)))
    with user_code.named_objects(taken):
        assert [user_code.load(name) for name in taken] == things


def test_a_config_with_objects_has_their_names_and_reads_back():
    later = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
    with with_objects(
        CONFIG, rewards=[score, {"name": later, "weight": 0.5}, "length"], environments=[Game], loggers=[Silent()]
    ) as config:
        names = [one.name for one in config.reward.functions]
        assert names == [f"{HERE}:score", "python-object:tests.trainer.test_user_objects.lambda", "length"]
        assert config.reward.functions[1].weight == 0.5
        assert config.rollout.agent.environment == f"{HERE}:Game" and config.rollout.multi_turn.enable
        assert [one["key"] for one in describe_objects(config)] == [
            "reward.functions[*].name", "observe.loggers[*].name",
        ]  # fmt: skip
        assert "lambda" in objects_notes(config)[0]
    assert objects_notes(CONFIG) == describe_objects(CONFIG) == []


def test_an_environment_brings_its_reward_only_where_none_was_chosen():
    plain = mrl.load_config({"data": {"task": "addition"}})
    with with_objects(plain, environments=[Game]) as config:
        assert config.reward.functions == [RewardFunctionConfig("environment")]
    with with_objects(plain, environments=[Game], rewards=["length"]) as config:
        assert [one.name for one in config.reward.functions] == ["length"]


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"rewards": [3]}, "rewards"),
        ({"rewards": score}, "expected a list"),
        ({"rewards": [{"weight": 2}]}, "'name'"),
        ({"rewards": [{"name": score, "wieght": 2}]}, "weight"),
        ({"environments": [Game, Game]}, "one environment"),
        ({"environments": [Game()]}, "environments"),
        ({"environments": [{"name": Game, "weight": 1}]}, "weight"),
        ({"algorithm": score}, "mrl.Algorithm"),
        ({"callbacks": [Game]}, "mrl.Callback"),
        ({"loggers": [Game()]}, "mrl.Logger"),
    ],
)
def test_an_object_of_another_kind_is_refused(given, word):
    with pytest.raises(mrl.UserError, match=word), with_objects(CONFIG, **given):
        pass


@pytest.mark.parametrize("key", ["reward.time_limit_s=3", "reward.num_workers=2", "rollout.agent.num_workers=2"])
def test_a_limit_that_no_worker_would_keep_is_refused(key):
    config = mrl.load_config(str(ROOT / "configs" / "quickstart.yaml"), [key])
    given = {"rewards": [lambda completions, **rest: []], "environments": [lambda: Game()]}
    with with_objects(config, **given) as complete:
        rules = [*unused_setting_rules(complete, build_parallel_layout(complete, 1))]
    assert any(key.partition("=")[0] in rule for rule in rules)
    with with_objects(config, rewards=[score], environments=[Game]) as complete:
        rules = [*unused_setting_rules(complete, build_parallel_layout(complete, 1))]
    assert not any(key.partition("=")[0] in rule for rule in rules)


@pytest.mark.parametrize(
    ("section", "word"),
    [
        ({"reward": {"functions": [{"name": score}]}}, r"reward\.functions\[0\]\.name.*rewards="),
        ({"rollout": {"agent": {"environment": Game}}}, "environments="),
        ({"algorithm": {"name": mrl.Algorithm}}, "algorithm="),
        ({"observe": {"loggers": [{"name": Silent}]}}, "loggers="),
        ({"data": {"task": score}}, "path/to/file.py:score"),
    ],
)
def test_a_callable_in_a_config_says_where_it_goes(section, word):
    with pytest.raises(mrl.UserError, match=word):
        mrl.load_config(section)
