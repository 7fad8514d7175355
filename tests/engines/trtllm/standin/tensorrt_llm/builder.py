"""Stands in for TensorRT-LLM's builder: an engine is the weights of a rank, by the names that `trtllm-build` gives."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.engines.trtllm.signature import Fields, signed

FUSED, GATE, FC = ".mlp.fused_fc.weight", ".mlp.gate.weight", ".mlp.fc.weight"


class BuildConfig(Fields):
    entry = "tensorrt_llm.builder.BuildConfig"


class Engine:
    def __init__(self, model, build_config):
        self._model, self._build_config = model, build_config

    @signed("tensorrt_llm.builder.Engine.save")
    def save(self, engine_dir):
        folder, model = Path(engine_dir), self._model
        torch.save(packed(model.weights), folder / f"rank{model.config.rank}.engine")
        if model.config.rank == 0:
            import tensorrt_llm

            config = {
                "version": tensorrt_llm.__version__,
                "pretrained_config": model.config.given,
                "build_config": vars(self._build_config),
            }
            (folder / "config.json").write_text(json.dumps(config))


@signed("tensorrt_llm.builder.build")
def build(model, build_config):
    return Engine(model, build_config)


def packed(weights):
    """The weights of a checkpoint as an engine has them: MLPs fused, and a table that no checkpoint has."""
    found = {name: tensor for name, tensor in weights.items() if not name.endswith((GATE, FC))}
    for name, gate in weights.items():
        if not name.endswith(GATE):
            continue
        found[name.removesuffix(GATE) + FUSED] = torch.cat([gate, weights[name.removesuffix(GATE) + FC]])
    experts = {name: tensor for name, tensor in weights.items() if name.endswith(FC) and name not in _gated(weights)}
    return found | experts | {"rotary_inv_freq": torch.zeros(4)}


def _gated(weights):
    return {name.removesuffix(GATE) + FC for name in weights if name.endswith(GATE)}


def unpacked(weights, layout):
    """The weights of an engine as a checkpoint has them."""
    found = {name: tensor for name, tensor in weights.items() if name in layout}
    for name, tensor in weights.items():
        if name.endswith(FUSED):
            gate, fc = tensor.chunk(2)
            found |= {name.removesuffix(FUSED) + GATE: gate, name.removesuffix(FUSED) + FC: fc}
    return found
