"""TensorRT-LLM's checkpoint a second time: NVIDIA's fusion and sharding in plain torch, from whole tensors.

Shares nothing with mrl/resharding. Names, shapes and orders follow NVIDIA/TensorRT-LLM's `models/llama/convert.py`,
`models/qwen/model.py`, `models/convert_utils.py`, `layers/{moe,embedding,attention}.py` and `mapping.py`; functions
keep NVIDIA's names where they have one. `c` is the parsed config.json, `w` the Hugging Face tensors by name.
"""

import math

import torch

BASE_KEYS = {
    "architecture": str,
    "dtype": str,
    "logits_dtype": str,
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_size": int,
    "hidden_act": str,
    "norm_epsilon": float,
    "position_embedding_type": str,
    "max_position_embeddings": int,
    "qk_layernorm": bool,
    "use_parallel_embedding": bool,
    "embedding_sharding_dim": int,
    "mapping": dict,
    "quantization": dict,
    "mlp_bias": bool,
    "attn_bias": bool,
    "rotary_base": float,
    "rotary_scaling": (dict, type(None)),
    "disable_weight_only_quant_plugin": bool,
    "moe": dict,
}
MOE_KEYS = {"num_experts", "top_k", "normalization_mode", "sparse_mixer_epsilon", "tp_mode"}
LLAMA_KEYS = {"residual_mlp": bool, "remove_duplicated_kv_heads": bool}
QWEN_KEYS = {
    "qwen_type": str,
    "use_logn_attn": bool,
    "num_labels": int,
    "moe_intermediate_size": int,
    "moe_shared_expert_intermediate_size": int,
    "seq_length": int,
    "tie_word_embeddings": bool,
}
MAPPING_KEYS = {"world_size", "gpus_per_node", "cp_size", "tp_size", "pp_size", "moe_tp_size", "moe_ep_size"}
QUANT_KEYS = {
    "quant_algo",
    "kv_cache_quant_algo",
    "group_size",
    "smoothquant_val",
    "clamp_val",
    "has_zero_point",
    "pre_quant_scale",
    "exclude_modules",
}
ARCHITECTURES = {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
}


def check_config(c):
    """The keys, types and sizes that the loader needs of config.json."""
    qwen = c["architecture"].startswith("Qwen")
    for key, kind in (BASE_KEYS | (QWEN_KEYS if qwen else LLAMA_KEYS)).items():
        assert key in c and isinstance(c[key], kind), (key, c.get(key))
    assert c["architecture"] in ARCHITECTURES
    assert c["dtype"] in ("float32", "float16", "bfloat16")
    assert c["position_embedding_type"] == "rope_gpt_neox"
    m, moe = c["mapping"], c["moe"]
    assert set(m) == MAPPING_KEYS
    assert m["tp_size"] * m["pp_size"] * m["cp_size"] == m["world_size"]
    assert m["moe_tp_size"] * m["moe_ep_size"] == m["tp_size"]
    assert set(c["quantization"]) == QUANT_KEYS
    assert set(moe) == MOE_KEYS
    assert (moe["num_experts"] > 1) == (moe["top_k"] > 0)
    assert c["hidden_act"] == ("swiglu" if moe["num_experts"] else "silu")
    if qwen:
        kind = c["qwen_type"]
        assert (
            c["architecture"]
            == {
                "qwen2": "Qwen2ForCausalLM",
                "qwen2_moe": "Qwen2MoeForCausalLM",
                "qwen3": "Qwen3ForCausalLM",
                "qwen3_moe": "Qwen3MoeForCausalLM",
            }[kind]
        )
        assert c["qk_layernorm"] == kind.startswith("qwen3")
        assert c["attn_bias"] == kind.startswith("qwen2")
    else:
        assert not c["attn_bias"] and not c["qk_layernorm"]


def pp_layers(c, pp_rank):
    return torch.tensor_split(torch.arange(c["num_hidden_layers"]), c["mapping"]["pp_size"])[pp_rank].tolist()


def pad_vocab_size(vocab, tp):
    return math.ceil(vocab / tp) * tp


def split(v, tp, rank, dim=0):
    assert v.shape[dim] % tp == 0
    return torch.chunk(v, tp, dim=dim)[rank].contiguous()


