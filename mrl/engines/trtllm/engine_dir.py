"""A folder of built TensorRT-LLM engines: config.json and a rank{N}.engine for each rank.

Reads config.json ({version, pretrained_config, build_config}) and compares it with the model and the sizes of a run, so
that a wrong engine is rejected before any rank starts. Imports no torch and no TensorRT-LLM. The format is that of
TensorRT-LLM's `builder.py: Engine.save`, taken from its source and not from a built engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrl.checkpoint.formats.trtllm_config import CONFIG, TrtllmConfig, from_json, to_json
from mrl.config.config import Config
from mrl.config.json_file import read_json
from mrl.errors import UserError
from mrl.models.base import ArchSpec

_UNCOMPARED = ("mrl", "logits_dtype", "mapping", "quantization", "dtype", "use_parallel_embedding")
"""Keys of `to_json` that do not describe the model's structure."""


@dataclass(frozen=True)
class Wanted:
    """Requirements of a run on its engines.

    Attributes:
        arch: Architecture of the model.
        tp_size: Tensor-parallel size.
        pp_size: Pipeline stages.
        moe_ep_size: Expert-parallel size.
        dtype: Weight dtype.
        batch_size: Sequences per call.
        input_len: Longest prompt, tokens.
        seq_len: Longest prompt and response, tokens.
        num_tokens: Prompt tokens per call.
    """

    arch: ArchSpec
    tp_size: int
    pp_size: int
    moe_ep_size: int
    dtype: str
    batch_size: int
    input_len: int
    seq_len: int
    num_tokens: int

    def commands(self) -> str:
        """Returns the command lines that build such engines."""
        sizes = [("tp_size", self.tp_size), ("pp_size", self.pp_size), ("moe_ep_size", self.moe_ep_size)]
        flags = "".join(f" --{name} {size}" for name, size in sizes if size > 1)
        return (
            f"  python tools/convert_hf_to_trtllm.py --model_dir MODEL --output_dir CHECKPOINT --dtype {self.dtype}"
            f"{flags}\n"
            f"  python tools/build_trtllm_engine.py --checkpoint_dir CHECKPOINT --output_dir ENGINES --max_batch_size "
            f"{self.batch_size} --max_input_len {self.input_len} --max_seq_len {self.seq_len} --max_num_tokens "
            f"{self.num_tokens} --kv_cache_type continuous"
        )


@dataclass(frozen=True)
class EngineFolder:
    """Contents of config.json.

    Attributes:
        path: Folder of the engines.
        version: TensorRT-LLM version that built the engines; they run on that version only.
        config: Model, parallel sizes and dtype.
        max_batch_size: Sequences per call.
        max_input_len: Prompt tokens per sequence.
        max_seq_len: Prompt and response tokens per sequence.
        max_num_tokens: Tokens per forward pass.
        is_refittable: True if built with `use_refit`.
        kv_cache_type: "continuous", "paged" or "disabled"; "" for TensorRT-LLM's default, which is paged.
    """

    path: Path
    version: str
    config: TrtllmConfig
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    is_refittable: bool
    kv_cache_type: str


