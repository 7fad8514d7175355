"""Tiny random checkpoints, the engine that holds them, and transformers as the judge."""

from __future__ import annotations

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.checkpoint.formats.hf import load_from_hf
from mrl.config.config import RolloutConfig
from mrl.engines.native.engine import NativeEngine
from mrl.models._positions import for_run
from mrl.models.hf_config import arch_from_folder
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt
from tests.engines.specs import spec_of
from tests.models.rope import both_spellings

VOCAB = 99

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # spreads the logits: greedy decoding has no near ties
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3}
FAMILIES = {
    "qwen2": {"model_type": "qwen2", **SHAPE, **both_spellings(ROPE), "tie_word_embeddings": True},
    "qwen2_untied": {"model_type": "qwen2", **SHAPE, **both_spellings(ROPE), "tie_word_embeddings": False},
    "llama3_rope": {"model_type": "llama", **SHAPE, **both_spellings(LLAMA3_ROPE), "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", **SHAPE, "head_dim": 32, **both_spellings(ROPE), "tie_word_embeddings": True},
    "phi3": {
        "model_type": "phi3",
        **SHAPE,
        **both_spellings(ROPE),
        "tie_word_embeddings": False,
        "pad_token_id": None,
    },
    "mistral": {
        "model_type": "mistral",
        **SHAPE,
        **both_spellings(ROPE),
        "sliding_window": 10,
        "tie_word_embeddings": False,
    },
    "qwen2_windows": {
        "model_type": "qwen2",
        **SHAPE,
        **both_spellings(ROPE),
        **WINDOWS,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def make_checkpoint(folder, family="qwen2", *, families=FAMILIES, **overrides):
    """Saves a random model with biases and norms that matter; returns the folder."""
    settings = copy.deepcopy({**families[family], **overrides})  # some config classes change what they are given
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(sum(map(ord, family)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.copy_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return folder


def reference(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def make_engine(folder, *, tp_group=None, dtype=torch.float32, decode=str, **config):
    """An engine with the checkpoint's weights, as a refit would leave it."""
    settings = {"prompt_length": 64, "response_length": 64, "gpu_memory_utilization": 0.01, **config}
    rollout = RolloutConfig(**settings)
    arch = for_run(arch_from_folder(folder), rollout.max_sequence_length)
    engine = NativeEngine(spec_of(rollout, arch, tp_group=tp_group, dtype=dtype, decode=decode))
    refit(engine, folder, arch)
    return engine


def refit(engine, folder, arch, version=0):
    layout = engine.layout()
    tensors = {name: torch.zeros(stored.shape, dtype=getattr(torch, stored.dtype)) for name, stored in layout.items()}
    load_from_hf(folder, arch, layout, tensors)
    engine.begin_update()
    engine.update_weights([WeightSlice(name, full_region(value.shape), value) for name, value in tensors.items()])
    engine.finish_update(version)


def make_prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Prompt(uid=10 + i, prompt_ids=tuple(part), text="") for i, part in enumerate(ids)]