def dup_kv_weight(v, num_heads, tp):
    assert tp % num_heads == 0
    heads = v.reshape(num_heads, v.shape[0] // num_heads, -1)
    return heads.repeat_interleave(tp // num_heads, dim=0).reshape(-1, *v.shape[1:])


def fuse_qkv(c, q, k, v, tp, rank):
    if c["num_key_value_heads"] < tp:
        k, v = (dup_kv_weight(x, c["num_key_value_heads"], tp) for x in (k, v))
    return torch.cat([split(x, tp, rank) for x in (q, k, v)])


def padded(v, tp):
    return torch.cat([v, v.new_zeros(pad_vocab_size(len(v), tp) - len(v), v.shape[1])])


def embedding(c, v, tp, rank):
    if not c["use_parallel_embedding"]:
        return v
    return split(padded(v, tp), tp, rank) if c["embedding_sharding_dim"] == 0 else split(v, tp, rank, 1)


def experts(c, w, prefix, rank):
    """[E_loc, 2F, H] and [E_loc, H, F]: `moe_load_expert` of the rank, w3 before w1."""
    m, count = c["mapping"], c["moe"]["num_experts"]
    ep_rank, tp_rank = rank % m["moe_ep_size"], rank // m["moe_ep_size"]
    each = count // m["moe_ep_size"]
    names = ("w1", "w2", "w3") if c["architecture"].startswith("Mixtral") else ("gate_proj", "down_proj", "up_proj")

    def stacked(which):
        held = range(ep_rank * each, (ep_rank + 1) * each)
        return torch.stack([w[f"{prefix}experts.{e}.{names[which - 1]}.weight"] for e in held])

    w1, w3 = (split(stacked(which), m["moe_tp_size"], tp_rank, 1) for which in (1, 3))
    return torch.cat([w3, w1], dim=-2), split(stacked(2), m["moe_tp_size"], tp_rank, 2)


def expected(c, w, world_rank):
    """Name -> tensor of `rank{world_rank}.safetensors`, in fp32; `dtypes` says how they are stored."""
    m = c["mapping"]
    tp = m["tp_size"]
    pp_rank, rank = divmod(world_rank, tp)
    found = {}
    if pp_rank == 0:
        found["transformer.vocab_embedding.weight"] = embedding(c, w["model.embed_tokens.weight"], tp, rank)
    if pp_rank == m["pp_size"] - 1:
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        found["lm_head.weight"] = split(padded(head, tp), tp, rank)
        found["transformer.ln_f.weight"] = w["model.norm.weight"]
    for local, layer in enumerate(pp_layers(c, pp_rank)):
        ours, theirs = f"transformer.layers.{local}.", f"model.layers.{layer}."
        found[ours + "input_layernorm.weight"] = w[theirs + "input_layernorm.weight"]
        found[ours + "post_layernorm.weight"] = w[theirs + "post_attention_layernorm.weight"]
        for what in ("weight", *(["bias"] if c["attn_bias"] else [])):
            q, k, v = (w[f"{theirs}self_attn.{x}_proj.{what}"] for x in "qkv")
            found[f"{ours}attention.qkv.{what}"] = fuse_qkv(c, q, k, v, tp, rank)
        found[ours + "attention.dense.weight"] = split(w[theirs + "self_attn.o_proj.weight"], tp, rank, 1)
        if c["qk_layernorm"]:
            for x in "qk":
                found[f"{ours}attention.{x}_layernorm.weight"] = w[f"{theirs}self_attn.{x}_norm.weight"]
        if not c["moe"]["num_experts"]:
            found[ours + "mlp.fc.weight"] = split(w[theirs + "mlp.gate_proj.weight"], tp, rank)
            found[ours + "mlp.gate.weight"] = split(w[theirs + "mlp.up_proj.weight"], tp, rank)
            found[ours + "mlp.proj.weight"] = split(w[theirs + "mlp.down_proj.weight"], tp, rank, 1)
            continue
        prefix = theirs + ("block_sparse_moe." if c["architecture"].startswith("Mixtral") else "mlp.")
        found[ours + "mlp.router.weight"] = w[prefix + "gate.weight"]
        found[ours + "mlp.fc.weight"], found[ours + "mlp.proj.weight"] = experts(c, w, prefix, rank)
        if c.get("qwen_type") == "qwen2_moe":
            shared = prefix + "shared_expert"
            up, gate = (split(w[f"{shared}.{x}_proj.weight"], tp, rank) for x in ("up", "gate"))
            found[ours + "mlp.shared_expert.fc.weight"] = torch.cat([up, gate])
            found[ours + "mlp.shared_expert.proj.weight"] = split(w[f"{shared}.down_proj.weight"], tp, rank, 1)
            found[ours + "mlp.shared_expert_gate.weight"] = w[f"{shared}_gate.weight"]
    return found


def stored_dtype(c, name):
    return torch.float32 if name.endswith("mlp.router.weight") else getattr(torch, c["dtype"])
