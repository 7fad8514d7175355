"""The biases with which routers select experts are buffers, and follow the model's weights wherever these go."""

import pytest
import torch

from mrl.checkpoint.formats.adapter_checkpoint import _checksum as base_checksum
from mrl.checkpoint.formats.hf import HfSource
from mrl.config.config import LoraConfig
from mrl.megatron.model import BIAS
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.random_init import init_adapters
from mrl.trainer.actor_weights import read_weights
from tests.megatron.actors import (
    BIASED_MIXTURE,
    CONSTANT,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MIXTURES,
    full_weights,
    make_batch,
    make_critic,
    make_policy,
    scores,
)
from tests.megatron.mixtures import make_model
from tests.megatron.test_critic import OBJECTIVE, valued
from tests.ranks import run_ranks

UNBIASED = MIXTURES["qwen3_moe"]
LORA = {"lora": LoraConfig(rank=2, target_modules=["q_proj"])}


def biases(policy):
    return {name: tensor for name, tensor in policy.named_tensors().items() if name.endswith(BIAS)}


def spread(policy):
    for tensor in biases(policy).values():
        tensor.copy_(torch.linspace(-2, 3, tensor.numel()))


def read(folder, grid):
    arch = arch_from_folder(folder)
    policy = make_policy(arch, grid, seed=None)
    read_weights(policy, arch, folder, policy.named_tensors())
    return full_weights(policy)


@pytest.mark.parametrize("grid", [ParallelLayout(1), ParallelLayout(2), EXPERT_LAYOUTS["ep2_pp2"]], ids=str)
def test_they_are_read_by_one_rank_and_sent_to_the_others(grid, tmp_path):
    model = make_model("glm4_moe", seed=4)
    model.save_pretrained(tmp_path)
    expected = {name: buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")}
    assert expected
    for found in run_ranks(grid.world_size, read, str(tmp_path), grid):
        for name, buffer in expected.items():
            assert torch.equal(found[name], buffer), name


def swapped(grid):
    policy = make_policy(BIASED_MIXTURE, grid)
    batch = make_batch(5)
    before = scores(policy, batch)
    for name, tensor in policy.named_tensors().items():
        policy.reference_tensors()[name].copy_(tensor)
    for name, tensor in biases(policy).items():
        policy.reference_tensors()[name].copy_(torch.linspace(-2, 3, tensor.numel()))
    with policy.using_reference():
        inside = scores(policy, batch)
    after = scores(policy, batch)
    spread(policy)
    return torch.equal(before, after), torch.equal(before, inside), torch.equal(scores(policy, batch), inside)


@pytest.mark.parametrize("layout", ["single", "pp2"])
def test_a_reference_or_a_teacher_in_the_actors_modules_has_its_own(layout):
    for left_alone, as_actor, as_other in run_ranks(LAYOUTS[layout].world_size, swapped, LAYOUTS[layout]):
        assert left_alone
        assert not as_actor
        assert as_other


def borrowed():
    grid = LAYOUTS["single"]
    actor = make_policy(BIASED_MIXTURE, grid, actor=LORA)
    spread(actor)
    critic = make_critic(BIASED_MIXTURE, grid, groups=actor.groups, seed=None, actor=LORA)
    critic.borrow_weights(actor)
    own = biases(critic)
    return [own[name].data_ptr() == tensor.data_ptr() for name, tensor in biases(actor).items()]


def test_a_critic_with_adapters_uses_the_actors():
    shared = run_ranks(1, borrowed)[0]
    assert shared and all(shared)


def critic_step(arch, lora):
    """Whether the biases of a critic stay as they are in an update, and its metrics."""
    critic = make_critic(arch, LAYOUTS["single"], actor={"moe_router_bias_update_rate": 0.1, **lora})
    if lora:
        init_adapters(critic.chunks[0].arch, lora["lora"], critic.adapters.layout(), critic.trained_tensors(), 1)
    before = {name: tensor.clone() for name, tensor in biases(critic).items()}
    critic.start_optimizer(CONSTANT)
    metrics = critic.update(valued(arch), OBJECTIVE.loss)
    return all(torch.equal(before[name], tensor) for name, tensor in biases(critic).items()), metrics


@pytest.mark.parametrize(
    ("arch", "lora", "moves"), [(BIASED_MIXTURE, {}, True), (BIASED_MIXTURE, LORA, False), (UNBIASED, {}, False)]
)
def test_those_of_a_critic_move_if_it_has_them_and_trains_its_weights(arch, lora, moves):
    stay, metrics = run_ranks(1, critic_step, arch, lora)[0]
    assert stay != moves
    assert ("critic/moe_router_bias_max" in metrics) == moves


def checksums():
    actor = make_policy(BIASED_MIXTURE, LAYOUTS["single"], actor=LORA)
    before = actor.base_checksum()
    spread(actor)
    actor.weights_changed()
    return before, actor.base_checksum()


def test_adapters_belong_to_a_model_with_the_same_ones():
    before, after = run_ranks(1, checksums)[0]
    assert before != after


def checksum_of(folder, grid):
    arch = arch_from_folder(folder)
    actor = make_policy(arch, grid, seed=None, dtype="bfloat16", actor=LORA)
    read_weights(actor, arch, folder, actor.named_tensors())
    return actor.base_checksum()


def test_a_bf16_model_in_a_folder_is_the_one_of_its_adapters(tmp_path):
    """The biases stay in float32."""
    make_model("glm4_moe", seed=4).save_pretrained(tmp_path)
    with HfSource(tmp_path) as source:
        assert run_ranks(1, checksum_of, str(tmp_path), LAYOUTS["single"]) == [base_checksum(source, "bfloat16")]
