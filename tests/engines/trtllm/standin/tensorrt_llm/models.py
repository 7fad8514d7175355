"""Stands in for TensorRT-LLM's models: a checkpoint's weights, and its config as a class of the architecture's own."""

from __future__ import annotations

import json
from collections import defaultdict

from safetensors.torch import load_file

from tests.engines.trtllm.signature import signed


class PretrainedConfig:
    def __init__(self, given):
        self.given, self.rank = given, 0
        self.architecture, self.logits_dtype = given["architecture"], given["logits_dtype"]

    @staticmethod
    @signed("tensorrt_llm.models.PretrainedConfig.from_json_file")
    def from_json_file(config_file):
        with open(config_file) as file:
            return PretrainedConfig(json.load(file))

    @signed("tensorrt_llm.models.PretrainedConfig.set_rank")
    def set_rank(self, rank):
        self.rank = rank


class PretrainedModel:
    def __init__(self, config, weights):
        self.config, self.weights = config, weights

    @staticmethod
    @signed("tensorrt_llm.models.PretrainedModel.from_checkpoint")
    def from_checkpoint(ckpt_dir, rank=None, config=None, *, preprocess_weights_hook=None):
        weights = load_file(f"{ckpt_dir}/rank{config.rank}.safetensors")
        missing = sorted(_shared_experts(config) - set(weights))
        if missing:
            raise RuntimeError(f"Required but not provided tensors:{missing}")
        return PretrainedModel(config, weights)


def _shared_experts(config):
    """Tensors of qwen2_moe's `mlp`, which is a `SharedMoE` (layers/moe.py): the shared expert is inside of it."""
    if config.given.get("qwen_type") != "qwen2_moe":
        return set()
    mapping, layers = config.given["mapping"], config.given["num_hidden_layers"]
    stage = config.rank // mapping["tp_size"]
    held = layers // mapping["pp_size"] + (stage < layers % mapping["pp_size"])
    names = ("shared_expert.fc", "shared_expert.proj", "shared_expert_gate")
    return {f"transformer.layers.{layer}.mlp.{name}.weight" for layer in range(held) for name in names}


MODEL_MAP = defaultdict(lambda: PretrainedModel)
