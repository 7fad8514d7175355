"""Settings of adapters that the config does not set are those of the PEFT folder that it names."""

import json

import peft
import pytest

from mrl.config.config import LoraConfig, load, to_yaml
from mrl.config.peft_folder import ADAPTER_CONFIG
from mrl.errors import UserError

THEIRS = {
    "rank": 5, "alpha": 10.0, "use_rslora": True, "target_modules": ["q_proj", "up_proj"],
    "exclude_modules": ["layers.1.mlp.up_proj"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    settings = {"target_modules": ["up_proj", "q_proj"], "exclude_modules": ["layers.1.mlp.up_proj"]}
    peft.LoraConfig(r=5, lora_alpha=10, use_rslora=True, **settings).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def lora(folder, *overrides, section="actor", **given):
    config = load({section: {"lora": {"adapter_path": str(folder), **given}}}, overrides)
    assert load(config_file(folder, config)) == config
    return getattr(config, section).lora


def config_file(folder, config):
    path = folder.parent / "config.yaml"
    path.write_text(to_yaml(config))
    return path


def fields(found):
    return {name: sorted(value) if isinstance(value, list) else value for name, value in found.items()}


@pytest.mark.parametrize("section", ["actor", "critic"])
def test_all_of_them_are_the_folders(section, folder):
    found = vars(lora(folder, section=section))
    assert fields({name: found[name] for name in THEIRS}) == THEIRS


@pytest.mark.parametrize(("name", "value"), [
    ("rank", 3), ("rank", 0), ("alpha", 32.0), ("use_rslora", False), ("target_modules", ["all-linear"]),
    ("exclude_modules", []),
])  # fmt: skip
def test_a_value_that_is_set_stays_even_if_it_is_the_default(name, value, folder):
    for found in (lora(folder, **{name: value}), lora(folder, f"actor.lora.{name}={value}")):
        assert fields({key: vars(found)[key] for key in THEIRS}) == THEIRS | {name: value}
    assert fields({"": vars(lora(folder, f"~actor.lora.{name}", **{name: value}))[name]}) == {"": THEIRS[name]}


@pytest.mark.parametrize(("name", "value"), [
    ("r", True), ("r", None), ("lora_alpha", "8"), ("use_rslora", None), ("target_modules", ".*_proj"),
    ("target_modules", [1]),
])  # fmt: skip
def test_values_of_another_kind_are_left_to_the_reader_of_the_folder(name, value, folder):
    content = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content | {name: value}))
    own = {"r": "rank", "lora_alpha": "alpha"}.get(name, name)
    found = fields({key: vars(lora(folder))[key] for key in THEIRS})
    assert found == THEIRS | {own: vars(LoraConfig())[own]}


def test_a_folder_that_is_not_here_sets_nothing(tmp_path):
    assert lora(tmp_path / "nowhere").rank == 0


def test_a_broken_file_is_named(folder):
    (folder / ADAPTER_CONFIG).write_text("{")
    with pytest.raises(UserError, match=ADAPTER_CONFIG):
        lora(folder)
