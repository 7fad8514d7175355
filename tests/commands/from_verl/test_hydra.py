"""Hydra's options and config files: read where they are, refused by name where they are not; no key is dropped."""

import pytest
import yaml

from mrl.commands.cli import main
from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.translate import translate
from mrl.config.config import load
from mrl.errors import UserError

MULTI_TURN = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  train_batch_size: 256
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 5
"""
TRAINER = "python3 -m verl.trainer.main_ppo"
TURNS = "actor_rollout_ref.rollout.multi_turn."


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    """A repository with a config file and a folder of scripts; the working folder is another one."""
    (tmp_path / "repo" / "examples" / "multiturn" / "config").mkdir(parents=True)
    (tmp_path / "repo" / "examples" / "multiturn" / "config" / "multi.yaml").write_text(MULTI_TURN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "repo"


@pytest.mark.parametrize(
    "options",
    [
        '--config-path="$PROJECT/examples/multiturn/config" --config-name=multi',
        "--config-path $(pwd)/examples/multiturn/config --config-name multi.yaml",
        "-cp=examples/multiturn/config -cn=multi",
        "--config-name='multi' --config-path='examples/multiturn/config'",
        '--config-path="$(cd "$(dirname "$0")" && pwd)/config" --config-name=multi',
        '--config-path "${BASH_SOURCE%/*}/config" -cn multi',
        "--config-dir=$REPO/examples/multiturn/config --config-name=multi",
    ],
)
def test_a_config_file_is_read_where_the_script_names_it(options, repository, monkeypatch):
    monkeypatch.setenv("REPO", str(repository))
    script = repository / "examples" / "multiturn" / "run.sh"
    script.write_text(
        f'set -x\nPROJECT="$(pwd)"\n{TRAINER} {options} algorithm.adv_estimator=grpo '
        f"{TURNS}tool_config_path=tools.yaml data.train_batch_size=128\n"
    )
    given = read_settings([str(script)])
    assert (given[f"{TURNS}enable"], given[f"{TURNS}max_assistant_turns"]) == (True, 5)
    assert (given["data.max_prompt_length"], given["data.train_batch_size"]) == (1024, 128)
    config = load(yaml.safe_load(translate(given).text))
    assert config.rollout.multi_turn.enable and config.rollout.agent.environment == "verl_tools"
    assert config.rollout.agent.environment_kwargs == {"tool_config_path": "tools.yaml"}


def test_a_config_file_that_is_not_there_is_refused_with_its_name_and_what_to_give(repository):
    words = [*TRAINER.split(), "--config-name=multi", "algorithm.adv_estimator=grpo"]
    with pytest.raises(UserError, match=r"multi\.yaml.*--config-dir=FOLDER"):
        read_settings(words)
    folder = repository / "examples" / "multiturn" / "config"
    for option in ([f"--config-dir={folder}"], ["--config-dir", str(folder)]):
        assert (
            read_settings([*option, *words])[f"{TURNS}enable"]
            is read_settings([*words, *option])[f"{TURNS}enable"]
            is True
        )
    with pytest.raises(UserError, match="--config-dir=nowhere is not a folder"):
        read_settings([*words, "--config-dir=nowhere"])


@pytest.mark.parametrize(
    ("options", "megatron"),
    [
        ("--config-name=ppo_trainer", False),
        ("--config-path=config --config-name=ppo_megatron_trainer.yaml", True),
        ("--config-path ./config --config-name ppo_megatron_trainer", True),
        ("-cp config -cn ppo_trainer --cfg job hydra.run.dir=x", False),
        ("model_engine=megatron", True),
        ("actor@actor_rollout_ref.actor=megatron_actor", True),
    ],
)
def test_files_of_verls_own_are_its_defaults(options, megatron):
    given = read_settings([*TRAINER.split(), *options.split(), "algorithm.adv_estimator=grpo"])
    assert ("megatron" in str(given.get("model_engine"))) is megatron and given.notes == []


def test_a_defaults_list_is_composed_in_its_order(tmp_path):
    files = {
        "base.yaml": "data: {train_batch_size: 1, seed: 1}\ntrainer: {nnodes: 1}\n",
        "mine/tuned.yaml": "lr: 1e-5\nweight_decay: 0.5\n",
        "main.yaml": (
            "defaults:\n  - ppo_trainer\n  - base\n  - mine@actor_rollout_ref.actor.optim: tuned\n  - _self_\n"
            "  - actor@actor_rollout_ref.actor: dp_actor\n  - optional local: none\n  - override /hydra/job: x\n"
            "data: {train_batch_size: 2, train_files: '???'}\nmodel_name: tiny\nhome: ${oc.env:HOME_OF_TEST,there}\n"
            "actor_rollout_ref: {model: {path: '${home}/${model_name}'}, rollout: {n: '${data.train_batch_size}'}}\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / "repo" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "repo" / name).write_text(text)
    given = read_settings([str(tmp_path / "repo" / "main.yaml"), "algorithm.adv_estimator=grpo", "~trainer.nnodes"])
    assert (given["data.train_batch_size"], given["data.seed"]) == (2, 1) and "trainer.nnodes" not in given
    assert given["actor_rollout_ref.actor.optim.weight_decay"] == 0.5
    assert (given["actor_rollout_ref.model.path"], given["actor_rollout_ref.rollout.n"]) == ("there/tiny", 2)
    assert "data.train_files" not in given


@pytest.mark.parametrize(
    ("listed", "said"),
    [("- lost", r"lost\.yaml"), ("- group: lost", r"group/lost\.yaml"), ("- main", "form a cycle")],
)
def test_a_defaults_list_that_cannot_be_followed_is_refused(listed, said, tmp_path):
    (tmp_path / "main.yaml").write_text(f"defaults:\n  {listed}\ndata: {{seed: 1}}\n")
    with pytest.raises(UserError, match=said):
        read_settings([str(tmp_path / "main.yaml")])


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--multirun", "several runs"),
        ("-m", "several runs"),
        ("--config-name", "has no value"),
        ("--force", "is not a setting"),
        ("novalue", "is not a setting"),
    ],
)
def test_a_word_that_is_no_setting_is_refused(word, said):
    with pytest.raises(UserError, match=said):
        read_settings([*TRAINER.split(), "algorithm.adv_estimator=grpo", word])


def test_words_without_a_meaning_and_groups_that_are_not_read_are_told():
    given = read_settings([*TRAINER.split(), "algorithm.adv_estimator=grpo", " ", "\\", "own/group=x", "~data.nothing"])
    found = translate(given)
    assert len(given.notes) == len(given.asides) == 2 and {*given.notes, *given.asides} <= set(found.missing)
    assert found.lost == given.notes and "own/group=x" in "\n".join(found.lost)


def test_every_key_of_a_conversation_is_translated_or_listed():
    names = (
        "tool_config_path",
        "interaction_config_path",
        "max_assistant_turns",
        "max_user_turns",
        "format",
        "max_turns",
    )
    values = ("tools.yaml", "talk.yaml", 5, 4, "llama3_json", 3)
    given = {f"{TURNS}{name}": value for name, value in zip(names, values, strict=True)}
    for enable in (True, False):
        found = translate({"algorithm.adv_estimator": "grpo", f"{TURNS}enable": enable, **given})
        said = "\n".join(found.missing)
        section = yaml.safe_load(found.text)["rollout"].get("multi_turn", {})
        assert f"{TURNS}interaction_config_path" in said
        if enable:
            assert section == {"enable": True, "max_assistant_turns": 5, "max_user_turns": 4, "format": "llama3_json"}
        else:
            assert section == {} and all(f"{TURNS}{name}" in said for name in names[:5])


def test_a_kl_that_nothing_reads_is_told():
    coefficient = "algorithm.kl_ctrl.kl_coef"
    for others in ({}, {"actor_rollout_ref.actor.use_kl_loss": True}):
        found = translate({"algorithm.adv_estimator": "grpo", coefficient: 0.01, **others})
        assert [one for one in found.missing if one.startswith(f"{coefficient}=0.01") and "use_kl_in_reward" in one]
    read_ = translate({"algorithm.adv_estimator": "gae", coefficient: 0.01, "algorithm.use_kl_in_reward": True})
    assert yaml.safe_load(read_.text)["algorithm"]["kl_coef"] == 0.01 and coefficient not in "\n".join(read_.missing)
    lost = translate({"algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": True})
    assert "kl_in" not in lost.text and [one for one in lost.missing if "use_kl_in_reward" in one]


@pytest.mark.parametrize("others", [{}, {"actor_rollout_ref.actor.use_kl_loss": True}])
@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk"])
def test_the_settings_of_a_refused_kl_in_the_reward_are_not_listed_as_unread(estimator, others):
    coefficients = {"algorithm.kl_ctrl.kl_coef": 0.01, "algorithm.kl_penalty": "mse"}
    found = translate(
        {"algorithm.adv_estimator": estimator, "algorithm.use_kl_in_reward": True, **coefficients, **others}
    )
    listed = [line.partition("=")[0] for line in (*found.missing, *found.moot)]
    assert "algorithm.use_kl_in_reward" in listed and not set(coefficients) & set(listed)


def test_the_command_line_takes_the_folder_before_and_behind_the_words(repository, capsys):
    folder = str(repository / "examples" / "multiturn" / "config")
    words = [*TRAINER.split(), "--config-name=multi", "algorithm.adv_estimator=grpo"]
    for line in (["--config-dir", folder, *words], [*words, "--config-dir", folder]):
        assert main(["from-verl", "--lossy", *line]) == 0  # it has no tools
        assert yaml.safe_load(capsys.readouterr().out)["rollout"]["multi_turn"]["enable"] is True
