"""The checks of `RolloutEngine.generate`, and engines that override it."""

import pytest

from mrl.config.config import RolloutConfig
from mrl.engines._null_engine import NullEngine
from mrl.engines.base import RolloutEngine, SamplingConfig
from mrl.types import Prompt, Rollout
from tests.engines.specs import spec_of
from tests.resharding.archs import small

PROMPTS = [Prompt(uid=0, prompt_ids=(1, 2), text="")]
SAMPLING = SamplingConfig(n=1, max_tokens=1)


class Echo(NullEngine):
    """Returns a token for each prompt."""

    generate = RolloutEngine.generate

    def _generate(self, prompts, sampling):
        return [Rollout(prompt, 0, [1], [0.0], "length", 0) for prompt in prompts]


class Reporting(Echo):
    """Reports its tokens itself."""

    def _generate(self, prompts, sampling):
        rollouts = super()._generate(prompts, sampling)
        for rollout in rollouts:
            self.on_sampled(1, [rollout.prompt.uid])
        return rollouts


class Own(NullEngine):
    """Overrides `generate`, without checks."""

    def generate(self, prompts, sampling):
        return list(prompts)


def engine_of(kind):
    return kind(spec_of(RolloutConfig(), small("qwen2_tiny")))


def test_generate_needs_complete_weights_and_a_waking_engine():
    engine = engine_of(Echo)
    with pytest.raises(RuntimeError, match="weight update incomplete"):
        engine.generate(PROMPTS, SAMPLING)
    engine._has_weights = True
    assert [rollout.prompt for rollout in engine.generate(PROMPTS, SAMPLING)] == PROMPTS
    assert engine.generate([], SAMPLING) == []
    for asleep in (True, {"weights"}):
        engine._asleep = asleep
        with pytest.raises(RuntimeError, match="sleeps"):
            engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize(("kind", "calls"), [(Echo, [(2, [0, 3])]), (Reporting, [(1, [0]), (1, [3])])])
def test_tokens_are_reported_once_also_by_an_engine_that_does_not_report_them(kind, calls):
    engine, heard = engine_of(kind), []
    engine._has_weights = True
    engine.on_sampled = lambda num_tokens, uids: heard.append((num_tokens, list(uids)))
    engine.generate([*PROMPTS, Prompt(uid=3, prompt_ids=(1,), text="")], SAMPLING)
    assert heard == calls


def test_an_engine_may_override_generate():
    assert engine_of(Own).generate(PROMPTS, SAMPLING) == PROMPTS


def test_an_engine_without_a_generation_says_so():
    engine = engine_of(type("Neither", (NullEngine,), {"generate": RolloutEngine.generate}))
    engine._has_weights = True
    with pytest.raises(NotImplementedError, match="Neither"):
        engine.generate(PROMPTS, SAMPLING)
