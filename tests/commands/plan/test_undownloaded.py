"""Planning before a model is downloaded: the hub's config.json without weights, or a preset of the same name."""

import json

import pytest
from huggingface_hub import constants

from mrl.commands.cli import main
from mrl.commands.plan.undownloaded import with_shapes
from mrl.config.config import load
from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.trainer.run_plan import check_run, resolve
from tests.checkpoint.formats.test_hf import write_folder
from tests.checkpoint.formats.test_hub import NAME, fill
from tests.data.folders import byte_bpe_folder

CONFIG = """
model: {path: MODEL}
rollout: {prompt_length: 64, response_length: 64}
train: {num_steps: 4}
data: {task: addition}
reward: {functions: [{name: exact_match}]}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Cache of the hub's client, which reaches no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def config_of(tmp_path, name):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.replace("MODEL", name))
    return path


@pytest.mark.parametrize("command", [["plan", "--world-size", "1"], ["train", "--dry-run", "--world-size", "1"]])
def test_config_and_tokenizer_without_weights_are_enough(command, cache, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    write_folder(arch_from_preset("qwen2_tiny", {"num_hidden_layers": 3}, 320), model)
    fill(cache, byte_bpe_folder(model), without=("model.safetensors",))
    assert main([command[0], str(config_of(tmp_path, NAME)), *command[1:]]) == 0
    assert "weights were not downloaded" in capsys.readouterr().out
    found = resolve(with_shapes(load(config_of(tmp_path, NAME)))[0], 1)
    assert (found.arch.num_layers, found.arch.vocab_size) == (3, 320)


def test_a_folder_without_weights_is_enough_with_stand_ins(tmp_path, capsys):
    write_folder(arch_from_preset("qwen2_tiny", {}, 320), byte_bpe_folder(tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()
    words = ["train", str(config_of(tmp_path, str(tmp_path / "model"))), "--dry-run", "--world-size", "1"]
    assert main(words) != 0
    assert "model.safetensors" in capsys.readouterr().err
    assert main([*words, "--stand-ins"]) == 0
    assert f"model.path={tmp_path / 'model'} has no safetensors files" in capsys.readouterr().out


def test_without_the_hub_a_preset_of_the_same_name_has_the_shape(cache, tmp_path):
    changed, notes = with_shapes(load(config_of(tmp_path, "Qwen/Qwen3-8B")))
    assert (changed.model.path, changed.model.preset) == (None, "qwen3_8b")
    assert resolve(changed, 1).arch == arch_from_preset("qwen3_8b", {}, None)
    assert "qwen3_8b" in notes[0] and "tokenizer" in notes[1]


def with_rows(tmp_path, *rows):
    config, data = config_of(tmp_path, "Qwen/Qwen2.5-0.5B-Instruct"), tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = config.read_text().replace("num_steps: 4", "num_epochs: 2, batch_size: 2, num_steps: null")
    config.write_text(text.replace("data: {task: addition}", f"data: {{train_files: [{data}]}}"))
    return str(config)


ROWS = [{"prompt": [{"role": "user", "content": f"naïve {k} " * 40}], "answer": "1", "level": -k} for k in range(5)]
PREPARED = {"train": ["train", "--dry-run"], "plan": ["plan"], "rehearse": ["rehearse", "--dry-run"]}


@pytest.mark.parametrize("command", PREPARED.values(), ids=PREPARED)
def test_without_the_tokenizer_the_users_rows_are_read(command, cache, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_rows(tmp_path, *ROWS)
    first = [command[0], config, "--world-size", "1", *command[1:]]
    assert main([*first, "data.order_by=level"]) == 0
    assert "lengths in tokens are unknown" in capsys.readouterr().out
    (tmp_path / "order.py").write_text("def late(rows, rewards): return [1 / (1 - (r.mean or 0)) for r in rewards]\n")
    assert main([*first, "data.order_by=order.py:late"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    for wrong, said in (("data.order_by=levle", "did you mean 'level'"), ("data.answer_key=anwser", "'answer'")):
        assert main([*first, wrong]) == 2
        assert said in capsys.readouterr().err.replace("Did", "did")


def test_without_the_tokenizer_the_number_of_steps_is_that_of_the_users_rows(cache, tmp_path, capsys):
    config = load(with_rows(tmp_path, *ROWS))
    changed, _ = with_shapes(config)
    assert (changed.data.train_files, changed.data.task) == (config.data.train_files, None)
    found = check_run(changed, 1, tell=[].append)
    assert found.config.train.num_steps == 5  # 2 x 5 rows in batches of 2
    assert [prompt.answer for prompt in found.source.peek(5)] == ["1"] * 5
    assert main(["train", "--dry-run", with_rows(tmp_path, *ROWS), "data.train_max_samples=3"]) == 0
    assert "3 training rows" in capsys.readouterr().out


def test_without_hub_and_preset_the_error_names_both_ways_out(cache, tmp_path):
    with pytest.raises(UserError) as caught:
        with_shapes(load(config_of(tmp_path, "acme/mystery-9b")))
    assert "hf download acme/mystery-9b" in str(caught.value) and "model.preset=" in str(caught.value)


def test_a_config_without_hub_names_is_unchanged(tmp_path):
    config = load(config_of(tmp_path, str(tmp_path)))
    assert with_shapes(config) == (config, [])


def test_a_refused_run_still_says_that_its_shape_is_a_presets(cache, tmp_path, capsys):
    config = str(config_of(tmp_path, "Qwen/Qwen3-8B"))
    for command in (["plan", config], ["train", config, "--dry-run"]):
        assert main([*command, "--world-size", "3", "parallel.tensor_model_parallel_size=2"]) == 2
        error = capsys.readouterr().err
        assert "does not divide" in error and "preset qwen3_8b" in error
    assert main(["plan", config, "--world-size", "1"]) == 2
    error = capsys.readouterr().err
    assert "does not fit" in error and "preset qwen3_8b" in error


COMMANDS = {
    "plan": ["plan"],
    "dry run": ["train", "--dry-run"],
    "rehearse": ["rehearse", "--dry-run", "--output-dir", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(
    ("missing", "keys"),
    [
        (["model.path=/models/Qwen2.5-0.5B"], "model.path"),
        (["~data", "data.train_files=/data/train.jsonl"], "data.train_files"),
        (["~data", "data.train_files=openai/gsm8k"], "data.train_files"),
        (["algorithm.kl_in=loss", "reference.path=acme/mystery-9b"], "reference.path"),
    ],
)
def test_what_is_missing_here_is_named_alike_and_replaced_where_the_user_says_so(
    command, missing, keys, cache, tmp_path, capsys
):
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.replace("{path: MODEL}", "{preset: qwen2_tiny, tokenizer: 'char:0123456789<>+=#'}"))
    words = [command[0], str(config), *(word.replace("OUT", str(tmp_path / "out")) for word in command[1:])]
    missing = ["~model", *missing] if keys == "model.path" else missing
    words += ["--world-size", "1", *missing]
    assert main(words) == 2
    assert f"({keys}), add --stand-ins." in capsys.readouterr().err
    assert main([*words, "--stand-ins"]) == 0
    assert keys in capsys.readouterr().out


def test_a_training_takes_no_placeholders(tmp_path, capsys):
    assert main(["train", str(config_of(tmp_path, str(tmp_path))), "--stand-ins"]) == 2
    assert "Add --dry-run" in capsys.readouterr().err
