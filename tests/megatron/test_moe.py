"""A mixture of experts on the actor: the same numbers as transformers, and as one rank, at every layout."""

import pytest
import torch

from mrl.grid import Grid
from mrl.models.hf_config import arch_from_folder
from mrl.weights.load import load_from_hf
from tests.megatron.actors import EXPERT_LAYOUTS, MIXTURES, VOCAB, make_batch, make_policy, scores
from tests.ranks import run_ranks

PARITY = 1e-4  # the bound on log-probabilities in fp32; measured below 1e-5
LAYOUTS = {"single": Grid(1), **EXPERT_LAYOUTS}
UNEVEN = Grid(2, pp=2, first_stage_layers=3, last_stage_layers=1)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5.0e5},
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "head_dim": 20,
            "intermediate_size": 96,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": False,
            "intermediate_size": 96,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "intermediate_size": 40, "sliding_window": None}),
}
CASES = [(family, layout) for family in MODELS for layout in LAYOUTS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> (folder, batch, log-probabilities and entropy by transformers)."""
    import transformers

    found = {}
    for index, (family, (name, sizes)) in enumerate(MODELS.items()):
        torch.manual_seed(index)
        config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for key, value in model.named_parameters():
                if "norm" in key or key.endswith("bias"):
                    value.add_(torch.randn(value.shape) * 0.3)
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        batch = make_batch(6, seed=index, longest=50)
        found[family] = str(folder), batch, by_transformers(model, batch)
    return found


@torch.no_grad()
def by_transformers(model, batch):
    parts = []
    lens = batch.seq_lens_B.tolist()
    for tokens, prompt_len in zip(batch.tokens_P.split(lens), batch.prompt_lens_B.tolist(), strict=True):
        logprobs = model(tokens[None]).logits[0].double().log_softmax(-1)[prompt_len - 1 : -1]
        chosen = logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1)
        parts.append(torch.stack([chosen, -(logprobs.exp() * logprobs).sum(1)]))
    return torch.cat(parts, 1).float()


def by_megatron(folder, grid, batch, actor):
    arch = arch_from_folder(folder)
    policy = make_policy(arch, grid, seed=None, actor={"max_tokens_per_microbatch": 110, **actor})
    load_from_hf(folder, arch, policy.layout(), policy.named_tensors())
    return scores(policy, batch)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_log_probabilities_and_entropy_are_those_of_transformers(family, layout, folders):
    folder, batch, expected = folders[family]
    for found in run_ranks(LAYOUTS[layout].world_size, by_megatron, folder, LAYOUTS[layout], batch, {}):
        torch.testing.assert_close(found, expected, rtol=0, atol=PARITY)


def names_and_shapes(grid, name):
    policy = make_policy(MIXTURES[name], grid, seed=None)
    return {key: tuple(value.shape) for key, value in policy.named_tensors().items()} == {
        key: value.shape for key, value in policy.layout().items()
    }


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("grid", [*EXPERT_LAYOUTS.values(), UNEVEN], ids=[*EXPERT_LAYOUTS, "uneven"])
def test_parameters_are_those_of_the_layout(name, grid):
    assert all(run_ranks(grid.world_size, names_and_shapes, grid, name))
