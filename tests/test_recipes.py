"""Recipes for public data sets: they name what `mrl data` writes, and pass a rehearsal without their files."""

import re

import pytest

from mrl.commands.cli import main
from mrl.config.config import load
from mrl.data.public_sets.base import find
from tests.source import ROOT

FILES = sorted((ROOT / "configs" / "recipes").glob("*.yaml"))


def data_set(file):
    """The data set that the recipe's comments prepare."""
    return re.search(r"^#   mrl data ([\w-]+)$", file.read_text(), re.MULTILINE)[1]


def test_there_are_recipes():
    assert {data_set(file) for file in FILES} == {"gsm8k", "dapo-math-17k"}


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_recipe_has_the_files_and_settings_that_mrl_data_gives(file):
    name, config = data_set(file), load(file)
    found = find(name)
    assert (config.data.train_files, config.data.val_files) == (
        [f"data/{name}/train.jsonl"],
        [f"data/{name}/val.jsonl"],
    )
    assert config.reward.functions[0].name == found.reward["name"]
    for key, value in found.settings.items():
        section, _, field = key.partition(".")
        own = getattr(getattr(config, section), field)
        assert {each: getattr(own, each) for each in value} == value
    assert config.rollout.val_kwargs.n == 1 or not config.rollout.val_kwargs.greedy


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_recipe_is_in_the_docs_with_its_commands(file):
    page = (ROOT / "mrl" / "docs" / "data_sets.md").read_text()
    assert f"mrl data {data_set(file)}\n" in page and f"configs/recipes/{file.name}\n" in page
    assert f"configs/recipes/{file.name}\n" in file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_recipe_passes_the_checks_of_a_rehearsal(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["rehearse", str(file), "--stand-ins", "--dry-run"]) == 0
