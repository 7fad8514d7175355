"""Stands in for TensorRT-LLM's models: a checkpoint's weights, and its config as a class of the architecture's own."""

from __future__ import annotations

import json
from collections import defaultdict

from safetensors.torch import load_file

from tests.trtllm.signature import signed


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
        return PretrainedModel(config, load_file(f"{ckpt_dir}/rank{config.rank}.safetensors"))


MODEL_MAP = defaultdict(lambda: PretrainedModel)
