"""The JSON Schema accepts what the loader accepts, and refuses unknown keys, wrong types and wrong choices."""

from dataclasses import asdict

import pytest
import yaml

from mrl.config.config import Config, load
from mrl.config.keys import dotted_keys
from mrl.config.values import OmegaConf
from mrl.errors import UserError
from mrl.trainer.validation.json_schema import json_schema
from tests.source import ROOT

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema (extra test)")
SCHEMA = json_schema()


def errors(values) -> list[str]:
    checker = jsonschema.Draft7Validator(SCHEMA)
    return [".".join(map(str, error.absolute_path)) for error in checker.iter_errors(values)]


def test_it_is_a_valid_schema():
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_valid_as_written_and_with_every_default(path):
    assert errors(OmegaConf.to_container(OmegaConf.load(path))) == []
    assert errors(asdict(load(path))) == []


def test_every_key_has_a_description():
    for key in dotted_keys(Config):
        found = SCHEMA
        for part in key.split("."):
            found = found["properties"][part]
        assert found["description"].strip(), key


VALUES = {
    "run.seed": (3, "three", [3], True),
    "run.resume": ("must", "sometimes", None, 1),
    "actor.lr": (1, 1e-6, "small", [1]),
    "train.num_steps": (None, 5, 2.5, "many"),
    "model.tokenizer": (None, "char:ab", {"a": 1}, ["a"]),
    "data.val_files": ("a.jsonl", ["a.jsonl", "b.jsonl"], {"a": "b"}, [["a"]], [{"a": "b"}]),
    "data.task_kwargs": ({"max_value": 9}, {}, "max_value", [1]),
    "observe.console": ("plain", "off", False, True, "quiet"),
    "reward.functions": ([{"name": "math"}], [], [{"nam": "math"}], "math", [{"name": "math", "weight": "half"}]),
    "rollout.name": ("vllm", "my.module:Engine", None, []),
    "train.warm_start": ({"num_steps": 3}, {"num_step": 3}, 5),
    "checkpoint.interval": ("${run.seed}", 10, "ten"),
    "train.nonsense": (1,),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in VALUES.items() for value in values])
def test_a_value_is_refused_if_and_only_if_the_loader_refuses_it(key, value):
    section, field = key.split(".")
    values = {section: {field: value}}
    try:
        load(yaml.safe_load(yaml.safe_dump(values)))
        refused = False
    except UserError:
        refused = True
    assert bool(errors(values)) == refused
