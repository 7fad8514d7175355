"""What vLLM keeps under truncation: told of every token, and an actor with equal weights has a ratio of 1 over it."""

from dataclasses import replace

import pytest
import torch

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.engines.base import SamplingConfig
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from tests.engines.native.tiny import make_prompts, reference, refit
from tests.engines.vllm import tiny
from tests.megatron import truncation
from tests.megatron.actors import make_policy
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

RATIO = 1e-5
"""The project's bound."""


def ratios(grid, folder):
    """By cut: ratios of an actor with the weights that sampled, with the support and without, and kept masses."""
    arch, groups, found = arch_from_folder(folder), None, {}
    with tiny.engine(folder) as engine:
        for name, cut in truncation.CUTS.items():
            rollout = vars(truncation.rollout_config(cut))
            policy = make_policy(arch, grid, rollout=rollout, groups=groups, seed=None)
            groups = policy._groups
            load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
            data, mass = truncation.sampled(policy, engine, cut)
            logprobs_R, _ = policy.score(data.batch)
            told = torch.stack([logprobs_R, truncation.uncorrected(policy, data.batch)])
            told = truncation.in_order(policy, data.batch, told - data.batch.rollout_logprobs_R)
            found[name] = (*told.exp(), mass)
    return found


@pytest.fixture(scope="module")
def gentle(tmp_path_factory):
    """A model with smaller logits, whose rounding is far below the bound on every processor."""
    return str(tiny.make_checkpoint(tmp_path_factory.mktemp("gentle"), families=tiny.FAMILIES, initializer_range=0.08))


@pytest.mark.parametrize(
    "grid", [ParallelLayout(1), ParallelLayout(2, tp=2), ParallelLayout(2, pp=2)], ids=["single", "tp2", "pp2"]
)
def test_equal_weights_give_a_ratio_of_1_and_without_the_support_the_kept_mass(grid, gentle):
    for found in run_ranks(grid.world_size, ratios, grid, gentle):
        for name in truncation.CUTS:
            corrected, without, mass = found[name]

            assert (corrected - 1).abs().max() < RATIO, name
            torch.testing.assert_close(without, mass, rtol=RATIO, atol=0)
            assert mass.mean() < 0.97, name


def told(folder):
    """In parts of a prompt, a few at a time, and after a stop string: the same tokens, the same supports."""
    setting = SamplingConfig(n=2, max_tokens=20, temperature=0.8, top_p=0.9, seed=5, return_kept_tokens=True)
    prompts, found = make_prompts((40, 3, 20)), {}
    for name, config in {"together": {}, "in parts": {"max_num_batched_tokens": 17, "max_num_seqs": 2}}.items():
        with tiny.engine(folder, **config) as engine:
            engine.spec = replace(engine.spec, decode=lambda ids: "".join(f"[{one}]" for one in ids))
            refit(engine, folder, arch_from_folder(folder))
            found[name] = engine.generate(prompts, setting)
            found[f"{name}, cut"] = engine.generate(prompts, replace(setting, stop=("[7]", "[11]", "[30]")))
            assert all(
                one.kept_tokens is None for one in engine.generate(prompts, replace(setting, return_kept_tokens=False))
            )
    return found


def test_every_token_has_its_support_in_any_company(folders):
    folder = folders("qwen2")
    model = reference(folder)
    (found,) = run_ranks(1, told, folder)
    assert any(
        len(a.response_ids) < len(b.response_ids)
        for a, b in zip(found["together, cut"], found["together"], strict=True)
    )
    for name, rollouts in found.items():
        for rollout, whole in zip(rollouts, found["together"], strict=True):
            ids, start = [*rollout.prompt.prompt_ids, *rollout.response_ids], len(rollout.prompt.prompt_ids)
            with torch.no_grad():
                probs = (model(torch.tensor([ids])).logits[0, start - 1 : -1] / 0.8).softmax(-1)
            rows = torch.arange(len(rollout.response_ids)).repeat_interleave(rollout.kept_tokens.counts_R)
            mass = torch.zeros(len(rollout.response_ids)).index_add_(
                0, rows, probs[rows, rollout.kept_tokens.ids_K.long()]
            )
            torch.testing.assert_close(torch.tensor(rollout.log_kept_mass).exp(), mass, rtol=1e-3, atol=0)
            assert rollout.response_ids == whole.response_ids[: len(rollout.response_ids)], name
            assert (
                rollout.kept_tokens.counts_R.tolist()
                == whole.kept_tokens.counts_R[: len(rollout.response_ids)].tolist()
            )
