"""A critic with low-rank adapters uses the actor's weights in the same memory, and trains head and adapters alone."""

import pytest
import torch

from mrl.config.config import LoraConfig
from mrl.megatron import checkpoint
from mrl.resharding.megatron import OUTPUT
from mrl.resharding.random_init import init_adapters
from tests.megatron.actors import (
    ARCHS,
    BIASED_MIXTURE,
    CONSTANT,
    EXPERT_LAYOUTS,
    LAYOUTS,
    fill_adapters,
    make_critic,
    make_policy,
    own_part,
    train,
)
from tests.megatron.test_critic import OBJECTIVE, valued
from tests.ranks import run_ranks

LORA = LoraConfig(rank=3, alpha=12.0)
OFFLOADED = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}


def pair(grid, arch=ARCHS["qwen2"], **options):
    """Collective over the job: an actor with large adapters, and a critic of it with new ones and a zero head."""
    actor = make_policy(arch, grid, actor={"lora": LORA, **options})
    fill_adapters(actor)
    critic = make_critic(arch, grid, groups=actor.groups, seed=None, actor={"lora": LORA, **options})
    critic.borrow_weights(actor)
    init_adapters(critic.chunks[0].arch, LORA, critic.adapters.layout(), critic.trained_tensors(), 1)
    critic.zero_head()
    for name, tensor in critic.named_tensors().items():
        if name.endswith(OUTPUT):
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view_as(tensor))
    return actor, critic


def trained(folder, grid, options):
    actor, critic = pair(grid, **options)
    batch = valued(ARCHS["qwen2"])
    before, scored = critic.values(batch), actor.score(batch)[0]
    shared = {name: tensor.data_ptr() for name, tensor in actor.named_tensors().items()}
    same = [
        shared[name] == tensor.data_ptr()
        for name, tensor in critic.named_tensors().items()
        if not name.endswith(OUTPUT)
    ]
    critic.start_optimizer(CONSTANT)
    actor.offload()
    metrics = [critic.update(own_part(batch, critic), OBJECTIVE.loss) for _ in range(2)]
    critic.offload()
    after_critic = actor.score(batch)[0]
    train(actor, 1)
    checkpoint.save(folder, critic)
    values = critic.values(batch)
    metrics.append(critic.update(own_part(batch, critic), OBJECTIVE.loss))
    return before, values, metrics, all(same), torch.equal(scored, after_critic)


def resumed(folder, grid):
    _, critic = pair(grid)
    critic.start_optimizer(CONSTANT)
    checkpoint.load(folder, critic)
    batch = valued(ARCHS["qwen2"])
    return critic.values(batch), critic.update(own_part(batch, critic), OBJECTIVE.loss)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run_ranks(1, trained, tmp_path_factory.mktemp("critic") / "critic", LAYOUTS["single"], {})[0]


@pytest.mark.parametrize(
    ("layout", "options"), [("single", {}), ("tp2_pp2", {}), ("dp2", {}), ("tp2", OFFLOADED)], ids=str
)
def test_it_shares_the_actors_weights_in_every_layout(layout, options, single, tmp_path):
    for found in run_ranks(LAYOUTS[layout].world_size, trained, tmp_path / "critic", LAYOUTS[layout], options):
        before, values, metrics, shares, left_alone = found
        assert shares and left_alone
        torch.testing.assert_close(before, single[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, single[1], rtol=1e-3, atol=1e-4)
        assert (values - before).abs().max() > 1e-3
        for ours, theirs in zip(metrics, single[2], strict=True):
            assert ours["critic/grad_norm"] == pytest.approx(theirs["critic/grad_norm"], rel=1e-3)


@pytest.mark.parametrize("layout", ["single", "tp2_pp2"])
def test_it_goes_on_at_another_layout(layout, tmp_path):
    folder = tmp_path / "critic"
    _, values, metrics, *_ = run_ranks(2, trained, folder, LAYOUTS["tp2"], {})[0]
    for found, after in run_ranks(LAYOUTS[layout].world_size, resumed, folder, LAYOUTS[layout]):
        torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-5)
        assert after["critic/grad_norm"] == pytest.approx(metrics[-1]["critic/grad_norm"], rel=1e-3)


def all_shared(grid):
    """Values of an unfilled critic that uses an actor's weights, and names of tensors but the head that are its own."""
    actor, critic = pair(grid, BIASED_MIXTURE)
    shared = {name: tensor.data_ptr() for name, tensor in actor.named_tensors().items()}
    held = {name: tensor.data_ptr() for name, tensor in critic.named_tensors().items() if not name.endswith(OUTPUT)}
    return critic.values(valued(BIASED_MIXTURE)), [name for name in held if held[name] != shared[name]]


def test_it_shares_the_biases_of_routers_too():
    for values, own in run_ranks(2, all_shared, EXPERT_LAYOUTS["ep2"]):
        assert values.isfinite().all()
        assert not own