def read_engine_folder(path: str | Path) -> EngineFolder:
    """Reads config.json of a folder of engines.

    Raises:
        UserError: It is missing, does not belong to an engine, describes a model that mrl does not support, or an
            engine file is missing.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise UserError(f"'{folder}' has no {CONFIG}: it is not a folder of built engines.")
    found = read_json(folder / CONFIG)
    pretrained, build = found.get("pretrained_config"), found.get("build_config")
    if not isinstance(pretrained, dict) or not isinstance(build, dict):
        raise UserError(
            f"'{folder / CONFIG}' lacks pretrained_config or build_config: it is not from a built engine. Give the "
            "output_dir of tools/build_trtllm_engine.py."
        )
    try:
        config = from_json(pretrained)
    except UserError as error:
        raise UserError(f"'{folder / CONFIG}': {error}") from error
    limits = {name: build.get(name) for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens")}
    for name, value in limits.items():
        if type(value) is not int:
            raise UserError(f"'{folder / CONFIG}': build_config.{name} is {value!r}; expected an integer.")
    files = [folder / f"rank{rank}.engine" for rank in range(config.mapping.world_size)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"'{folder}' lacks {', '.join(missing[:3])}; {CONFIG} has {len(files)} ranks.")
    numbers: dict[str, Any] = limits
    return EngineFolder(
        folder,
        str(found.get("version", "")),
        config,
        **numbers,
        is_refittable=build.get("use_refit") is True,
        kv_cache_type=str(build.get("kv_cache_type") or "").rpartition(".")[2].lower(),
    )


def mismatches(folder: EngineFolder, wanted: Wanted) -> Iterator[str]:
    """Yields each mismatch of engines and run, such as "max_seq_len is 32 in the engines, 48 in the run"."""
    mapping = folder.config.mapping
    for name, built, asked in (
        ("tp_size", mapping.tp_size, wanted.tp_size),
        ("pp_size", mapping.pp_size, wanted.pp_size),
        ("moe_ep_size", mapping.moe_ep_size if wanted.arch.moe else 1, wanted.moe_ep_size),
        ("dtype", folder.config.dtype, wanted.dtype),
    ):
        if built != asked:
            yield f"{name} is {built} in the engines, {asked} in the run"
    for name, built, asked in (
        ("max_batch_size", folder.max_batch_size, wanted.batch_size),
        ("max_input_len", folder.max_input_len, wanted.input_len),
        ("max_seq_len", folder.max_seq_len, wanted.seq_len),
        ("max_num_tokens", folder.max_num_tokens, wanted.num_tokens),
    ):
        if built < asked:
            yield f"{name} is {built} in the engines, {asked} in the run"
    if folder.config.fp8:
        yield "the engines are quantised to FP8, but a weight sync sends no scales"
    if not folder.is_refittable:
        yield "the engines were built without use_refit, so their weights cannot be replaced"
    if folder.kv_cache_type != "continuous":
        yield (
            f"kv_cache_type is {folder.kv_cache_type or 'paged'} in the engines; TensorRT-LLM's Python runtime "
            "supports only continuous"
        )
    try:
        built_model, model = to_json(folder.config), to_json(replace(folder.config, arch=wanted.arch))
    except UserError as error:
        yield f"their sizes do not fit the model: {error}"
        return
    for key in model:
        if key not in _UNCOMPARED and built_model[key] != model[key]:
            yield f"{key} is {built_model[key]!r} in the engines, {model[key]!r} in the model"
    if wanted.arch.num_layers % wanted.pp_size:
        yield (
            f"pp_size {wanted.pp_size} does not divide the model's {wanted.arch.num_layers} layers, which "
            "TensorRT-LLM's Python runtime requires"
        )


def wanted_engine(config: Config, arch: ArchSpec) -> Wanted:
    """Returns the properties that the built engines of a run must have."""
    rollout = config.rollout
    return Wanted(
        arch=arch,
        tp_size=rollout.tensor_model_parallel_size,
        pp_size=rollout.pipeline_model_parallel_size,
        moe_ep_size=rollout.expert_parallel_size,
        dtype=rollout.dtype or config.model.dtype,
        batch_size=rollout.max_num_seqs,
        input_len=rollout.prompt_length,
        seq_len=config.rollout.max_sequence_length,
        num_tokens=rollout.max_num_batched_tokens,
    )


def engine_errors(config: Config, arch: ArchSpec) -> Iterator[str]:
    """Yields a message for each broken rule, with the command lines that build fitting engines."""
    rollout = config.rollout
    wanted = wanted_engine(config, arch)
    if rollout.engine_dir is None:
        yield (
            "rollout.name=trtllm_engine needs rollout.engine_dir, a folder of engines built for this model and these "
            f"sizes. Build them with:\n{wanted.commands()}"
        )
        return
    try:
        broken = list(mismatches(read_engine_folder(rollout.engine_dir), wanted))
    except UserError as error:
        yield f"rollout.engine_dir: {error}"
        return
    if broken:
        yield (
            f"rollout.engine_dir={rollout.engine_dir} does not fit the run: {'; '.join(broken)}. Build engines that "
            f"fit with:\n{wanted.commands()}"
        )
