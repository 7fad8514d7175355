"""Mixtures of experts in transformers, and a dense reference of their layer that replays and balances."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mrl.types import RolloutBatch
from tests.megatron.actors import VOCAB
from tests.models.rope import both_spellings

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    **both_spellings({"rope_type": "default", "rope_theta": 5.0e5}),
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
}
MODELS = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 20}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [2]},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "head_dim": 16,
            "num_attention_heads": 6,
            "sliding_window": 9,
            **both_spellings(
                {
                    "rope_type": "yarn",
                    "rope_theta": 5.0e5,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                }
            ),
            "attn_implementation": "eager",
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
        },
    ),
}


def make_model(family: str, *, seed: int, **changes):
    """A model with random weights, norms and biases too."""
    name, sizes = MODELS[family]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SIZES, **sizes, **changes})
    )
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "norm" in key or key.endswith(("bias", "sinks")):
                value.add_(torch.randn(value.shape) * 0.3)
        for key, value in model.named_buffers():
            if "correction_bias" in key:
                value.copy_(torch.randn(value.shape) * 0.2)
    return model.float().eval()


def load_model(folder: str, family: str):
    return getattr(transformers, f"{MODELS[family][0]}ForCausalLM").from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def by_transformers(model, batch: RolloutBatch) -> Tensor:
    """Log-probabilities and entropy [2, R]."""
    parts = []
    for tokens, prompt_len in _sequences(batch):
        logprobs = model(tokens[None]).logits[0].double().log_softmax(-1)[prompt_len - 1 : -1]
        chosen = logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1)
        parts.append(torch.stack([chosen, -(logprobs.exp() * logprobs).sum(1)]))
    return torch.cat(parts, 1).float()


def _sequences(batch: RolloutBatch) -> list[tuple[Tensor, int]]:
    return list(zip(batch.tokens_P.split(batch.seq_lens_B.tolist()), batch.prompt_lens_B.tolist(), strict=True))


class DenseMixture(torch.nn.Module):
    """The layer by hand: every token through every expert, weighted by 0 where it was not chosen."""

    def __init__(self, block: torch.nn.Module, *, top_k: int, norm_topk_prob: bool) -> None:
        super().__init__()
        self.block, self.top_k, self.norm_topk_prob = block, top_k, norm_topk_prob
        self.given_TK: Tensor | None = None
        self.logits_TE: list[Tensor] = []
        self.chosen_TK: list[Tensor] = []
        self.num_changed = 0

    def forward(self, hidden: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's output; transformers 4 wants the router's logits beside it."""
        x = hidden.reshape(-1, hidden.size(-1))
        logits = x @ self.block.gate.weight.T
        probs = logits.softmax(-1)
        chosen = probs.topk(self.top_k, -1).indices
        if self.given_TK is not None:
            own = torch.zeros_like(probs).scatter(1, chosen, 1.0)
            chosen = torch.where(self.given_TK >= 0, self.given_TK, chosen)
            self.num_changed += int((own.gather(1, chosen) == 0).sum())
        weights = probs.gather(1, chosen)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        gate_up_EFH, down_EHF = experts_of(self.block)
        gate, up = torch.einsum("th,efh->tef", x, gate_up_EFH).chunk(2, -1)
        each = torch.einsum("tef,ehf->teh", F.silu(gate) * up, down_EHF)
        out = torch.einsum("te,teh->th", torch.zeros_like(probs).scatter(1, chosen, weights), each)
        if hasattr(self.block, "shared_expert"):
            out = out + self.block.shared_expert_gate(x).sigmoid() * self.block.shared_expert(x)
        self.logits_TE.append(logits)
        self.chosen_TK.append(chosen)
        is_version_4 = isinstance(self.block.experts, torch.nn.ModuleList)
        return (out.view_as(hidden), logits) if is_version_4 else out.view_as(hidden)


