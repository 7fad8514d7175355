"""Gemma 3: log-probabilities, entropies and gradients of the actor are transformers', in every layout."""

from functools import cache

import pytest
import torch
import transformers

from mrl.algorithms.base import build
from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import AlgorithmConfig, RolloutConfig
from mrl.megatron import model as model_of_megatron
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf_names import locate_tensors
from tests.megatron.actors import CONSTANT, VOCAB, full_gradients, make_batch, make_policy, own_part, scores
from tests.megatron.autoregressive import scores_and_gradients
from tests.ranks import run_ranks

PARITY = 1e-5
GRADIENT = 1e-5  # of the largest gradient of a tensor
LONGEST = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": None,
}
MODELS = {
    # two windowed layers of three; scores are scaled otherwise than by the head's size
    "windows": {"sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    "linear": {
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
        "rope_theta": 300.0,
        "rope_local_base_freq": 50.0,
        "query_pre_attn_scalar": 16,
    },
    # the window hides nothing, and the layers still differ in their positions
    "long_window": {"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
}
LAYOUTS = {
    "single": (ParallelLayout(1), {}, {}),
    "uncompiled": (ParallelLayout(1), {}, {}),
    "tp2": (ParallelLayout(2, tp=2), {"parallel": {"sequence_parallel": False}}, {}),
    "tp2_pp2": (ParallelLayout(4, tp=2, pp=2), {}, {}),
    "cp2": (ParallelLayout(2, cp=2), {}, {}),
    "uncompiled_cp2": (ParallelLayout(2, cp=2), {}, {}),
    "exact_tp2": (ParallelLayout(2, tp=2), {}, {"true_on_policy": True}),
}
GROUPED = {"tp2_pp2", "cp2", "uncompiled_cp2"}
"""Layouts in which the sequences of a prompt share its tokens; elsewhere they are computed alone."""


def batch_of():
    """Sequences longer than the windows and one that is not longer; groups share their prompt."""
    batch = make_batch(6, seed=3, longest=LONGEST // 2)
    assert batch.seq_lens_B.min() <= 12 < batch.seq_lens_B.max()
    return batch


@cache
def model_of(name, root):
    """Folder, log-probabilities and entropies, and gradients by transformers."""
    torch.manual_seed(len(name))
    settings = transformers.AutoConfig.for_model("gemma3_text", **SIZES, **MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key:
                value.add_(torch.randn(value.shape) * 0.3)
    folder = root / name
    model.save_pretrained(folder)
    logprobs_R, entropies_R, gradients = scores_and_gradients(model, batch_of())
    return folder, torch.stack([logprobs_R, entropies_R]), gradients


def by_megatron(folder, layout, batch):
    grid, options, rollout = LAYOUTS[layout]
    arch = arch_from_folder(folder)
    actor = {"clip_grad": 0.0, "use_distributed_optimizer": False, "max_tokens_per_microbatch": 120}
    actor["use_prefix_grouper"] = layout in GROUPED
    rollout = {"prompt_length": 20, "response_length": 20, **rollout}
    with pytest.MonkeyPatch.context() as patch:
        if layout.startswith("uncompiled"):
            patch.setattr(model_of_megatron, "compiles", lambda dtype: False)
        policy = make_policy(arch, grid, seed=None, actor=actor, rollout=rollout, **options)
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    found = scores(policy, batch)
    policy.start_optimizer(CONSTANT)
    policy.update(own_part(batch, policy), build(AlgorithmConfig(name="sft"), RolloutConfig()))
    return found, full_gradients(policy)


CASES = [(name, layout) for name in MODELS for layout in ("single", "uncompiled")]
CASES += [("windows", layout) for layout in LAYOUTS if layout not in ("single", "uncompiled")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_scores_and_gradients_are_those_of_transformers(name, layout, tmp_path_factory):
    folder, expected, gradients = model_of(name, tmp_path_factory.getbasetemp())
    for found, own in run_ranks(LAYOUTS[layout][0].world_size, by_megatron, str(folder), layout, batch_of()):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)
        names = locate_tensors(arch_from_folder(folder), {key: tuple(each.shape) for key, each in gradients.items()})
        assert len(own) == len(gradients)
        for key, gradient in own.items():
            theirs = gradients[names[key].stored]
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=GRADIENT * float(theirs.abs().max()))
