"""Each field of what an engine is asked for comes from the key of the config that names it, and from no other."""

from dataclasses import fields

import pytest

from mrl.config.config import load
from mrl.engines.base import SamplingConfig
from mrl.rollout.sampling_params import training_sampling, validation_sampling
from tests.source import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
EOS = (7, 9)
VAL = "rollout.val_kwargs"

TRAINING = {
    "n": ("rollout.n=3", 3),
    "max_tokens": ("rollout.response_length=77", 77),
    "temperature": ("rollout.temperature=0.25", 0.25),
    "top_k": ("rollout.top_k=11", 11),
    "top_p": ("rollout.top_p=0.5", 0.5),
    "min_p": ("rollout.min_p=0.125", 0.125),
    "greedy": ("rollout.do_sample=false", True),
    "ignore_eos": ("rollout.ignore_eos=true", True),
    "stop": ("rollout.stop=[ab,c]", ("ab", "c")),
    "seed": ("run.seed=123", 123),
}
HELD_OUT = {
    **{name: TRAINING[name] for name in ("max_tokens", "ignore_eos", "stop", "seed")},
    "n": (f"{VAL}.n=5", 5),
    "temperature": (f"{VAL}.temperature=0.25", 0.25),
    "top_k": (f"{VAL}.top_k=11", 11),
    "top_p": (f"{VAL}.top_p=0.5", 0.5),
    "min_p": (f"{VAL}.min_p=0.125", 0.125),
    "greedy": (f"{VAL}.do_sample=true", False),
}
"""Field of SamplingConfig -> the key that sets it, and what it is then."""


def changed(make, override):
    """The fields that differ from those without the override, with their values."""
    before, after = (make(load(QUICKSTART, overrides), EOS) for overrides in ([], [override]))
    names = [item.name for item in fields(SamplingConfig)]
    return {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}


def test_every_field_is_in_both_tables():
    named = {item.name for item in fields(SamplingConfig)} - {"stop_token_ids", "return_kept_tokens"}
    assert named == set(TRAINING) == set(HELD_OUT)


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_rollout_takes_it_from_its_key(name):
    override, value = TRAINING[name]
    told = {"return_kept_tokens": True} if name in ("top_k", "top_p", "min_p") else {}  # what is kept trains
    assert changed(training_sampling, override) == {name: value, **told}


@pytest.mark.parametrize("name", HELD_OUT)
def test_a_held_out_rollout_takes_it_from_its_key(name):
    override, value = HELD_OUT[name]
    assert changed(validation_sampling, override) == {name: value}


def test_what_shapes_training_rollouts_alone_leaves_held_out_ones():
    for name in TRAINING.keys() - {"max_tokens", "ignore_eos", "stop", "seed"}:
        assert changed(validation_sampling, TRAINING[name][0]) == {}, name


@pytest.mark.parametrize("make", [training_sampling, validation_sampling])
def test_the_end_tokens_are_the_tokenizers(make):
    assert make(load(QUICKSTART), EOS).stop_token_ids == EOS


def test_a_held_out_temperature_of_0_is_greedy():
    assert changed(validation_sampling, f"{VAL}.temperature=0").get("greedy", True) is True
    both = validation_sampling(load(QUICKSTART, [f"{VAL}.temperature=0", f"{VAL}.do_sample=true"]), EOS)
    assert both.greedy and both.temperature == 1.0
