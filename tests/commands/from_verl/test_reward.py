"""verl's rewards: functions of lists, and reward models."""

import pytest
import yaml

from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.translate import translate


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
    found = translate(
        read_settings(["python3", "-m", "verl.trainer.main_ppo", "algorithm.adv_estimator=grpo", *line.split()])
    )
    reward = yaml.safe_load(found.text)["reward"]
    assert reward == (
        {"functions": [{"name": "by_data_source"}]} if section is None else {"functions": [], "model": section}
    )
    assert bool([one for one in found.moot if "custom_reward_function" in one]) == (section is None)


def test_a_reward_model_that_a_function_asks_is_told():
    line = "reward.reward_model.enable=True reward.reward_model.model_path=rm custom_reward_function.path=r.py"
    found = translate(read_settings(["python3", "-m", "verl.trainer.main_ppo", *line.split()]))
    assert yaml.safe_load(found.text)["reward"] == {"functions": [{"name": "r.py:compute_score"}]}
    assert [one for one in found.missing if one.startswith("reward.reward_model.enable=True: verl's function queries")]


@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward.reward_manager.name"])
def test_a_function_of_the_batch_manager_gets_all_samples(key):
    given = read_settings(
        ["python3", "-m", "verl.trainer.main_ppo", "custom_reward_function.path=r.py", f"{key}=batch"]
    )
    found = yaml.safe_load(translate(given).text)["reward"]
    assert found == {"functions": [{"name": "r.py:compute_score", "batch": "replica"}]}


DAPO = "python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo data.train_files=a.parquet "
PENALTY = "".join(
    f" +reward_model.reward_kwargs.overlong_buffer_cfg.{one}" for one in ("enable=True", "len=4", "penalty_factor=1.0")
)
FILTER = " algorithm.filter_groups.enable=True algorithm.filter_groups.metric="


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("reward_model.reward_manager=dapo", "by_data_source"),
        ("reward.reward_manager.name=prime data.reward_fn_key=source", "by_data_source"),
        ("reward_model.reward_manager=dapo custom_reward_function.path=r.py", "r.py:compute_score"),
    ],
)
def test_without_a_function_the_data_source_selects_one_as_in_verl(words, name):
    found = translate(read_settings((DAPO + words).split()))
    assert [one["name"] for one in yaml.safe_load(found.text)["reward"]["functions"]] == [name]
    assert bool([one for one in found.moot if "by_data_source" in one]) == (name == "by_data_source")
    assert not found.lost


@pytest.mark.parametrize(
    ("words", "is_listed"),
    [
        (f"{FILTER}acc{PENALTY}", False),
        (f"{FILTER}score{PENALTY}", False),
        (f"{FILTER}seq_reward{PENALTY}", True),
        (f"{FILTER}seq_final_reward{PENALTY}", True),
        (f"{FILTER}seq_reward", False),
        (f"{FILTER}acc custom_reward_function.path=r.py", True),
        (f"{FILTER}answer_len custom_reward_function.path=r.py", True),
        ("algorithm.filter_groups.metric=seq_reward" + PENALTY, False),
    ],
)
def test_a_metric_that_drops_other_groups_than_mrl_is_listed_as_a_difference(words, is_listed):
    found = translate(read_settings((DAPO + words).split()))
    key = "algorithm.filter_groups.metric"
    assert [bool([one for one in lines if one.startswith(key)]) for lines in (found.differs, found.moot)] == [
        is_listed, not is_listed,
    ]  # fmt: skip
    assert not [one for one in found.missing if one.startswith(key)]


@pytest.mark.parametrize("key", ["reward_model.reward_manager", "reward.reward_manager.name"])
def test_a_reward_manager_that_mrl_does_not_have_is_listed(key):
    for name, is_known in (("naive", True), ("dapo", True), ("batch", True), ("prime", True), ("mine", False)):
        found = translate(read_settings([*DAPO.split(), f"{key}={name}"]))
        listed = [bool([one for one in lines if one.startswith(key)]) for lines in (found.missing, found.moot)]
        assert listed == [not is_known, is_known], name
    found = translate(read_settings([*DAPO.split(), "reward.reward_manager.module.path=mine.py"]))
    assert [one for one in found.missing if one.startswith("reward.reward_manager.module.path=mine.py")]


@pytest.mark.parametrize("section", ["reward_model", "reward"])
def test_a_sandbox_service_is_lost_only_for_a_function_that_may_call_it(section):
    url = [*DAPO.split(), f"{section}.sandbox_fusion.url=http://host:8080"]
    assert not translate(read_settings(url)).lost
    assert len(translate(read_settings([*url, "custom_reward_function.path=r.py"])).lost) == 1
