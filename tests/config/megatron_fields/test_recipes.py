"""What public recipes tell Megatron: each field of them passes, or is refused with the reason."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mrl.config.config import MegatronConfig, load
from mrl.config.megatron_fields.installed import CLASSES, version
from mrl.models.presets import arch_from_preset
from mrl.trainer.validation.megatron import megatron_rules, name_rules
from mrl.trainer.validation.parallel import build_parallel_layout
from mrl.trainer.validation.validate import check

RECIPES = yaml.safe_load((Path(__file__).parent / "recipes.yaml").read_text())
RANKS = 32
WIDER = {"qwen3_moe_tiny": {"num_experts": 32}}
ACCEPTED = 0.5  # of all fields in them; nearly all others are said by mrl's own keys, or need 8 bits, graphs or FSDP


def made(recipe, *, without=()):
    """The recipe's config of so many ranks, a small model in place of its own; `without` some fields."""
    ours = [
        "run.device=cuda",
        "model.preset=qwen2_tiny",
        "model.tokenizer=char:0123456789+#",
        "rollout.prompt_length=16",
        "rollout.response_length=8",
    ]
    config = load({"data": {"task": "addition"}}, [*ours, "train.num_steps=1", *recipe.get("ours", [])])
    given = {
        section: {name: value for name, value in recipe.get(section, {}).items() if f"{section}.{name}" not in without}
        for section in CLASSES
    }
    return replace(config, megatron=MegatronConfig(**given)), arch_from_preset(
        recipe["arch"], WIDER.get(recipe["arch"], {}), None
    )


@pytest.mark.parametrize("name", RECIPES)
def test_each_field_of_a_recipe_passes_or_is_refused_with_the_reason(name):
    recipe = RECIPES[name]
    config, arch = made(recipe)
    told = [*name_rules(config), *megatron_rules(config, arch, build_parallel_layout(config, RANKS))]
    found = {}
    for message in told:
        key = message.partition(" ")[0].partition("=")[0].removeprefix("megatron.")
        found.setdefault(key, []).append(message)
    refused = recipe.get("refused", {}) | (recipe.get("refused by 0.19", {}) if version() >= "0.19" else {})
    assert set(found) == set(refused)
    assert [key for key, why in refused.items() if why not in " ".join(found[key])] == []
    config, arch = made(recipe, without=refused)
    check(config, arch, world_size=RANKS, tokenizer_vocab_size=12)


def test_there_are_ten_of_them_and_much_of_each_is_taken():
    fields = sum(len(recipe.get(section, {})) for recipe in RECIPES.values() for section in CLASSES)
    refused = sum(len(recipe.get("refused", {})) for recipe in RECIPES.values())
    assert len(RECIPES) >= 10 and all(recipe["source"] for recipe in RECIPES.values())
    assert 1 - refused / fields > ACCEPTED
