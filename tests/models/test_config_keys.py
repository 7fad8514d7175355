"""Every key of config.json that transformers knows is used as transformers uses it, without effect, or refused."""

import pytest

from mrl.models.hf_config import families
from tests.models.judge import BASES, changes, drawn, judge, keys_of
from tests.models.values import VALUES

DRAWS = 5
"""Configs with several changed keys, of each family; `python -m tests.models.judge` draws more."""
SCALINGS = {"llama": slice(None), "phi3": slice(None)}
"""All values of the rotary settings for one family; the others read them with the same lines."""


@pytest.mark.slow
@pytest.mark.parametrize("family", BASES)
def test_a_key_changes_what_it_changes_in_transformers_or_is_refused(family, tmp_path):
    configs = [*changes(family, SCALINGS.get(family, slice(1, None, 6))), *drawn(family, DRAWS, seed=1)]
    verdict = judge(family, configs, tmp_path)
    assert not verdict.wrong, "\n".join(verdict.wrong)
    assert min(verdict.refused, verdict.without_effect, verdict.models) > 5


def test_every_family_is_judged():
    assert set(BASES) == set(families())


@pytest.mark.parametrize("family", BASES)
def test_every_key_that_transformers_reads_is_on_one_list(family):
    """A key that is new in transformers is on none, and has no value here to try it with."""
    keys = families()[family].keys
    assert keys_of(family) - keys.all == set()
    assert keys_of(family) - set(VALUES) == set()
    assert (
        not keys.read & keys.required_values.keys()
        and not (keys.read | keys.required_values.keys()) & keys.without_effect.keys()
    )


@pytest.mark.parametrize("family", BASES)
def test_a_key_on_the_list_without_effect_is_never_refused(family):
    from mrl.models.hf_config import arch_from_config
    from tests.models.judge import base

    expected = arch_from_config(base(family))
    for key in families()[family].keys.without_effect.keys() - {"model_type"}:
        for value in VALUES[key]:
            assert arch_from_config({**base(family), key: value}) == expected, key
