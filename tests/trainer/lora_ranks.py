"""What the ranks of tests/trainer/test_lora.py do; they import no peft."""

import torch

from mrl.checkpoint.formats.peft import read_adapters
from mrl.config.config import LoraConfig
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.random_init import init_adapters
from mrl.resharding.weight_sync import gather_layouts
from mrl.trainer.hf_export import write_adapters
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    MIXTURES,
    _whole,
    fill_adapters,
    full_adapters,
    full_weights,
    make_batch,
    make_policy,
    scores,
    train,
)

MODELS = {**ARCHS, **MIXTURES}
LORA = LoraConfig(rank=4, alpha=8.0)


def actor(name, grid, lora=LORA, **options):
    return make_policy(MODELS[name], grid, actor={"lora": lora}, **options)


def initial(name, grid, lora, seed):
    policy = actor(name, grid, lora)
    init_adapters(MODELS[name], lora, policy.adapters.layout(), policy.trained_tensors(), seed)
    return full_adapters(policy)


def exported(folder, name, grid, lora):
    policy = actor(name, grid, lora)
    fill_adapters(policy)
    layouts = gather_layouts(policy.adapters.layout())
    write_adapters(folder, MODELS[name], lora, layouts, policy.trained_tensors(), base="model")
    return full_weights(policy), policy.score(make_batch())[0], merged_weights(policy)


def merged_weights(policy):
    merged = policy.merged_tensors()
    return _whole(policy.layout(), {name: merged[name] for name in merged})


def imported(folder, name, grid, lora):
    policy = actor(name, grid, lora)
    read_adapters(folder, MODELS[name], lora, policy.adapters.layout(), policy.trained_tensors())
    return full_weights(policy), policy.score(make_batch())[0]


def reference(grid, steps):
    """Scores of the reference at the start, after training, and of one that follows the actor."""
    policy = actor("qwen2", grid)
    init_adapters(ARCHS["qwen2"], LORA, policy.adapters.layout(), policy.trained_tensors(), 1)
    policy.weights_changed()
    batch = make_batch()
    plain = scores(make_policy(ARCHS["qwen2"], grid, groups=policy.groups), batch)
    policy.copy_to_reference()
    assert policy.equals_reference
    train(policy, steps)
    assert not policy.equals_reference
    live = scores(policy, batch)
    with policy.using_reference():
        frozen = scores(policy, batch)
    assert torch.equal(scores(policy, batch), live)
    size = sum(t.numel() for t in policy.reference_tensors().values())
    policy.copy_to_reference()
    train(policy, steps, first=steps)
    with policy.using_reference():
        followed = scores(policy, batch)
    return plain, live, frozen, followed, size


def faster(ratio, steps):
    """Adapters after a step with another learning rate for lora_B, and the movement of each kind."""
    policy = actor("qwen2", ParallelLayout(1), LoraConfig(rank=4, loraplus_lr_ratio=ratio))
    fill_adapters(policy)
    before = full_adapters(policy)
    policy.start_optimizer(CONSTANT)
    train(policy, steps)
    after = full_adapters(policy)
    return {
        which: max((after[k] - before[k]).abs().max().item() for k in before if which in k)
        for which in ("lora_A", "lora_B")
    }
