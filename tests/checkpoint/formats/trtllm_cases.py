"""Models and mappings for TensorRT-LLM checkpoints, and a plain way to write one."""

import torch

from mrl.checkpoint.formats.trtllm import TrtllmTarget
from mrl.models.presets import arch_from_preset
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.hf import hf_layout
from mrl.resharding.trtllm import TrtllmMapping
from tests.resharding.archs import ODD_VOCAB, filled

DENSE = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
EXPERTS = {**DENSE, "moe_intermediate_size": 8, "num_key_value_heads": 2}


def model(preset, **overrides):
    return arch_from_preset(preset, overrides, ODD_VOCAB)


ARCHS = {
    "llama": model("llama_tiny", **DENSE, num_key_value_heads=4),
    "llama tied": model("llama_tiny", **DENSE, num_key_value_heads=2, tie_word_embeddings=True),
    "phi3": model("phi3_tiny", **DENSE, num_key_value_heads=2),
    "qwen2 tied, one kv head": model("qwen2_tiny", **DENSE, num_key_value_heads=1),
    "qwen2": model("qwen2_tiny", **DENSE, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3 tied, head_dim apart": model("qwen3_tiny", **DENSE, num_key_value_heads=2, head_dim=6),
    "mixtral": model("mixtral_tiny", **{**DENSE, "num_key_value_heads": 2}, num_local_experts=4),
    "qwen2_moe": model("qwen2_moe_tiny", **EXPERTS, num_experts=4, shared_expert_intermediate_size=12),
    "qwen3_moe": model("qwen3_moe_tiny", **EXPERTS, num_experts=4, head_dim=6),
}

_EMBEDDINGS = ((False, 0), (True, 0), (True, 1))


def mappings(arch):
    """Every size that fits: tp, pp, expert sizes, embeddings."""
    for tp in (1, 2, 4):
        for pp in (1, 2, 3):
            for ep in [size for size in (1, 2, 4) if tp % size == 0] if arch.moe else [1]:
                for parallel, dim in _EMBEDDINGS if tp > 1 else _EMBEDDINGS[:1]:
                    yield TrtllmMapping(tp, pp, tp // ep, ep, parallel, dim)


CASES = [(name, mapping) for name, arch in ARCHS.items() for mapping in mappings(arch)]


def case_id(case):
    m = case[1]
    table = f"-embed{m.embedding_sharding_dim}" if m.use_parallel_embedding else ""
    return f"{case[0]}-tp{m.tp_size}-pp{m.pp_size}-mtp{m.moe_tp_size}-mep{m.moe_ep_size}{table}"


def weights(arch, dtype="float32", seed=0):
    """Random Hugging Face tensors in fp32 that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(stored.shape, generator=generator).to(DTYPES[dtype]).float()
        for name, stored in hf_layout(arch, "float32").items()
    }


def write_checkpoint(folder, target, hf):
    """What `mrl/commands/convert/convert.py` does, without its care: every file, tensor by tensor."""
    records = {}
    for file in target.files:
        stream = (
            (name, filled({name: stored}, hf)[name].to(DTYPES[stored.dtype])) for name, stored in file.layout.items()
        )
        records[file.name] = target.write(folder / file.name, file, stream)
    target.finish(folder, records)


def written(folder, arch, mapping, dtype="float32", hf=None, **options):
    folder.mkdir(exist_ok=True)
    write_checkpoint(folder, TrtllmTarget(arch, mapping, dtype, **options), weights(arch, dtype) if hf is None else hf)
    return folder


def as_nvidia_names(arch, hf):
    """Hugging Face tensors as the oracle wants them: phi3's fused rows apart."""
    found = dict(hf)
    if arch.family == "phi3":
        for layer in range(arch.num_layers):
            prefix = f"model.layers.{layer}."
            kv = arch.num_kv_heads * arch.head_dim
            parts = found.pop(prefix + "self_attn.qkv_proj.weight").split([arch.num_heads * arch.head_dim, kv, kv])
            found |= {f"{prefix}self_attn.{x}_proj.weight": part for x, part in zip("qkv", parts, strict=True)}
            gate, up = found.pop(prefix + "mlp.gate_up_proj.weight").chunk(2)
            found |= {prefix + "mlp.gate_proj.weight": gate, prefix + "mlp.up_proj.weight": up}
    return found
