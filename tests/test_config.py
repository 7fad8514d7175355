"""The schema: files load, what is written reads back, mistakes are named in full, each field is documented."""

import ast
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from mrl import config as schema
from mrl.config import Config, load, to_yaml
from mrl.errors import UserError
from mrl.keys import dotted_keys, leaves, nested
from tests.source import PACKAGE, ROOT, tree_of

FILES = sorted((ROOT / "configs").rglob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def message(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(write(tmp_path, text), overrides)
    return str(caught.value)


def value_at(config: Config, key: str):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_configs_exist():
    assert ROOT / "configs" / "quickstart.yaml" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_yaml_loads_and_reads_back(file, tmp_path):
    config = load(file)
    assert load(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_yaml_holds_differences_only(file):
    defaults = Config()
    given = leaves(yaml.safe_load(file.read_text(encoding="utf-8")), Config)
    plain = [(key, value) for key, value in given if "[" not in key]
    repeated = [key for key, value in plain if key in dotted_keys(Config) and value_at(defaults, key) == value]
    assert repeated == []


def test_every_field_has_its_line_of_documentation():
    bare = []
    for section in (node for node in tree_of(PACKAGE / "config.py").body if isinstance(node, ast.ClassDef)):
        hints = get_type_hints(getattr(schema, section.name))
        for this, following in zip(section.body, [*section.body[1:], None], strict=True):
            if not isinstance(this, ast.AnnAssign) or is_dataclass(hints[this.target.id]):
                continue
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not documented:
                bare.append(f"{section.name}.{this.target.id}")
    assert bare == []


def test_overrides_come_after_the_file(tmp_path):
    file = write(tmp_path, "train:\n  num_steps: 3\nactor:\n  lr: 0.1\n")
    config = load(file, ["train.num_steps=5", "actor.lr=1e-3", "data.val_files=[a.jsonl,b.jsonl]"])
    assert (config.train.num_steps, config.actor.lr, config.data.val_files) == (5, 1e-3, ["a.jsonl", "b.jsonl"])


def test_overrides_reach_into_lists_and_free_mappings(tmp_path):
    file = write(tmp_path, "reward:\n  functions:\n    - {name: length, kwargs: {target: 3}}\n    - {name: math}\n")
    config = load(file, ["reward.functions[0].kwargs.scale=2", "reward.functions[1].weight=0.5", "model.overrides.a=1"])
    first, second = config.reward.functions
    assert (first.name, first.kwargs, second.name, second.weight) == ("length", {"target": 3, "scale": 2}, "math", 0.5)
    assert config.model.overrides == {"a": 1}


def test_null_is_a_value_where_the_field_is_optional(tmp_path):
    assert (
        load(write(tmp_path, "{}"), ["train.minibatch_size=4", "train.minibatch_size=null"]).train.minibatch_size
        is None
    )


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("train:\n  num_step: 3\n", [], "'train.num_step' is unknown. Did you mean 'train.num_steps'?"),
        ("trian:\n  num_steps: 3\n", [], "'trian' is unknown. Did you mean 'train'?"),
        ("batch_size: 3\n", [], "'batch_size' is unknown. Did you mean 'train.batch_size'?"),
        ("{}", ["rollout.temprature=1"], "Did you mean 'rollout.temperature'?"),
        ("reward:\n  functions: [{nam: x}]\n", [], "'reward.functions[0].nam' is unknown. Did you mean 'reward."),
        ("{}", ["reward.functions[0].wieght=1"], "Did you mean 'reward.functions[0].weight'?"),
        ("reward:\n  functions: [{weight: q}]\n", [], "'reward.functions[0].weight' in '"),
        ("train:\n  num_steps: many\n", [], "'train.num_steps' in '"),
        ("{}", ["train.num_steps=1.5"], "'train.num_steps' in override 'train.num_steps=1.5': Value '1.5'"),
        ("{}", ["run.resume=maybe"], "expected one of ['auto', 'never', 'must']"),
        ("{}", ["train.num_steps="], "'train.num_steps' in override 'train.num_steps=': null came"),
        ("{}", ["train.num_steps"], "is not section.key=value"),
        ("{}", ["train.num_steps=["], "override 'train.num_steps=['"),
        ("{}", ["data.train_files=a.jsonl"], "'data.train_files'"),
        ("{}", ["run.output_dir=${nowhere}"], "'nowhere' not found"),
        ("train: 3\n", [], "'train' is 3, expected a section"),
        ("train:\n", [], "'train' is empty, expected a section"),
        ("- a\n", [], "the config file is ['a'], expected a section"),
        ("a: b: c\n", [], "is not readable YAML"),
        ("train:\n  num_steps: 1\n  num_steps: 2\n", [], "duplicate key num_steps"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_one_line(text, overrides, said, tmp_path):
    told = message(tmp_path, text, *overrides)
    assert said in told and "\n" not in told


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"nowhere\.yaml' does not exist"):
        load("nowhere.yaml")


def test_nested_opens_a_dotted_key():
    assert nested("a.b[0].c", 1) == {"a": {"b": {0: {"c": 1}}}}
