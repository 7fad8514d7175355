"""What is on the cluster only is named, and something of the same kind takes its place."""

import pytest

from mrl.commands.cli import main
from mrl.commands.rehearse.placeholders import missing_paths, with_placeholders
from mrl.config.config import load
from mrl.errors import UserError
from mrl.trainer.run_plan import resolve
from tests.source import ROOT

CONFIG = ROOT / "configs" / "grpo_qwen3-8b_1x8_tp2.yaml"
ELSEWHERE = ("~model", "model.path=/models/Qwen3-8B", "~data", "data.train_files=train.jsonl")


def test_a_missing_model_becomes_its_preset_and_missing_data_become_sums():
    config = load(CONFIG, [*ELSEWHERE, "data.system_prompt=Think."])
    assert missing_paths(config) == {"model.path": "/models/Qwen3-8B", "data.train_files": "train.jsonl"}
    changed, told = with_placeholders(config)
    assert (changed.model.preset, changed.model.tokenizer, changed.data.task) == ("qwen3_8b", "bytes:", "addition")
    assert [line.split(" ")[0] for line in told] == ["model.path=/models/Qwen3-8B", "the", "data.train_files:"]
    found = resolve(changed, 8)
    assert found.arch.num_layers == 36 and found.arch.vocab_size == 151936


@pytest.mark.parametrize(
    ("folder", "preset"),
    [
        ("/m/Qwen2.5-0.5B-Instruct", "qwen2.5_0.5b"),
        ("Llama-3.1-70B-Instruct", "llama3.1_70b"),
        ("x/Qwen3-30B-A3B/", "qwen3_30b_a3b"),
    ],
)
def test_the_preset_is_found_by_the_folders_name(folder, preset):
    changed, _ = with_placeholders(load(CONFIG, ["~model", f"model.path={folder}"]))
    assert changed.model.preset == preset


def test_a_model_of_no_preset_is_refused_with_what_to_do():
    with pytest.raises(UserError, match="model.path=/models/Mystery-9B is missing, and no preset matches its name"):
        with_placeholders(load(CONFIG, ["~model", "model.path=/models/Mystery-9B"]))


def test_what_is_here_stays():
    config = load(CONFIG)
    assert with_placeholders(config) == (config, [])
    changed, told = with_placeholders(load(CONFIG, ["algorithm.kl_in=loss", "reference.path=/models/other"]))
    assert changed.reference.path is None and changed.model == config.model and len(told) == 1


def test_rewards_of_missing_data_do_not_end_a_dry_run(tmp_path, capsys):
    (tmp_path / "reward.py").write_text("def of_column(*, prompt, response, answer, extra): return extra['column']\n")
    functions = f"[{{name: by_data_source}}, {{name: {tmp_path}/reward.py:of_column}}, {{name: code}}]"
    words = [str(CONFIG), "--dry-run", "--stand-ins", *ELSEWHERE, f"reward.functions={functions}"]
    assert main(["train", *words, f"run.output_dir={tmp_path}/run"]) == 0
    changed, told = with_placeholders(load(CONFIG, [*ELSEWHERE, f"reward.functions={functions}"]))
    names = [one.name.rpartition(":")[2] for one in changed.reward.functions]
    assert names == ["exact_match", "of_column", "exact_match"] and "by_data_source" in told[-1]


def test_missing_held_out_data_alone_are_replaced_by_training_rows(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n')
    files = ["~data", f"data.train_files={rows}", "data.val_files=/data/val.jsonl"]
    changed, told = with_placeholders(load(CONFIG, files))
    assert (changed.data.train_files, changed.data.val_files) == ([str(rows)], [str(rows)])
    assert [line.split(" ")[0] for line in told] == ["data.val_files:"]
