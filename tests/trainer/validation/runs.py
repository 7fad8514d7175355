"""A run that preflight lets pass, and what it says of one that it does not."""

from dataclasses import replace

import pytest
import yaml

from mrl.config.config import Config, LearnsFrom
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.models.presets import arch_from_preset
from mrl.trainer.validation.validate import check

ARCH = arch_from_preset("qwen2_tiny", {}, None)
"""4 layers, 4 heads, 2 key/value heads, MLP 128, 512 positions, 128 tokens."""

TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
ROLLOUT_TP, VAL = "rollout.tensor_model_parallel_size", "rollout.val_kwargs"


def changed(config, key: str, value):
    """A copy with one field, at a dotted key, replaced; no types are checked, as `load` does that."""
    first, _, rest = key.partition(".")
    return replace(config, **{first: changed(getattr(config, first), rest, value) if rest else value})


def make(*overrides: str) -> Config:
    config = Config()
    for item in (
        "model.preset=qwen2_tiny",
        "model.tokenizer=char:0123456789+#",
        "data.task=addition",
        "train.num_steps=100",
        "rollout.prompt_length=16",
        "rollout.response_length=8",
        *overrides,
    ):
        key, _, text = item.partition("=")
        config = changed(config, key, yaml.safe_load(text))
    return config


def refusal(
    config: Config,
    world_size: int = 1,
    arch: ArchSpec = ARCH,
    tokenizer_vocab_size: int = 12,
    learns_from: LearnsFrom = "samples",
) -> str:
    with pytest.raises(UserError) as caught:
        check(config, arch, world_size=world_size, tokenizer_vocab_size=tokenizer_vocab_size, learns_from=learns_from)
    return str(caught.value)
