"""A critic's values and gradients are those of transformers' model with a value head, in every layout."""

import math
from contextlib import closing

import pytest
import torch
import transformers

from mrl.algorithms._critic import ValueObjective
from mrl.checkpoint.formats.megatron import MegatronSource
from mrl.config.config import CriticConfig, RolloutConfig
from mrl.megatron import checkpoint
from mrl.models._positions import for_run
from mrl.models.base import critic_of
from mrl.models.hf_config import family_of
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.regions import full_region
from tests.megatron.actors import (
    ARCHS,
    CONSTANT,
    CONTEXT_LAYOUTS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    MIXTURES,
    VOCAB,
    full_gradients,
    full_weights,
    make_batch,
    make_critic,
    make_policy,
    own_part,
)
from tests.megatron.trainings import ABSOLUTE, RELATIVE
from tests.models.rope import variants
from tests.ranks import run_ranks

VALUES = 2e-5  # fp32 against fp64: values of order 1 through four layers
GRADIENT = 2e-5  # relative to the largest gradient of each tensor
OPTIONS = {"actor": {"clip_grad": 0.0, "use_distributed_optimizer": False}}
OBJECTIVE = ValueObjective(CriticConfig(cliprange_value=0.5), RolloutConfig())
PHI4 = for_run(arch_from_preset("phi3_tiny", variants(head_dim=16, original=64)["phi4_mini"][1], VOCAB), longest=20)
DENSE = {**ARCHS, "phi4": PHI4}
MODELS = {**DENSE, **MIXTURES}


def valued(arch):
    """A batch with old values and returns; some errors are clipped."""
    batch = make_batch()
    generator = torch.Generator().manual_seed(5)
    batch.values_R, batch.returns_R = torch.randn(2, batch.response_mask_R.numel(), generator=generator).unbind()
    return batch


def step(name, grid):
    """Values of a batch, metrics of an update on it, its gradients, and the weights it started from."""
    critic = make_critic(MODELS[name], grid, **OPTIONS)
    batch = valued(MODELS[name])
    values_R = critic.values(batch)
    weights = full_weights(critic)
    critic.start_optimizer(CONSTANT)
    metrics = critic.update(own_part(batch, critic), OBJECTIVE.loss)
    return values_R, metrics, full_gradients(critic), weights


@pytest.fixture(scope="module")
def by_transformers():
    """Of a model the values, the loss and the gradients, fp64; of a mixture those of the single process.

    Its layers are held against transformers in `test_moe.py`; versions of transformers name its tensors differently.
    """
    known = {}

    def found(name):
        if name not in known:
            values_R, metrics, gradients, weights = run_ranks(1, step, name, ParallelLayout(1))[0]
            single = (
                values_R.double(),
                metrics["critic/vf_loss"],
                {key: gradient.double() for key, gradient in gradients.items()},
            )
            known[name] = dense(MODELS[name], weights) if name in DENSE else single
        return known[name]

    return found


def dense(arch, weights):
    config = family_of(arch).arch_to_hf(critic_of(arch))
    kind = transformers.AutoConfig.for_model(**config)
    kind.num_labels, kind.pad_token_id = 1, 0
    model = transformers.AutoModelForSequenceClassification.from_config(kind).double()
    model.load_state_dict(weights)
    batch = valued(arch)
    values, loss = [], torch.zeros((), dtype=torch.float64)
    parts = (batch.weights_R, batch.values_R, batch.returns_R)
    parts = [part.double().split(batch.response_lens_B.tolist()) for part in parts]
    sequences = batch.tokens_P.split(batch.seq_lens_B.tolist())
    for tokens, prompt_len, weight, old, returns in zip(sequences, batch.prompt_lens_B.tolist(), *parts, strict=True):
        hidden = model.model(tokens[None]).last_hidden_state[0, prompt_len - 1 : -1]
        value = model.score(hidden).squeeze(1)
        near = torch.maximum(torch.minimum(value, old + 0.5), old - 0.5)
        loss = loss + (weight * 0.5 * torch.maximum((value - returns) ** 2, (near - returns) ** 2)).sum()
        values.append(value.detach())
    loss.backward()
    return torch.cat(values), loss.item(), {name: p.grad for name, p in model.named_parameters()}


