"""verl's rewards: functions of lists, and reward models."""

import pytest
import yaml

from mrl.from_verl.line import read
from mrl.from_verl.translate import translate


@pytest.mark.parametrize(
    ("line", "section"),
    [
        ("reward.reward_model.enable=True reward.reward_model.model_path=rm", {"path": "rm", "retokenize": True}),
        ("reward_model.enable=True reward_model.model.path=rm", {"path": "rm", "retokenize": True}),
        (
            "reward_model.enable=True reward_model.model.path=rm reward_model.model.input_tokenizer=null",
            {"path": "rm", "retokenize": False},
        ),
        ("reward.reward_model.model_path=rm", None),
    ],
)
def test_a_reward_model_takes_the_place_of_functions(line, section):
    found = translate(read(["python3", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", *line.split()]))
    reward = yaml.safe_load(found.text)["reward"]
    assert reward == ({"functions": [{"name": "math"}]} if section is None else {"functions": [], "model": section})
    assert bool([one for one in found.missing if "custom_reward_function" in one]) == (section is None)


def test_a_reward_model_that_a_function_asks_is_told():
    line = "reward.reward_model.enable=True reward.reward_model.model_path=rm custom_reward_function.path=r.py"
    found = translate(read(["python3", "-m", "verl.trainer.main_ppo", *line.split()]))
    assert yaml.safe_load(found.text)["reward"] == {"functions": [{"name": "r.py:compute_score"}]}
    assert [one for one in found.missing if one.startswith("reward.reward_model.enable=True: the function there asks")]


@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward.reward_manager.name"])
def test_a_function_of_the_batch_manager_gets_all_samples(key):
    given = read(["python3", "-m", "verl.trainer.main_ppo", "custom_reward_function.path=r.py", f"{key}=batch"])
    found = yaml.safe_load(translate(given).text)["reward"]
    assert found == {"functions": [{"name": "r.py:compute_score", "batch": "replica"}]}
