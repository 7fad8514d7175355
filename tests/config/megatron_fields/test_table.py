"""Every field of the installed Megatron is in exactly one class, and its files say of it what its classes do."""

import enum
from collections import Counter
from dataclasses import MISSING, fields

import pytest
import torch

from mrl.config.config import Config
from mrl.config.keys import dotted_keys
from mrl.config.megatron_fields.installed import CLASSES, UNREADABLE, enum_members, fields_of
from mrl.config.megatron_fields.table import MRL_DEFAULTS, RULE_CHECKED, TABLE, TE_ONLY, verdicts
from mrl.config.megatron_fields.values import expected, fits
from mrl.megatron.ddp import DistributedDataParallelConfig
from mrl.megatron.model import TransformerConfig
from mrl.megatron.optimizer import OptimizerConfig
from mrl.trainer.validation.megatron import RULES

MEGATRON = {"transformer": TransformerConfig, "ddp": DistributedDataParallelConfig, "optimizer": OptimizerConfig}


@pytest.mark.parametrize("section", CLASSES)
def test_every_field_of_the_installed_megatron_is_in_exactly_one_class(section):
    rows = Counter(name for of, name, _ in verdicts() if of == section)
    assert {item.name: rows[item.name] for item in fields(MEGATRON[section]) if rows[item.name] != 1} == {}


def test_a_transformer_config_is_a_model_parallel_config_too():
    above = TransformerConfig.__mro__[1]
    assert above.__name__ == "ModelParallelConfig"
    assert {item.name for item in fields(above)} < set(fields_of("transformer"))


def written(value):
    """A default as a config would write it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.name if isinstance(value, enum.Enum) else getattr(value, "__name__", value)


@pytest.mark.parametrize("section", CLASSES)
def test_files_say_what_the_classes_say(section):
    read = fields_of(section)
    for item in fields(MEGATRON[section]):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        assert read[item.name].default is UNREADABLE or read[item.name].default == written(default), item.name
    computed = {name for name, item in read.items() if item.default is UNREADABLE}
    assert computed <= {"min_offloaded_tensor_size", "initial_loss_scale", "grad_norm_skip_threshold"}


@pytest.mark.parametrize("section", CLASSES)
def test_a_field_that_may_be_set_takes_its_own_default(section):
    for name, item in fields_of(section).items():
        if TABLE[section, name].kind != "derived" and item.default not in (UNREADABLE, None):
            written_default = list(item.default) if isinstance(item.default, tuple) else item.default
            assert fits(item.kind, written_default) and expected(item.kind), name


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("torch.dtype", ["bfloat16", "bf16"], ["int8", 16, None]),
        ("AttnBackend", ["flash", "auto"], ["flash2", 1]),
        ("Optional[Callable]", [None], ["len"]),
    ],
)
def test_values_stand_by_megatrons_names(kind, good, bad):
    assert [value for value in good if not fits(kind, value)] == []
    assert [value for value in bad if fits(kind, value)] == []


def test_names_in_the_table_exist():
    assert {rule for rows in RULE_CHECKED.values() for rule in rows.values()} == set(RULES)
    assert {(section, name) for section, names in TE_ONLY.items() for name in names.split()} <= set(TABLE)
    assert set(MRL_DEFAULTS) <= set(TABLE)
    assert enum_members("AttnBackend") == ("flash", "fused", "unfused", "local", "auto")
    known = dotted_keys(Config)
    for (_, name), verdict in TABLE.items():
        if verdict.kind == "derived" and verdict.why.startswith("set "):
            key = verdict.why.split()[1].rstrip(";").partition("=")[0]
            assert key in known or key.startswith("megatron.ddp."), name