CASES = {
    **{f"qwen2-{layout}": ("qwen2", grid) for layout, grid in LAYOUTS.items()},
    **{f"qwen3-{layout}": ("qwen3", CONTEXT_LAYOUTS[layout]) for layout in ("cp2", "cp2_tp2", "cp2_pp2")},
    "gemma3_text-tp2_pp2": ("gemma3_text", LAYOUTS["tp2_pp2"]),
    "llama-tp2_pp2": ("llama", LAYOUTS["tp2_pp2"]),
    "phi4-tp2": ("phi4", LAYOUTS["tp2"]),
    "qwen2_moe-tp2_ep2_pp2": ("qwen2_moe", EXPERT_LAYOUTS["tp2_ep2_pp2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "grid"), CASES.values(), ids=CASES)
def test_values_loss_and_gradients_are_those_of_transformers(name, grid, by_transformers):
    values_R, loss, gradients = by_transformers(name)
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
    for found_R, metrics, ours, _ in run_ranks(grid.world_size, step, name, grid):
        torch.testing.assert_close(found_R.double(), values_R, rtol=0, atol=VALUES)
        assert math.isclose(metrics["critic/vf_loss"], loss, rel_tol=RELATIVE)
        assert math.isclose(metrics["critic/grad_norm"], norm, rel_tol=RELATIVE)
        assert 0 < metrics["critic/vf_clipfrac"] < 1
        assert ours.keys() == gradients.keys()
        for key, gradient in gradients.items():
            top = float(gradient.abs().max())
            torch.testing.assert_close(ours[key].double(), gradient, rtol=0, atol=GRADIENT * max(top, 1e-3), msg=key)


def saved(folder, grid):
    """An update, and where the critic stands then."""
    critic = make_critic(ARCHS["qwen2"], grid)
    critic.start_optimizer(CONSTANT)
    critic.update(own_part(valued(ARCHS["qwen2"]), critic), OBJECTIVE.loss)
    checkpoint.save(folder, critic)
    return full_weights(critic), critic.update(own_part(valued(ARCHS["qwen2"]), critic), OBJECTIVE.loss)


def resumed(folder, grid):
    critic = make_critic(ARCHS["qwen2"], grid, seed=None)
    critic.start_optimizer(CONSTANT)
    checkpoint.load(folder, critic)
    return full_weights(critic), critic.update(own_part(valued(ARCHS["qwen2"]), critic), OBJECTIVE.loss)


def test_a_critic_saved_at_tp2_goes_on_at_pp2_and_is_read_as_what_it_is(tmp_path):
    weights, metrics = run_ranks(2, saved, tmp_path / "critic", LAYOUTS["tp2"])[0]
    with closing(MegatronSource(tmp_path / "critic")) as source:
        source.check()
        assert source.arch.value_head
        for name, weight in weights.items():
            assert torch.equal(source.read(name, full_region(weight.shape)), weight), name
    for found, stepped in run_ranks(2, resumed, tmp_path / "critic", LAYOUTS["pp2"]):
        assert found.keys() == weights.keys() and "score.weight" in found
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        assert stepped.keys() == metrics.keys()
        for name, value in metrics.items():
            assert math.isclose(stepped[name], value, rel_tol=RELATIVE, abs_tol=ABSOLUTE), name


def taken(grid):
    """Values under a head of zeros, and of an actor's weights both models."""
    policy = make_policy(ARCHS["qwen2"], grid)
    critic = make_critic(ARCHS["qwen2"], grid, seed=None, groups=policy._groups)
    critic.init_from_actor(policy.named_tensors())
    return critic.values(make_batch()), full_weights(policy), full_weights(critic)


def test_a_critic_begins_as_the_actor_and_values_all_states_zero():
    for values_R, actor, critic in run_ranks(2, taken, LAYOUTS["pp2"]):
        assert not values_R.any()
        assert not critic.pop("score.weight").any()
        assert actor.keys() == critic.keys()
        assert all(torch.equal(weight, actor[name]) for name, weight in critic.items())
