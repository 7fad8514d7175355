"""Files of which docstrings and comments speak are there: beside the one that speaks, above it, or in mrl/."""

import ast
import io
import re
import tokenize

import pytest

from tests.source import PACKAGE, ROOT, tree_of

FOREIGN = {
    "Megatron-Core": (
        "dist_checkpointing/mapping.py",
        "models/common/embeddings/rope_utils.py",
        "models/gpt/gpt_layer_specs.py",
        "transformer/attention.py",
        "transformer/mlp.py",
        "transformer/moe/experts.py",
        "transformer/transformer_block.py",
        "transformer/transformer_layer.py",
    ),
    "TensorRT-LLM": (
        "_ipc_utils.py",
        "_torch/model_config.py",
        "_torch/models/checkpoints/hf/weight_mapper.py",
        "_torch/models/modeling_phi3.py",
        "_torch/modules/embedding.py",
        "_torch/modules/fused_moe/interface.py",
        "_torch/modules/fused_moe/quantization.py",
        "_torch/modules/linear.py",
        "_torch/pyexecutor/_util.py",
        "_torch/pyexecutor/llm_request.py",
        "_torch/route_capture.py",
        "builder.py",
        "executor/base_worker.py",
        "executor/worker.py",
        "layers/embedding.py",
        "layers/moe.py",
        "llmapi/llm_args.py",
        "llmapi/mpi_session.py",
        "mapping.py",
        "models/convert_utils.py",
        "models/llama/convert.py",
        "models/modeling_utils.py",
        "models/qwen/model.py",
        "quantization.py",
        "quantization/quantize.py",
        "runtime/generation.py",
        "runtime/model_runner.py",
        "usage/__init__.py",
    ),
    "torch": ("torch/_utils.py", "torch/serialization.py"),
    "transformers": ("modeling_rope_utils.py",),
    "verl": (
        "examples/data_preprocess/gsm8k.py",
        "ray_trainer.py",
        "reward_manager/naive.py",
        "verl/trainer/config/algorithm.py",
        "verl/trainer/ppo/metric_utils.py",
        "verl/trainer/ppo/rollout_corr_helper.py",
        "verl/utils/debug/metrics.py",
        "verl/utils/reward_score/gsm8k.py",
    ),
    "a user": ("/home/me/rewards.py", "path/to/file.py", "rewards.py"),
}
"""Whose -> files of other projects, and examples."""

FILES = sorted(path for top in ("mrl", "tools", "tests") for path in (ROOT / top).rglob("*.py"))


def mentions(path):
    """Words that end in .py; `<name>.py` stands for many."""
    texts = [node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Expr)]
    said = [node.value for node in texts if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    text = path.read_text(encoding="utf-8")
    if re.search(r"#.*\.py\b", text):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        said += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return {word for text in said for word in re.findall(r"(?<![\w>])[\w./-]+\.py\b", text)}


def missing(path):
    above = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
    return {word for word in mentions(path) if not any((folder / word).is_file() for folder in (*above, PACKAGE))}


@pytest.fixture(scope="module")
def unknown():
    return {path.relative_to(ROOT).as_posix(): missing(path) for path in FILES}


def test_files_that_are_spoken_of_exist(unknown):
    foreign = {name for names in FOREIGN.values() for name in names}
    assert {path: names - foreign for path, names in unknown.items() if names - foreign} == {}


def test_every_foreign_file_is_spoken_of(unknown):
    assert {name for names in FOREIGN.values() for name in names} - set().union(*unknown.values()) == set()
