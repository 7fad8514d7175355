"""Fields of every supported release of megatron-core, from `fields.json`: release -> section -> names."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mrl.config.config import Config, MegatronConfig
from mrl.config.megatron_fields.installed import CLASSES, fields_of, version
from mrl.config.megatron_fields.table import TABLE, verdicts
from mrl.config.megatron_fields.versions import FIRST, LAST, first_release, removed_in
from mrl.trainer.validation.megatron import name_rules

FIELDS = json.loads((Path(__file__).parent / "fields.json").read_text())
RELEASES = {name.rpartition(".")[0]: fields for name, fields in FIELDS.items()}


def test_the_lists_are_of_the_supported_releases():
    assert list(RELEASES) == ["0.16", "0.17", "0.18", "0.19"] and (FIRST, LAST) == ("0.16", "0.19")


@pytest.mark.parametrize("section", CLASSES)
def test_every_field_of_every_release_is_in_exactly_one_class(section):
    rows = Counter(name for of, name, _ in verdicts() if of == section)
    assert {name for name, count in rows.items() if count > 1} == set()
    assert set(rows) == {name for fields in RELEASES.values() for name in fields[section]}


@pytest.mark.parametrize("section", CLASSES)
def test_the_releases_of_each_field_are_known(section):
    order = list(RELEASES)
    for name in {name for fields in RELEASES.values() for name in fields[section]}:
        with_it = [release for release in order if name in RELEASES[release][section]]
        first, removed = first_release(section, name), removed_in(section, name)
        stop = order.index(removed) if removed else len(order)
        assert with_it == order[order.index(first) : stop], name


@pytest.mark.parametrize("section", CLASSES)
def test_the_installed_release_has_the_fields_of_its_list(section):
    if version() not in FIELDS:
        pytest.skip(f"there is no list for megatron-core {version()}")
    assert set(fields_of(section)) == set(FIELDS[version()][section])


def test_a_field_of_another_release_is_refused_with_the_release_that_has_it():
    installed = set(fields_of("transformer"))
    for section, name in TABLE:
        if name in fields_of(section):
            continue
        config = Config(megatron=MegatronConfig(**{section: {name: 1}}))
        (message,) = name_rules(config)
        release = removed_in(section, name) if first_release(section, name) == FIRST else first_release(section, name)
        assert f"megatron.{section}.{name} is no field" in message and release in message
    assert installed < {name for section, name in TABLE if section == "transformer"}
