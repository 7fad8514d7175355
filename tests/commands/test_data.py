"""`mrl data`: files in mrl's format from raw files, with disjoint sides, and config lines that load."""

import json
import subprocess
import sys

import pytest
import yaml

from mrl.commands import cli
from mrl.config.config import load
from mrl.data.public_sets.base import all_sets
from mrl.trainer.run_plan import check_run
from mrl.trainer.validation.data import data_rules
from tests import hub_server
from tests.data import public_rows
from tests.data.folders import byte_bpe_folder
from tests.data.test_hub_files import fill
from tests.data.test_public_sets import write
from tests.source import ROOT


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


LAYOUTS = {
    "as on the hub": ("main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"),
    "as on the hub, flat": ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    "below the name": ("gsm8k/main/train-00000-of-00001.parquet", "gsm8k/main/test-00000-of-00001.parquet"),
    "named after the splits": ("train.jsonl", "test.jsonl"),
    "split folders": ("data/train/0.parquet", "data/validation/0.parquet"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_with_the_files_of_a_set_is_read(name, folder, capsys):
    for number, file in enumerate(LAYOUTS[name], 1):
        (folder / "raw" / file).parent.mkdir(parents=True, exist_ok=True)
        write(folder / "raw" / file, [public_rows.gsm8k(number)])
    (folder / "raw" / "README.md").write_text("train test")
    run("gsm8k", "--from", "raw", "-o", "out")
    found = [[row["answer"] for row in rows(folder / "out" / f"{side}.jsonl")] for side in ("train", "val")]
    assert found == [["1001"], ["1002"]]
    said = capsys.readouterr().err
    assert all(f"1 rows from raw/{file}" in said for file in LAYOUTS[name])


def test_the_repositories_of_a_set_may_be_subfolders_and_name_their_rows(folder, capsys):
    for file, make in (
        ("MATH-lighteval/data/train-0.parquet", public_rows.math),
        ("MATH-500/test.jsonl", public_rows.math500),
    ):
        (folder / "raw" / file).parent.mkdir(parents=True, exist_ok=True)
        write(folder / "raw" / file, [make(len(file))])
    run("math", "--from", "raw")
    names = [rows(folder / "data" / "math" / f"{side}.jsonl")[0]["data_source"] for side in ("train", "val")]
    assert names == ["DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]
    assert "1 rows from raw/MATH-500/test.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "answer"), [([], "1002"), (["--split", "dev"], "1003"), (["--split", "test"], "1004")]
)
def test_the_split_that_is_held_out_can_be_chosen(words, answer, folder):
    (folder / "raw").mkdir()
    for number, split in enumerate(("train", "validation", "dev", "test"), 1):
        write(folder / "raw" / f"{split}_set.jsonl", [public_rows.gsm8k(number)])
    run("gsm8k", "--from", "raw", *words)
    assert [row["answer"] for row in rows(folder / "data" / "gsm8k" / "val.jsonl")] == [answer]


@pytest.mark.parametrize(
    ("files", "words", "said"),
    [
        ([], [], "has no complete training files: expected 'main/train-*.parquet' or 'train*'"),
        (["train.jsonl"], [], "has no complete held-out files"),
        (["train.jsonl", "test.jsonl"], ["--split", "dev"], "expected 'dev*'"),
        (["train-00000-of-00002.jsonl", "test.jsonl"], [], "has no complete training files"),
        (["a/train.jsonl", "b/train.jsonl"], [], "several versions. Choose one: --from raw/a, --from raw/b"),
        (["train.jsonl"], ["--train", "a.jsonl"], "--from and --train or --val"),
    ],
)
def test_what_a_folder_lacks_is_said(files, words, said, folder, capsys):
    (folder / "raw").mkdir()
    for file in files:
        (folder / "raw" / file).parent.mkdir(exist_ok=True)
        write(folder / "raw" / file, [public_rows.gsm8k(1)])
    run("gsm8k", "--from", "raw", *words, status=2)
    assert said in capsys.readouterr().err


def test_one_of_two_held_out_sets_is_not_left_out_in_silence(folder, capsys):
    (folder / "raw/aime_2024/data").mkdir(parents=True)
    write(folder / "raw/aime_2024/data/train-0.parquet", [public_rows.aime(1)])
    run("aime", "--from", "raw", status=2)
    assert "no complete test* of math-ai/aime25" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("gated", "said"), [(True, "accept its terms at {page}"), (False, "there is no {page}")])
def test_a_set_without_access_is_refused_with_the_page_and_the_login(gated, said, folder):
    repo = "openai/gsm8k" if gated else "acme/other"
    files = {"main/train-00000-of-00001.parquet": b"x", "main/test-00000-of-00001.parquet": b"x"}
    with hub_server.serve("datasets", repo, "0" * 40, files, gated=gated) as server:
        asked = hub_server.client_environment(server, folder / "home")
        done = subprocess.run(
            [sys.executable, "-m", "mrl", "data", "gsm8k"], env={**asked, "PYTHONPATH": str(ROOT)}, cwd=folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        page = f"http://127.0.0.1:{server.server_port}/datasets/openai/gsm8k"
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert said.format(page=page) in done.stderr and "HF_TOKEN" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gsm8k", "--from", "nowhere"], "'nowhere' is not a folder"),
        (["gsm8k", "--split", "test"], "Add --from FOLDER"),
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