def experts_of(block: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """[gate; up] and down of all experts; transformers 4 has a module for each of them."""
    if hasattr(block.experts, "gate_up_proj"):
        return block.experts.gate_up_proj, block.experts.down_proj
    gate, up, down = ("w1", "w3", "w2") if hasattr(block.experts[0], "w1") else ("gate_proj", "up_proj", "down_proj")
    fused = [torch.cat([getattr(each, gate).weight, getattr(each, up).weight]) for each in block.experts]
    return torch.stack(fused), torch.stack([getattr(each, down).weight for each in block.experts])


@dataclass
class Reference:
    """What `by_hand` finds."""

    logprobs_R: Tensor
    nll: float
    grad_norm: float
    load_LE: Tensor
    entropy: float
    aux: float
    z: float
    chosen_PLK: Tensor = field(default_factory=lambda: torch.empty(0))
    changed_frac: float = 0.0


def by_hand(
    model,
    batch: RolloutBatch,
    *,
    given_PLK: Tensor | None = None,
    aux_coeff: float = 0.0,
    z_coeff: float = 0.0,
    cuts: tuple[int, ...] = (),
) -> Reference:
    """Loss, gradient norm and routing of a batch, with autograd through the dense layer, in fp64.

    The last token of a sequence is no input.

    Args:
        model: Changed for good.
        batch: `weights_R` set; the loss is minus their sum with the log-probabilities.
        given_PLK: Experts to replay.
        aux_coeff: Of the load-balancing loss of each microbatch.
        z_coeff: Of the z-loss.
        cuts: Sequences at which a new microbatch starts.
    """
    layers = model.model.layers
    norm = getattr(model.config, "norm_topk_prob", True)
    mixtures: list[DenseMixture] = []
    for layer in layers:
        name = "mlp" if hasattr(layer, "mlp") else "block_sparse_moe"  # mixtral's of transformers 4
        dense = DenseMixture(getattr(layer, name), top_k=model.config.num_experts_per_tok, norm_topk_prob=norm)
        setattr(layer, name, dense)
        mixtures.append(dense)
    model.double()
    lens = batch.seq_lens_B.tolist()
    given = given_PLK.split(lens) if given_PLK is not None else [None] * len(lens)
    parts = []
    for (tokens, prompt_len), choice in zip(_sequences(batch), given, strict=True):
        for index, layer in enumerate(mixtures):
            layer.given_TK = None if choice is None else choice[:-1, index].long()
        logprobs = model(tokens[None, :-1]).logits[0, prompt_len - 1 :].log_softmax(-1)
        parts.append(logprobs.gather(1, tokens[prompt_len:, None]).squeeze(1))
    logprobs_R = torch.cat(parts)
    nll = -(logprobs_R * batch.weights_R).sum()
    edges = [0, *cuts, len(lens)]
    inputs = sum(lens) - len(lens)
    aux = z = torch.zeros((), dtype=torch.float64)
    loads, entropies = [], []
    for layer in mixtures:
        load, entropy = 0, 0
        for first, last in itertools.pairwise(edges):
            logits = torch.cat(layer.logits_TE[first:last])
            chosen = torch.cat(layer.chosen_TK[first:last])
            tokens, experts = logits.shape
            counts = torch.zeros_like(logits).scatter(1, chosen, 1.0).sum(0)
            fraction, mean_prob = counts / (tokens * chosen.size(1)), logits.softmax(-1).mean(0)
            aux = aux + experts * (fraction * mean_prob).sum() * tokens / inputs
            z = z + logits.logsumexp(-1).square().mean() * tokens / inputs
            load = load + counts
            entropy = entropy - float((logits.softmax(-1) * logits.log_softmax(-1)).sum())
        loads.append(load)
        entropies.append(entropy / inputs)
    (nll + aux_coeff * aux + z_coeff * z).backward()
    norm = sum(float(parameter.grad.square().sum()) for parameter in model.parameters() if parameter.grad is not None)
    # -1 for the last token of each sequence, as the engine says it
    chosen_PLK = torch.stack(
        [torch.cat([F.pad(each, (0, 0, 0, 1), value=-1) for each in layer.chosen_TK]) for layer in mixtures], 1
    )
    return Reference(
        logprobs_R.detach().float(),
        float(nll.detach()),
        norm**0.5,
        torch.stack(loads).detach(),
        sum(entropies) / len(entropies),
        float(aux.detach()) / len(mixtures),
        float(z.detach()) / len(mixtures),
        chosen_PLK,
        sum(layer.num_changed for layer in mixtures) / (inputs * len(mixtures) * chosen_PLK.size(-1)),
    )
