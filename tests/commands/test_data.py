"""`mrl data`: files in mrl's format from raw files, with disjoint sides, and config lines that load."""

import json

import pytest
import yaml

from mrl.commands import cli
from mrl.config.config import load
from mrl.data.public_sets.base import all_sets
from mrl.trainer.run_plan import check_run
from mrl.trainer.validation.data import data_rules
from tests.data import public_rows
from tests.data.folders import byte_bpe_folder
from tests.data.test_hub_files import fill
from tests.data.test_public_sets import write


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*words, status=0):
    assert cli.main(["data", *map(str, words)]) == status


def test_sides_are_written_without_repeated_and_held_out_prompts(folder, capsys):
    train = [public_rows.gsm8k(number) for number in (1, 2, 3, 2, 4)]
    train[3] = train[3] | {"question": train[3]["question"].replace(" ", "  ")}
    write(folder / "a.jsonl", [*train, {"question": "?", "answer": "none"}])
    write(folder / "b.parquet", [public_rows.gsm8k(number) for number in (4, 5, 4)])
    run("gsm8k", "--train", "a.jsonl", "--val", "b.parquet")
    said = capsys.readouterr()
    written = {side: rows(folder / "data" / "gsm8k" / f"{side}.jsonl") for side in ("train", "val")}
    assert [row["answer"] for row in written["train"]] == ["1001", "1002", "1003"]
    assert [row["answer"] for row in written["val"]] == ["1004", "1005"]
    assert all(f"1 left out: {why}" in said.err for why in ("equal to an earlier prompt", "a held-out prompt"))
    assert "train.jsonl: 3 rows" in said.err and "val.jsonl: 2 rows" in said.err


@pytest.mark.parametrize(("name", "make"), {case[0]: case[:2] for case in public_rows.CASES}.values())
def test_the_config_lines_load_and_name_the_files(name, make, folder, capsys):
    write(folder / "a.jsonl", [make(number) for number in range(10)])
    sides = ["--val", "a.jsonl"] if not all_sets()[name].train else ["--train", "a.jsonl"]
    run(name, *sides, "-o", "out")
    lines = yaml.safe_load(capsys.readouterr().out)
    config = load({"model": {"preset": "qwen2_tiny"}, **lines})
    broken = (
        [] if config.data.train_files else ["The config has no training prompts. Set data.train_files, or data.task."]
    )
    assert list(data_rules(config)) == broken
    assert config.reward.functions[0].name == all_sets()[name].reward["name"]


def test_rows_at_the_end_are_held_out_where_the_set_has_no_such_files(folder):
    write(folder / "a.jsonl", [public_rows.countdown(number) for number in range(1, 41)])
    run("countdown", "--train", "a.jsonl", "-o", "out", "--max-train", 5)
    targets = {
        side: [json.loads(row["answer"])["target"] for row in rows(folder / "out" / f"{side}.jsonl")]
        for side in ("train", "val")
    }
    assert targets == {"train": list(range(55, 60)), "val": list(range(91, 95))}


def test_other_content_is_replaced_only_by_force(folder, capsys):
    write(folder / "a.jsonl", [public_rows.gsm8k(1)])
    write(folder / "b.jsonl", [public_rows.gsm8k(2)])
    for _ in range(2):
        run("gsm8k", "--train", "a.jsonl", "--out", "out")
    run("gsm8k", "--train", "b.jsonl", "--out", "out", status=2)
    assert "--force" in capsys.readouterr().err
    assert [row["answer"] for row in rows(folder / "out" / "train.jsonl")] == ["1001"]
    run("gsm8k", "--train", "b.jsonl", "--out", "out", "--force")
    assert [row["answer"] for row in rows(folder / "out" / "train.jsonl")] == ["1002"]
    assert [path.name for path in (folder / "out").iterdir()] == ["train.jsonl"]


def test_the_prompts_of_dapo_are_kept_once(folder):
    write(folder / "a.parquet", [public_rows.dapo_math_17k(number) for number in (1, 2) * 3])
    run("dapo-math-17k", "--train", "a.parquet")
    found = rows(folder / "data" / "dapo-math-17k" / "train.jsonl")
    assert [row["prompt"] for row in found] == [public_rows.dapo_math_17k(number)["prompt"] for number in (1, 2)]
    assert [row["answer"] for row in found] == ["41", "42"]


def test_files_of_another_set_leave_nothing_behind(folder, capsys):
    write(folder / "a.jsonl", [public_rows.gsm8k(1)])
    run("math", "--train", "a.jsonl", "-o", "out", status=2)
    said = capsys.readouterr().err
    assert "no usable row" in said and "question, answer" in said
    assert list((folder / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["geometry3k"], "images"),
        (["gsm"], "Did you mean 'gsm8k'"),
        (["gsm8k"], "hf download --repo-type dataset openai/gsm8k"),
        (["gsm8k", "--train", "a.csv"], ".csv"),
        (["gsm8k", "--train", "none.jsonl"], "No such file"),
        (["gsm8k", "--train", "hf://openai/gsm8k"], "hf://datasets/OWNER/NAME"),
    ],
)
def test_mistakes_are_refused_in_one_line(words, said, capsys):
    run(*words, status=2)
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_a_run_takes_a_name_on_the_hub_and_says_what_it_converts(folder):
    snapshot = fill(folder / "hub", name="openai/gsm8k")
    (snapshot / "main").mkdir(parents=True)
    for side in ("train", "test"):
        write(snapshot / "main" / f"{side}-00000-of-00001.parquet", [public_rows.gsm8k(number) for number in range(8)])
    settings = {
        "model": {"preset": "qwen2_tiny", "tokenizer": str(byte_bpe_folder(folder / "tokenizer"))},
        "data": {"train_files": "openai/gsm8k", "val_files": "openai/gsm8k"},
        "rollout": {"prompt_length": 400, "response_length": 8},
        "train": {"batch_size": 8, "num_steps": 1},
    }
    config = load(settings, ["model.overrides.vocab_size=320"])
    found = check_run(config, 1)
    assert found.source.num_rows == len(found.validation) == 8
    assert {prompt.answer for prompt in found.first_prompts} == {str(1000 + number) for number in range(8)}
    assert [note for note in found.warnings if "mrl data gsm8k" in note and "not exact_match" in note]


def test_the_sets_are_listed(capsys):
    run()
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(all_sets())
