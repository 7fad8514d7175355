"""Every path of a config has its home folder and its variables written out; no folder is ever called `~`."""

import pytest

from mrl.commands.cli import main
from mrl.config.config import Config, load
from mrl.config.keys import dotted_keys
from mrl.config.paths import path_keys
from mrl.errors import UserError

NO_PATHS = {
    "actor.lora.target_modules": "the end of a module's name",
    "actor.lora.exclude_modules": "the end of a module's name",
    "critic.lora.target_modules": "the end of a module's name",
    "critic.lora.exclude_modules": "the end of a module's name",
    "model.preset": "a name in mrl/models/presets.py",
    "rollout.multi_turn.format": "a name in mrl/environments/formats/",
    "rollout.stop": "texts that end a response",
    "data.prompt_key": "a column",
    "data.answer_key": "a column",
    "data.response_key": "a column",
    "data.messages_key": "a column",
    "data.chosen_key": "a column",
    "data.rejected_key": "a column",
    "data.source_key": "a column",
    "data.system_prompt": "a text",
    "checkpoint.best_metric": "a metric",
    "train.early_stopping.metric": "a metric",
    "observe.wandb_project": "a project",
    "observe.wandb_name": "a name",
    "observe.wandb_group": "a name",
    "observe.wandb_tags": "words",
    "distillation.teacher_key": "a column",
    **dict.fromkeys(
        (
            "algorithm.rollout_correction.preset",
            "algorithm.rollout_correction.rollout_is_threshold",
            "algorithm.rollout_correction.rollout_rs",
            "algorithm.rollout_correction.rollout_rs_threshold",
        ),
        "a name, or numbers",
    ),
}
"""Texts of the config that are no path."""

LOGGERS = "observe.loggers=[{name: wandb}]"
CALLBACKS = "observe.callbacks=[{name: own.Mine}]"
TEACHERS = "distillation.teacher_models=[{key: one}]"
PATHS = sorted(path_keys(Config))
CODE = {
    "reward.functions.name",
    "rollout.name",
    "rollout.agent.environment",
    "algorithm.name",
    "data.task",
    "data.order_by",
}
CODE |= {"observe.loggers.name", "observe.callbacks.name"}
"""Names in mrl, or files of code."""


def value_of(config: Config, key: str):
    found = config
    for part in key.split("."):
        found = getattr(found[0] if isinstance(found, list) else found, part)
    return found[0] if isinstance(found, list) else found


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "work" / "config.yaml"
    path.write_text("{}")
    return path


def override(key: str, text: str) -> str:
    for entries in ("functions", "teacher_models", "loggers", "callbacks"):
        key = key.replace(f"{entries}.", f"{entries}[0].")
    return f"{key}={text}"


def test_every_text_of_the_config_is_a_path_or_said_to_be_none():
    texts = {key for key, kind in dotted_keys(Config).items() if "str" in str(kind) and "dict" not in str(kind)}
    assert {key for key in texts if "Literal" not in str(dotted_keys(Config)[key])} - set(PATHS) == set(NO_PATHS)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("~/a/b", "{home}/a/b"),
        ("$HOME/a", "{home}/a"),
        ("${HOME}/a", "{home}/a"),
        ("$SCRATCH/${SCRATCH}/a", "/scratch/me//scratch/me/a"),
        ("a/b.c", "a/b.c"),
    ],
)
def test_home_and_variables_are_written_out(file, text, meant):
    config = load(file, [TEACHERS, *(override(key, text) for key in PATHS if key not in CODE)])
    for key in set(PATHS) - CODE:
        assert value_of(config, key) == meant.format(home=file.parents[1] / "home"), key


WRONG = (
    ("$NOWHERE/a", r"uses the variable \$NOWHERE, which is not set"),
    ("~nobody-of-this-name/a", "names a home folder that does not exist"),
    ("a/~/b", "has a '~' in the middle"),
    ("a" * 300, "more than a file system allows"),
    ("a/" * 3000, "more than a file system allows"),
    ("' '", "the path is empty"),
)


@pytest.mark.parametrize("number", range(max(len(PATHS), len(WRONG))))
def test_what_is_no_path_is_refused(file, number):
    key, (text, said) = PATHS[number % len(PATHS)], WRONG[number % len(WRONG)]
    with pytest.raises(UserError, match=said) as error:
        load(file, [TEACHERS, LOGGERS, CALLBACKS, override(key, text)])
    assert override(key, "").rstrip("=") in str(error.value)


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket/${run.seed}", "$STORE/run", "file:///tmp/run"])
def test_a_run_folder_in_object_storage_is_refused(file, monkeypatch, capsys, address):
    monkeypatch.setenv("STORE", "abfss://container@account")
    with pytest.raises(UserError, match="rclone") as error:
        load(file, [f"run.output_dir={address}"])
    assert "run.output_dir" in str(error.value) and address.replace("$STORE", "abfss://")[:5] in str(error.value)
    with pytest.raises(SystemExit):
        main(["rehearse", str(file), "--output-dir", address, "--dry-run"])
    assert "rclone" in capsys.readouterr().err
    assert [path.name for path in file.parent.iterdir()] == ["config.yaml"]


def test_a_reference_to_another_key_and_characters_of_a_tokenizer_stay(file):
    config = load(file, ["run.output_dir=runs/${run.seed}", "run.seed=7", "model.tokenizer='char:~$ab'"])
    assert config.run.output_dir == "runs/7" and config.model.tokenizer == "char:~$ab"


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/", "the root of the file system"),
        ("//", "the root of the file system"),
        ("~/", "home folder"),
        ("$HOME/..", "home folder"),
        (".", "contains 'config.yaml' of something else"),
        ("config.yaml", "which is a file"),
        ("''", "empty"),
    ],
)
def test_a_run_does_not_write_where_other_things_are(file, capsys, folder, said):
    (file.parents[1] / "home").mkdir()
    words = (
        "model.preset=qwen2_tiny",
        "model.tokenizer='char:0123456789<>+#'",
        "data.task=addition",
        "train.num_steps=1",
    )
    more = ("rollout.prompt_length=16", "rollout.response_length=4")
    assert main(["train", str(file), *words, *more, f"run.output_dir={folder}", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert said in told and "run.output_dir" in told
    assert not (file.parent / "~").exists()


@pytest.mark.parametrize("words", [["plan", "--hardware=~/h.yaml"], ["rehearse", "--output-dir=~/out", "--dry-run"]])
def test_options_that_are_paths_are_written_out_too(file, capsys, words):
    home = file.parents[1] / "home"
    home.mkdir()
    (home / "h.yaml").write_text("base: h200\n")
    text = "{preset: qwen2_tiny, tokenizer: 'char:0123456789<>+#'}"
    steps = "train: {num_steps: 1}\nrollout: {prompt_length: 16, response_length: 4}"
    (home / "run.yaml").write_text(f"model: {text}\ndata: {{task: addition}}\n{steps}\n")
    assert main([words[0], "~/run.yaml", *words[1:]]) == 0, capsys.readouterr().err
    assert (home / "out").is_dir() == ("--dry-run" in words) and not (file.parent / "~").exists()
