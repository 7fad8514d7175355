"""Rules about episodes."""

from dataclasses import replace

import pytest

from mrl.config.config import RewardConfig, RewardFunctionConfig
from mrl.trainer.validation.episodes import episode_rules
from tests.trainer.validation.runs import make

ON = ("rollout.multi_turn.enable=true", "rollout.agent.environment=guess")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("rollout.multi_turn.enable=true",), "needs rollout.agent.environment"),
        ((*ON, "rollout.multi_turn.format=hermess"), "format=hermess is unknown"),
        ((*ON, "rollout.enable_rollout_routing_replay=true"), "a later turn prefills the conversation again"),
        ((*ON, "rollout.ignore_eos=true"), "no turn would end"),
        (
            (*ON, "rollout.enable_chunked_prefill=false", "rollout.max_num_batched_tokens=12"),
            "a later turn prefills the complete conversation",
        ),
        (("rollout.multi_turn.max_user_turns=3",), "rollout.multi_turn.max_user_turns is set, but would have no"),
        ((*ON, "algorithm.credit=turn"), "algorithm.credit=turn would have no effect because reward.functions has no"),
        (("algorithm.credit=turn",), "algorithm.credit=turn is set, but would have no effect"),
        (("rollout.agent.environment=guess",), "rollout.agent.environment is set, but would have no effect"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given, said):
    (message,) = episode_rules(make(*given))
    assert said in message


def rewarded(config):
    return replace(config, reward=RewardConfig(functions=[RewardFunctionConfig(name="environment")]))


def test_episodes_and_their_reward_are_taken():
    assert list(episode_rules(rewarded(make(*ON)))) == []
    (message,) = episode_rules(rewarded(make()))
    assert "there is no environment because" in message
