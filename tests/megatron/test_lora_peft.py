"""Low-rank adapters in float64: scores, gradients and updated adapters are those of peft on transformers."""

from dataclasses import replace

import peft
import pytest
import torch
import transformers
from torch import nn

from mrl.config.config import ActorConfig, LoraConfig
from mrl.models.hf_config import family_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.lora import first_expert, num_parameters
from tests.megatron.actors import ARCHS, CONTEXT_LAYOUTS, EXPERT_LAYOUTS, LAYOUTS, MIXTURES, PEAK, make_batch
from tests.megatron.lora_ranks import KeepsFloat64, trained
from tests.ranks import run_ranks

TOLERANCE = 1e-9
"""Largest difference over the largest entry; measured: 7e-15."""
LORA = LoraConfig(rank=3, alpha=12.0)
SHARED = LoraConfig(rank=3, alpha=12.0, share_expert_adapters=True)
PREFIX = "base_model.model."
MODELS = {name: arch for name, arch in {**ARCHS, **MIXTURES}.items() if arch.mla is None}


class Experts(nn.Module):
    """Experts as modules, as transformers 4 had them: peft's pairs are those of linear modules."""

    def __init__(self, num, hidden, width, names, limit=None):
        super().__init__()
        gate, up, down = names
        for number in range(num):
            parts = {gate: (hidden, width), up: (hidden, width), down: (width, hidden)}
            layers = {name: nn.Linear(*shape, bias=limit is not None) for name, shape in parts.items()}
            self.add_module(str(number), nn.ModuleDict(layers))
        self.names, self.limit = names, limit

    def forward(self, x_nH, chosen_nK, weights_nK):
        total = torch.zeros_like(x_nH)
        for number, expert in self.named_children():
            rows, place = torch.where(chosen_nK == int(number))
            gate, up, down = (expert[name] for name in self.names)
            x = self._activated(gate(x_nH[rows]), up(x_nH[rows]))
            total = total.index_add(0, rows, weights_nK[rows, place, None] * down(x))
        return total

    def _activated(self, gate, up):
        if self.limit is None:
            return nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (gate * 1.702).sigmoid() * (up + 1)


def their_name(name):
    return name.replace("block_sparse_moe", "mlp")  # as transformers 5 calls it


def peft_model(arch, weights, adapters, lora):
    config = transformers.AutoConfig.for_model(**family_of(arch).arch_to_hf(arch))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if arch.moe is not None:
        names = ("w1", "w3", "w2") if arch.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        for layer in (model.model.layers[number] for number in arch.moe_layers):
            sizes = arch.moe.num_experts, arch.hidden_size, arch.moe.intermediate_size
            layer.mlp.experts = Experts(*sizes, names, arch.moe.activation_limit)
        model.config.model_type = "unfused"  # peft converts pairs of experts for the types that it knows as fused
    model = model.double().eval()
    model.model.rotary_emb.float()  # angles in float32, as Megatron computes them
    found = model.load_state_dict({their_name(name): weight for name, weight in weights.items()}, strict=False)
    assert not found.unexpected_keys and set(found.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    adapters = {their_name(name): adapter for name, adapter in adapters.items()}
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in adapters}
    options = {"r": lora.rank, "lora_alpha": lora.alpha, "use_rslora": lora.use_rslora, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=sorted(modules), **options))
    assert not peft.set_peft_model_state_dict(model, adapters).unexpected_keys
    trainable = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    assert trainable.keys() == adapters.keys()
    if lora.share_expert_adapters:
        for name, parameter in trainable.items():
            module = model.get_submodule(name.removesuffix(".weight"))["default"]
            module.weight = trainable[first_expert(name)]
            assert torch.equal(parameter, module.weight)
        trainable = {name: trainable[first_expert(name)] for name in trainable}
    return model, trainable


def logprobs_of(model, batch):
    parts, start = [], 0
    for prompt, response in zip(batch.prompt_lens_B.tolist(), batch.response_lens_B.tolist(), strict=True):
        tokens = batch.tokens_P[start : start + prompt + response]
        start += prompt + response
        with KeepsFloat64():
            logits = model(tokens[None]).logits[0]
        parts.append(logits.log_softmax(-1)[prompt - 1 : -1].gather(1, tokens[prompt:, None]).squeeze(1))
    return torch.cat(parts)


def assert_close(found, expected):
    assert found.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def check(arch, grid, lora=LORA):
    (weights, adapters, scored, steps), *_ = run_ranks(grid.world_size, trained, arch, grid, lora)
    model, trainable = peft_model(arch, weights, adapters, lora)
    with torch.no_grad():
        assert_close(scored, logprobs_of(model, make_batch()))
        with model.disable_adapter():
            assert (scored - logprobs_of(model, make_batch())).abs().max() > 0.2
    actor = ActorConfig()
    assert sum(parameter.numel() for parameter in set(trainable.values())) == num_parameters(arch, lora)
    betas, decay = (actor.adam_beta1, actor.adam_beta2), actor.weight_decay
    parameters = list(dict.fromkeys(trainable.values()))
    adam = torch.optim.AdamW(parameters, lr=PEAK, betas=betas, eps=actor.adam_eps, weight_decay=decay)
    for step, (gradients, updated) in enumerate(steps):
        batch = make_batch(seed=step)
        adam.zero_grad()
        (-(batch.weights_R * logprobs_of(model, batch)).sum()).backward()
        assert len(gradients) == len(updated) == len(trainable)
        for name, gradient in gradients.items():
            assert_close(gradient, trainable[their_name(name)].grad)
        adam.step()
        for name, adapter in updated.items():
            assert_close(adapter, trainable[their_name(name)].detach())


@pytest.mark.parametrize("family", MODELS)
def test_families(family):
    check(MODELS[family], ParallelLayout(1))


@pytest.mark.parametrize(("family", "layout"), [
    ("qwen2", LAYOUTS["tp2"]), ("qwen2_untied", LAYOUTS["tp2_pp2"]), ("qwen3", CONTEXT_LAYOUTS["cp2"]),
    ("qwen2_moe", EXPERT_LAYOUTS["tp2_ep2_etp2"]), ("mixtral", EXPERT_LAYOUTS["tp2_ep2"]),
], ids=["qwen2_tp2", "qwen2_tp2_pp2", "qwen3_cp2", "qwen2_moe_ep2_etp2", "mixtral_tp2_ep2"])  # fmt: skip
def test_layouts(family, layout):
    check(MODELS[family], layout, LoraConfig(rank=3, alpha=4.0, use_rslora=True))


@pytest.mark.parametrize(("family", "layout"), [
    ("qwen2_moe", "ep2"), ("qwen3_moe", "ep2_dp2"), ("qwen2_moe", "tp2_ep2_etp2"), ("mixtral", "ep2_pp2"),
])  # fmt: skip
def test_adapters_that_the_experts_share(family, layout):
    check(MODELS[family], EXPERT_LAYOUTS[layout], SHARED)


def test_adapters_that_the_experts_of_a_process_share():
    check(MODELS["mixtral"], ParallelLayout(1), replace(SHARED, target_modules=["w1", "q_proj"]))
