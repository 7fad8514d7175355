"""The Megatron actor computes what transformers computes, at every layout, from the same Hugging Face folder."""

import pytest
import torch

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, LAYOUTS, VOCAB, make_batch, make_policy, scores
from tests.models.rope import both_spellings
from tests.ranks import run_ranks

PARITY = 1e-4  # the bound on log-probabilities in fp32; measured below 1e-5
TEMPERATURE = 0.7
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    **both_spellings({"rope_type": "default", "rope_theta": 5.0e5}),
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5.0e4,
    "factor": 4.0,
    "low_freq_factor": 1.5,  # not Megatron's constants 1, 4 and 8192
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "llama": ("Llama", {**SIZES, **both_spellings(LLAMA3), "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 20, "tie_word_embeddings": True}),
    "phi3": ("Phi3", {**SIZES, "tie_word_embeddings": False, "pad_token_id": None}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 17, "tie_word_embeddings": False}),
    "qwen2_windows": (
        "Qwen2",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
        },
    ),
}
ONE_LAYOUT = ("phi3", "mistral", "qwen2_windows")
"""Tested in fewer layouts: what differs between them is in one layer."""
FAMILIES = [
    (family, layout)
    for family in MODELS
    for layout in LAYOUTS
    if family not in ONE_LAYOUT or layout in ("single", "tp2_pp2")
]
WIDE = ParallelLayout(4, tp=4)
"""More tensor-parallel ranks than key-value heads."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> (folder, batch, log-probabilities and entropy by transformers)."""
    import transformers

    found = {}
    for index, (family, (name, sizes)) in enumerate(MODELS.items()):
        torch.manual_seed(index)
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "norm" in key or key.endswith("bias"):
                    value.add_(torch.randn(value.shape) * 0.3)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        batch = make_batch(6, seed=index, longest=70)
        found[family] = str(folder), batch, by_transformers(model, batch)
    return found


@torch.no_grad()
def by_transformers(model, batch):
    parts = []
    lens = batch.seq_lens_B.tolist()
    for tokens, prompt_len in zip(batch.tokens_P.split(lens), batch.prompt_lens_B.tolist(), strict=True):
        logprobs = (model(tokens[None]).logits[0].double() / TEMPERATURE).log_softmax(-1)[prompt_len - 1 : -1]
        chosen = logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1)
        parts.append(torch.stack([chosen, -(logprobs.exp() * logprobs).sum(1)]))
    return torch.cat(parts, 1).float()


def by_megatron(folder, grid, batch):
    arch = arch_from_folder(folder)
    policy = make_policy(
        arch, grid, seed=None, rollout={"temperature": TEMPERATURE}, actor={"max_tokens_per_microbatch": 150}
    )
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    return scores(policy, batch)


@pytest.mark.parametrize(("family", "layout"), FAMILIES)
def test_log_probabilities_and_entropy_are_those_of_transformers(family, layout, folders):
    folder, batch, expected = folders[family]
    for found in run_ranks(LAYOUTS[layout].world_size, by_megatron, folder, LAYOUTS[layout], batch):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)


@pytest.mark.slow
def test_more_tensor_parallel_ranks_than_key_value_heads(folders):
    folder, batch, expected = folders["qwen3"]
    for found in run_ranks(WIDE.world_size, by_megatron, folder, WIDE, batch):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)


def names_and_shapes(grid, name):
    policy = make_policy(ARCHS[name], grid, seed=None)
    stored = {key: value.shape for key, value in policy.layout().items()}
    tensors = policy.named_tensors()
    # padding rows of the vocabulary are zero, nothing else is anything yet
    empty = all(
        bool(torch.isnan(tensor[: _true_rows(policy, key)]).all()) and not tensor[_true_rows(policy, key) :].any()
        for key, tensor in tensors.items()
    )
    return stored == {key: tuple(value.shape) for key, value in tensors.items()}, empty


def _true_rows(policy, key):
    padding = policy.layout()[key].padding
    return padding[0][0][0] if padding else policy.layout()[key].shape[0]


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("layout", ["pp2_vpp2", "tp2_pp2"])
def test_parameters_are_those_of_the_layout_and_nan_until_loaded(name, layout):
    assert run_ranks(LAYOUTS[layout].world_size, names_and_shapes, LAYOUTS[layout], name) == [
        (True, True) for _ in range(LAYOUTS[layout].world_size)
    ]


def forgotten():
    policy = make_policy(ARCHS["qwen2"], ParallelLayout(1), seed=None)
    return scores(policy, make_batch(3))


def test_a_model_without_weights_scores_nan():
    assert torch.isnan(run_ranks(1, forgotten)[0]).all()
