"""gpt-oss on the actor: gradients are transformers', also of sinks and biases, and sinks are exact on every path."""

import pytest
import torch

from mrl.algorithms.base import build
from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.megatron import attention
from mrl.models.hf_config import arch_from_folder
from mrl.models.kernels.sdpa import attend
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf_names import locate_tensors
from tests.megatron.actors import CONSTANT, full_gradients, make_batch, make_policy, own_part, scores
from tests.megatron.autoregressive import scores_and_gradients
from tests.megatron.mixtures import make_model
from tests.ranks import run_ranks

PARITY = 1e-5
GRADIENT = 1e-5  # of the largest gradient of a tensor
SMALLEST = 1e-2  # those of key biases nearly cancel: they move all scores alike, and only sinks see it
LAYOUTS = {
    "single": ParallelLayout(1),
    "ep2": ParallelLayout(2, ep=2),
    "tp2_ep2": ParallelLayout(2, tp=2, ep=2, etp=1),
    "ep2_pp2": ParallelLayout(4, pp=2, ep=2),
    "cp2_ep2": ParallelLayout(2, cp=2, ep=2),
}
GROUPED = {"tp2_ep2", "cp2_ep2"}
"""Layouts in which the sequences of a prompt share its tokens; elsewhere they are computed alone."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Folder, batch, log-probabilities and gradients by transformers; sequences are longer than the window."""
    model = make_model("gpt_oss", seed=3, num_hidden_layers=2, initializer_range=0.15, experts_implementation="eager")
    folder = tmp_path_factory.mktemp("gpt_oss")
    model.save_pretrained(folder)
    model.double()
    batch = make_batch(6, seed=2, longest=40)
    assert batch.seq_lens_B.max() > 2 * model.config.sliding_window
    logprobs_R, _, gradients = scores_and_gradients(model, batch)
    return str(folder), batch, logprobs_R.float(), {key: value.float() for key, value in gradients.items()}


def by_megatron(folder, layout, batch, longest_at_once):
    arch = arch_from_folder(folder)
    actor = {"clip_grad": 0.0, "use_distributed_optimizer": False, "max_tokens_per_microbatch": 120}
    actor["use_prefix_grouper"] = layout in GROUPED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "LONGEST_AT_ONCE", longest_at_once)
        policy = make_policy(arch, LAYOUTS[layout], seed=None, actor=actor)
        load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
        logprobs = scores(policy, batch)[0]
        policy.start_optimizer(CONSTANT)
        metrics = policy.update(own_part(batch, policy), build(AlgorithmConfig(name="sft"), RolloutConfig()))
    return logprobs, full_gradients(policy), metrics["actor/grad_norm"]


@pytest.mark.parametrize(
    ("layout", "longest_at_once"), [*((layout, 32) for layout in LAYOUTS), ("single", 0), ("tp2_ep2", 0)]
)
def test_log_probabilities_and_gradients_are_those_of_transformers(layout, longest_at_once, judged):
    folder, batch, expected, gradients = judged
    norm = sum(float(each.double().square().sum()) for each in gradients.values()) ** 0.5
    for logprobs, found, found_norm in run_ranks(
        LAYOUTS[layout].world_size, by_megatron, folder, layout, batch, longest_at_once
    ):
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=PARITY)
        assert found_norm == pytest.approx(norm, rel=1e-5)
        names = locate_tensors(arch_from_folder(folder), {key: tuple(each.shape) for key, each in gradients.items()})
        for key, gradient in found.items():
            theirs = gradients[names[key].stored]
            largest = max(float(theirs.abs().max()), SMALLEST)
            torch.testing.assert_close(
                gradient,
                names[key].view_in(theirs),
                rtol=0,
                atol=GRADIENT * largest,
                msg=lambda m, key=key: f"{key}: {m}",
            )


@pytest.mark.parametrize("masked", [None, torch.bool, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_attention_with_sinks_is_a_softmax_with_one_more_logit(heads, masked):
    generator = torch.Generator().manual_seed(heads)

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    query, key, value, sinks = (
        drawn(3, heads, 7, 8),
        drawn(3, heads // 2 or 1, 7, 8),
        drawn(3, heads // 2 or 1, 7, 8),
        drawn(heads),
    )
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    mask = (
        None
        if masked is None
        else seen
        if masked is torch.bool
        else torch.zeros(7, 7).double().masked_fill(~seen, -torch.inf)
    )
    groups = heads // key.size(1)
    every = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * 0.3
    every = torch.cat([every.masked_fill(~seen, -torch.inf), sinks.view(-1, 1, 1).expand(3, -1, 7, 1)], -1)
    expected = every.softmax(-1)[..., :-1] @ value.repeat_interleave(groups, 1)
    found = attend(query, key, value, mask, 0.3, sinks)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    inputs = (query, key, value, sinks)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
