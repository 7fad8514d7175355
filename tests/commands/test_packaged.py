"""Configs and pages that come with mrl are found from any folder, and a name that does not exist is refused."""

from pathlib import Path

import pytest

from mrl.commands import cli
from mrl.config import packaged
from mrl.config.config import load
from mrl.errors import UserError
from tests.source import ROOT


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lines_of(capsys, *argv: str) -> list[str]:
    assert cli.main(argv) == 0
    return capsys.readouterr().out.splitlines()


def test_a_name_is_that_of_a_packaged_config_unless_a_file_or_folder_has_it(tmp_path):
    assert load("quickstart", "train.num_steps=7").run.output_dir == "runs/quickstart"
    assert packaged.find_config("quickstart") == str(ROOT / "configs" / "quickstart.yaml")
    Path("quickstart").write_text("run: {seed: 3}")
    assert load("quickstart").run.seed == 3
    assert packaged.find_config("elsewhere/quickstart") == "elsewhere/quickstart"


@pytest.mark.parametrize("given", ["quickstar", "configs/quickstart.yaml", "quickstart.yaml", "Quickstart"])
def test_a_missing_config_is_refused_with_the_name_of_the_packaged_one(given):
    with pytest.raises(UserError, match="'quickstart'"):
        load(given)


def test_every_config_is_listed_with_a_title_and_printed_as_it_is(capsys):
    listed = [line.split(maxsplit=1) for line in lines_of(capsys, "configs")]
    assert [name for name, _ in listed] == packaged.names()
    assert [title for _, title in listed if title[-1] not in ".!?"] == []  # whole sentences
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} <= set(packaged.names())
    text = (ROOT / "configs" / "quickstart.yaml").read_text()
    assert lines_of(capsys, "configs", "quickstart") == text.splitlines()
    assert lines_of(capsys, "configs", "quickstart", "-o", "mine.yaml") == []
    assert Path("mine.yaml").read_text() == text


def test_a_config_is_never_written_over_a_file(capsys):
    Path("mine.yaml").write_text("run: {seed: 3}")
    assert cli.main(["configs", "quickstart", "-o", "mine.yaml"]) == 2
    assert cli.main(["configs", "quickstart", "-o", "nowhere/mine.yaml"]) == 2
    assert cli.main(["configs", "-o", "other.yaml"]) == 2
    assert cli.main(["configs", "quickstrt"]) == 2
    assert Path("mine.yaml").read_text() == "run: {seed: 3}"
    assert capsys.readouterr().err.count("mrl: error: ") == 4


def test_every_page_is_listed_and_printed_as_it_is(capsys):
    pages = {path.stem: path.read_text() for path in (ROOT / "mrl" / "docs").glob("*.md")}
    listed = lines_of(capsys, "docs")
    assert [line.split()[0] for line in listed[: len(pages)]] == sorted(pages)
    assert lines_of(capsys, "docs", "rewards") == pages["rewards"].splitlines()
    assert cli.main(["docs", "rewrds"]) == 2
    assert "'rewards'" in capsys.readouterr().err
