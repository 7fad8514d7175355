"""Quantization of a Hugging Face checkpoint: FP8 weights with scales and MXFP4 experts are read, the rest is refused.

Two forms of FP8 are read, both with weights in float8_e4m3fn: `quant_method: fp8` (DeepSeek-V3, Qwen3-FP8) with one
scale per block of a matrix, and FP8 of `compressed-tensors` with one scale per matrix, row or block. Scales of
activations are ignored. MXFP4 (`quant_method: mxfp4`, gpt-oss) is read for experts. Weights are dequantized, and mrl
computes in `model.dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mrl.errors import UserError, shown

QUANTIZED = ("quantization_config", "compression_config")
"""Keys of config.json that describe a quantization."""

_DTYPES = ("float32", "bfloat16", "float16")
_KEY = QUANTIZED[0]
_FP8_KEYS = {
    "activation_scheme",
    "dequantize",
    "expert_dtype",
    "fmt",
    "ignored_layers",
    "modules_to_convert",
    "modules_to_not_convert",
    "quant_method",
    "scale_fmt",
    "weight_block_size",
}
_COMPRESSED_KEYS = {
    "config_groups",
    "format",
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
    "quant_method",
    "quantization_status",
    "sparsity_config",
    "transform_config",
    "version",
}
_MXFP4_KEYS = {"dequantize", "modules_to_not_convert", "quant_method"}
_ADVICE = "Use the bfloat16 or float32 release of this model."


@dataclass(frozen=True)
class Fp8Format:
    """FP8 weights of a checkpoint.

    Attributes:
        suffix: End of the name of a matrix's scales, after the name of the matrix.
        block: Rows and columns of the blocks with one scale each; None: one scale per matrix or row.
        dtype: Dtype of the dequantized weights, the model's.
    """

    suffix: str
    block: tuple[int, int] | None
    dtype: str


@dataclass(frozen=True)
class Mxfp4Format:
    """Experts in MXFP4.

    Attributes:
        dtype: Dtype of the dequantized weights, the model's.
    """

    dtype: str


def read_quantization(config: Mapping[str, Any]) -> Fp8Format | Mxfp4Format | None:
    """Returns the form of the quantized weights of a config.json; None: the weights are not quantized.

    Raises:
        UserError: Another quantization; the message names the key.
    """
    if config.get(QUANTIZED[1]) is not None:
        raise UserError(
            f"config.json: the checkpoint is quantized ({QUANTIZED[1]}), which mrl does not read. {_ADVICE}"
        )
    found = config.get(_KEY)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise UserError(f"config.json: {_KEY} is {shown(found)}; expected an object with 'quant_method'.")
    method = found.get("quant_method")
    named = config.get("dtype", config.get("torch_dtype"))
    dtype = named if named in _DTYPES else "bfloat16"
    if method == "fp8":
        return _block_fp8(found, dtype)
    if method == "compressed-tensors":
        return _compressed_fp8(found, dtype)
    if method == "mxfp4":
        _refuse_unknown(found, _MXFP4_KEYS)
        return Mxfp4Format(dtype)
    raise UserError(
        f"config.json: the checkpoint is quantized ({_KEY} with quant_method={shown(method)}). mrl reads FP8 weights "
        f"(quant_method 'fp8' or 'compressed-tensors') and MXFP4 ('mxfp4'). {_ADVICE}"
    )


def _block_fp8(found: Mapping[str, Any], dtype: str) -> Fp8Format:
    _refuse_unknown(found, _FP8_KEYS)
    for key, only in (("fmt", "e4m3"), ("expert_dtype", "fp8")):
        if found.get(key, only) != only:
            raise UserError(f"config.json: {_KEY} has {key}={shown(found[key])}; mrl reads {only!r}. {_ADVICE}")
    size = found.get("weight_block_size", [128, 128])
    return Fp8Format("_scale_inv", None if size is None else _block(size, "weight_block_size"), dtype)


def _compressed_fp8(found: Mapping[str, Any], dtype: str) -> Fp8Format:
    _refuse_unknown(found, _COMPRESSED_KEYS)
    for key in ("kv_cache_scheme", "transform_config"):
        if found.get(key):
            raise UserError(f"config.json: {_KEY} has {key}, which mrl does not read. {_ADVICE}")
    sparsity = found.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise UserError(
            f"config.json: {_KEY} has sparsity_config={shown(sparsity)}; mrl reads dense weights. {_ADVICE}"
        )
    if found.get("format", "float-quantized") != "float-quantized":
        raise UserError(
            f"config.json: {_KEY} has format={shown(found['format'])}; mrl reads 'float-quantized' (FP8). {_ADVICE}"
        )
    blocks = set(_group_blocks(found.get("config_groups")))
    if len(blocks) != 1:
        raise UserError(
            f"config.json: config_groups of {_KEY} has {len(blocks)} different block sizes; expected one. {_ADVICE}"
        )
    return Fp8Format("_scale", blocks.pop(), dtype)


def _group_blocks(groups: Any) -> Iterator[tuple[int, int] | None]:
    """Yields the blocks of each group of layers."""
    if not isinstance(groups, Mapping):
        raise UserError(f"config.json: config_groups of {_KEY} is {shown(groups)}; expected an object.")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise UserError(f"config.json: config_groups.{name} of {_KEY} has no 'weights'. {_ADVICE}")
        for key, only in (("num_bits", 8), ("type", "float"), ("symmetric", True), ("group_size", None)):
            if weights.get(key, only) != only:
                raise UserError(
                    f"config.json: config_groups.{name} of {_KEY} has {key}={shown(weights[key])}; mrl reads "
                    f"{only!r}. {_ADVICE}"
                )
        strategy = weights.get("strategy")
        if strategy not in ("tensor", "channel", "block"):
            raise UserError(
                f"config.json: config_groups.{name} of {_KEY} has strategy={shown(strategy)}; mrl reads 'tensor', "
                f"'channel' and 'block'. {_ADVICE}"
            )
        yield _block(weights.get("block_structure"), "block_structure") if strategy == "block" else None


def _block(size: Any, key: str) -> tuple[int, int]:
    if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
        raise UserError(f"config.json: {key} of {_KEY} is {shown(size)}; expected two integers above 0.")
    return size[0], size[1]


def _refuse_unknown(found: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(str(key) for key in found if key not in known and found[key] is not None)
    if unknown:
        raise UserError(f"config.json: {_KEY} has {shown(unknown[0])}, which mrl does not know. {_ADVICE}")
