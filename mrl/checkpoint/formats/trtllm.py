"""TensorRT-LLM 1.x checkpoints: config.json and a rank{N}.safetensors for each rank.

Reads and writes the rank files: the layout of `resharding/trtllm.py`, with the dtypes and scales that TensorRT-LLM's
loader (`models/modeling_utils.py: PretrainedModel.load`) requires. Derived from the loader's source; it was not run.

FP8 (`quant_algo` FP8): each linear layer of a rank is stored as float8_e4m3fn with `weights_scaling_factor` (fp32, one
element, or one per expert) of the rank's own fused tensor, so replicas of a key/value head may have different scales.
TensorRT-LLM also computes with FP8 activations, and its layers have no default for `activation_scaling_factor`. It
comes from a calibration, which mrl does not do, and must be given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from mrl.checkpoint.formats.base import OutFile, Source, Target
from mrl.checkpoint.formats.safetensors_file import SafetensorsFile, write_safetensors
from mrl.checkpoint.formats.trtllm_config import CONFIG, TrtllmConfig, read_config, to_json
from mrl.config.json_file import read_json
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.fp8_quantize import dequantize_matrix, quantize_matrices
from mrl.resharding.hf import EMBEDDINGS
from mrl.resharding.layout import Layout, Piece, Region, StoredTensor
from mrl.resharding.regions import full_region, intersect, slices, subtract_intersection, translate, volume
from mrl.resharding.trtllm import HEAD, TrtllmMapping, current_name, linear_modules, trtllm_layout

_FP8 = "float8_e4m3fn"
_WEIGHT_SCALE = "weights_scaling_factor"
_ACTIVATION_SCALE = "activation_scaling_factor"
RANK_FILES = "rank*.safetensors"
"""Pattern of the rank files."""
_FP8_ALIGNMENT = 4
"""Alignment of an FP8 tensor's size, bytes: fp32 scales follow it."""

Headers = dict[str, tuple[tuple[int, ...], str]]
"""Name -> (shape, dtype) in the file."""


def rank_file(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank{rank}.safetensors"


def read_activation_scales(path: str | Path) -> dict[str, float]:
    """Reads the `activation_scales` of a `TrtllmTarget` from a JSON object of numbers.

    Raises:
        UserError: The file cannot be read or has other content; the message names it.
    """
    try:
        scales = read_json(Path(path))
    except UserError as error:
        raise UserError(f"the file of activation scales is not a JSON object of numbers: {error}") from error
    if not all(type(scale) in (int, float) for scale in scales.values()):
        raise UserError(
            f"'{path}' is not a JSON object of numbers, {{\"transformer.layers.0.attention.qkv\": 0.01, ...}}."
        )
    return {current_name(module): scale for module, scale in scales.items()}


class TrtllmTarget(Target):
    """A checkpoint to write.

    Attributes:
        config: Content of its config.json.
    """

    def __init__(
        self,
        arch: ArchSpec,
        mapping: TrtllmMapping,
        dtype: str,
        *,
        activation_scales: Mapping[str, float] | None = None,
        gpus_per_node: int = 8,
    ) -> None:
        """Computes the layout of every rank.

        Args:
            arch: The model.
            mapping: Parallel layout.
            dtype: float32, float16 or bfloat16; routers are always fp32.
            activation_scales: Quantizes linear layers to FP8. Module -> largest magnitude of its input in a calibration
                / 448; modules have TensorRT-LLM's names with the model's layer index
                ("transformer.layers.3.attention.qkv"). None: no quantization.
            gpus_per_node: Consecutive ranks that share a node, for config.json.

        Raises:
            UserError: TensorRT-LLM has no such model, the sizes do not divide it, or scales are missing, unknown or not
                positive.
        """
        self.config = TrtllmConfig(arch, mapping, dtype, activation_scales is not None, gpus_per_node)
        self._linear = {rank: linear_modules(arch, mapping, rank) for rank in range(mapping.world_size)}
        self._scales = dict(activation_scales or {})
        if activation_scales is not None:
            self._check_scales()
        self.files = tuple(OutFile(rank_file(rank), self._layout(rank)) for rank in range(mapping.world_size))

    def write(self, path: Path, file: OutFile, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Implements `Target.write`; expects linear layers for FP8 in fp32, and experts in two or three dimensions.

        Raises:
            UserError: The disk refuses, or a value exceeds float16 or, with FP8, is not finite; the message names the
                tensor.
        """
        linear = self._linear[int(file.name.removeprefix("rank").removesuffix(".safetensors"))]
        return write_safetensors(path, _headers(self.config, file.layout, linear), self._encode(file, linear, tensors))

    def finish(self, folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Implements `Target.finish`."""
        (folder / CONFIG).write_text(json.dumps(to_json(self.config), indent=2) + "\n", encoding="utf-8")

    def describe(self) -> dict[str, Any]:
        """Implements `Target.describe`; with FP8 also a hash of the activation scales, on which the files depend."""
        scales = json.dumps(self._scales, sort_keys=True).encode()
        known = {"activation_scales": xxhash.xxh3_64_hexdigest(scales)} if self.config.fp8 else {}
        return {**_describe_config(self.config), **known}

    def _layout(self, rank: int) -> Layout:
        layout = trtllm_layout(self.config.arch, self.config.mapping, rank, self.config.dtype)
        if not self.config.fp8:
            return layout
        linear = self._linear[rank]
        for name, stored in layout.items():
            item = ITEM_BYTES[_FP8 if name in linear else stored.dtype]
            if volume(full_region(stored.shape)) * item % _FP8_ALIGNMENT:
                raise UserError(
                    f"'{name}' of shape {list(stored.shape)} on rank {rank} is not a multiple of {_FP8_ALIGNMENT} "
                    "bytes with FP8, whose GEMMs need dimensions that are multiples of 16. Use a smaller tp_size, or "
                    "no FP8."
                )
        last = {name: replace(stored, dtype="float32") for name, stored in layout.items() if name in linear}
        return {name: stored for name, stored in layout.items() if name not in linear} | last

    def _encode(
        self, file: OutFile, linear: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            stored = file.layout[name]
            if self.config.fp8 and name in linear:
                matrices = tensor.reshape(stored.view or (1, *stored.shape))
                quantized, scales = quantize_matrices(f"{file.name}: {name}", matrices)
                yield name, quantized.view(stored.view or stored.shape)
                yield _scale_name(name, _WEIGHT_SCALE), scales.view(-1, 1) if stored.view else scales
                yield _scale_name(name, _ACTIVATION_SCALE), torch.tensor([self._scales[linear[name]]])
                continue
            if tensor.dtype == torch.float16:
                _check_finite(file.name, name, stored, tensor.reshape(stored.shape))
            yield name, tensor.reshape(stored.view or stored.shape)

    def _check_scales(self) -> None:
        modules = {module for linear in self._linear.values() for module in linear.values()}
        missing, unknown = sorted(modules - set(self._scales)), sorted(set(self._scales) - modules)
        if missing or unknown:
            what = (
                f"lack {len(missing)} of {len(modules)} modules" if missing else f"name {len(unknown)} unknown modules"
            )
            raise UserError(
                f"the activation scales {what}, first '{(missing or unknown)[0]}'. TensorRT-LLM's FP8 layers need the "
                "scale of their input, the largest magnitude in a calibration / 448, for each linear layer."
            )
        for module, scale in self._scales.items():
            if not 0 < scale < float("inf"):
                raise UserError(f"the activation scale of '{module}' is {scale!r}; expected a positive number.")


class TrtllmSource(Source):
    """A checkpoint, open for reading in Hugging Face coordinates.

    Attributes:
        config: Content of its config.json.
    """

    def __init__(self, folder: str | Path) -> None:
        """Reads config.json and the headers of all rank files.

        Raises:
            UserError: config.json is missing or not supported by mrl, or a rank file is missing, incomplete or
                superfluous.
        """
        self.folder = Path(folder)
        self.config = read_config(folder)
        ranks = range(self.config.mapping.world_size)
        names = [rank_file(rank) for rank in ranks]
        found = {path.name for path in self.folder.glob(RANK_FILES)}
        for what, files in (("lacks", set(names) - found), ("also has", found - set(names))):
            if files:
                raise UserError(
                    f"checkpoint '{folder}' {what} {', '.join(sorted(files)[:3])}; {CONFIG} is for "
                    f"{self.config.mapping.tp_size} x {self.config.mapping.pp_size} ranks (tp_size x pp_size)."
                )
        self._open_files = [SafetensorsFile(self.folder / name) for name in names]
        for file in self._open_files:
            file.rename(current_name)
        if not any(HEAD in file.headers for file in self._open_files):
            arch = replace(self.config.arch, tie_word_embeddings=True)
            self.config = replace(self.config, arch=arch)
        self.arch = self.config.arch
        self.files = (CONFIG, *names)
        self._layouts = [trtllm_layout(self.arch, self.config.mapping, rank, self.config.dtype) for rank in ranks]
        self._linear = [
            linear_modules(self.arch, self.config.mapping, rank) if self.config.fp8 else {} for rank in ranks
        ]
        self._holders: dict[str, list[tuple[int, str, Piece]]] = {}
        for rank, layout in enumerate(self._layouts):
            for name, stored in layout.items():
                if name in self._open_files[rank].headers:
                    for piece in stored.pieces:
                        self._holders.setdefault(piece.hf_name, []).append((rank, name, piece))
        self._dtypes: dict[str, str] = {}

    def dtype(self, hf_name: str) -> str:
        """Implements `Source.dtype`; a router, stored in fp32, has the model's dtype if that represents its values.

        FP8 weights also have the model's dtype, in which TensorRT-LLM computes with them.
        """
        if hf_name not in self._dtypes:
            rank, name, _ = self._holders[hf_name][0]
            stored, model = self._layouts[rank][name].dtype, self.config.dtype
            keeps = stored == model or all(
                torch.equal(part, part.to(DTYPES[model]).to(part.dtype))
                for rank, name, piece in self._holders[hf_name]
                for part in [self._read_piece(rank, name, piece.dst)]
            )
            self._dtypes[hf_name] = model if keeps else stored
        return self._dtypes[hf_name]

    def read(self, hf_name: str, region: Region) -> Tensor:
        """Implements `Source.read`; a view if one rank has the entire region in the returned dtype."""
        dtype = DTYPES[self.dtype(hf_name)]
        found: Tensor | None = None
        left = [region]
        for rank, name, piece in self._holders[hf_name]:
            for part in [both for rest in left if (both := intersect(rest, piece.src)) is not None]:
                values = self._read_piece(rank, name, translate(part, piece.src, piece.dst)).to(dtype)
                if part == region:
                    return values
                if found is None:
                    found = torch.empty([stop - start for start, stop in region], dtype=dtype)
                found[slices(translate(part, region, full_region(found.shape)))] = values
            left = [fresh for rest in left for fresh in subtract_intersection(rest, piece.src)]
            if not left:
                break
        if left or found is None:
            raise UserError(f"checkpoint '{self.folder}' lacks '{hf_name}'{list(left[0])}.")
        return found

    def check(self, *, deep: bool = False) -> None:
        """Implements `Source.check`.

        Args:
            deep: Also compare bit by bit everything that is stored more than once (head of tied embeddings, replicated
                key/value heads, norms, routers), and check that padding is zero. FP8 weights are excluded: each rank
                rounds by its own scale.

        Raises:
            UserError: The errors of `Source.check`; with `deep` also copies that differ, naming the tensor and both
                ranks.
        """
        for file, layout, linear in zip(self._open_files, self._layouts, self._linear, strict=True):
            expected = _headers(self.config, layout, linear)
            optional = {HEAD} if self.arch.tie_word_embeddings else set()
            missing = [name for name in expected if name not in file.headers and name not in optional]
            unknown = [name for name in file.headers if name not in expected]
            for what, names in (("lacks", missing), ("has unknown", unknown)):
                if names:
                    raise UserError(
                        f"'{file.path}' {what} {len(names)} tensors of a {self.arch.family} model with "
                        f"{self.arch.num_layers} layers, first '{names[0]}'. {CONFIG} does not match the weights."
                    )
            for name, header in file.headers.items():
                if (header.shape, header.dtype) != expected[name]:
                    raise UserError(
                        f"'{file.path}': '{name}' is {list(header.shape)} {header.dtype}; {CONFIG} requires "
                        f"{list(expected[name][0])} {expected[name][1]}."
                    )
        if self.arch.tie_word_embeddings:
            self._check_copies((EMBEDDINGS,))
        if deep:
            self._check_copies(self._holders)
            self._check_padding()

    def describe(self) -> dict[str, Any]:
        """Implements `Source.describe`."""
        tensors = {
            f"rank{rank}.{name}": {"shape": list(header.shape), "dtype": header.dtype, "file": rank_file(rank)}
            for rank, file in enumerate(self._open_files)
            for name, header in file.headers.items()
        }
        num_bytes = sum(file.num_bytes for file in self._open_files)
        return {
            **_describe_config(self.config),
            "num_layers": self.arch.num_layers,
            "num_bytes": num_bytes,
            "tensors": tensors,
        }

    def close(self) -> None:
        """Implements `Source.close`; maps are released with the tensors that were read."""
        self._open_files.clear()

    def _read_piece(self, rank: int, name: str, region: Region) -> Tensor:
        """Returns a region of a stored tensor in two dimensions; converts FP8 to fp32."""
        file, stored = self._open_files[rank], self._layouts[rank][name]
        values = file.tensor(name).view(stored.shape)[slices(region)]
        if name not in self._linear[rank]:
            return values
        scales = file.tensor(_scale_name(name, _WEIGHT_SCALE)).view(-1)
        return dequantize_matrix(values, scales[region[0][0] * len(scales) // stored.shape[0]])

    def _check_copies(self, hf_names: Iterable[str]) -> None:
        for hf_name in hf_names:
            holders = self._holders.get(hf_name, ())
            distinct: dict[Region, tuple[int, str, Piece]] = {}
            for rank, name, piece in holders:
                if name in self._linear[rank]:
                    continue
                for first_rank, first_name, first in distinct.values():
                    both = intersect(piece.src, first.src)
                    if both is None:
                        continue
                    values = self._read_piece(rank, name, translate(both, piece.src, piece.dst))
                    first_values = self._read_piece(first_rank, first_name, translate(both, first.src, first.dst))
                    if not torch.equal(
                        values.contiguous().view(torch.uint8), first_values.contiguous().view(torch.uint8)
                    ):
                        raise UserError(
                            f"checkpoint '{self.folder}': '{hf_name}'{list(both)} differs between rank {first_rank} "
                            f"('{first_name}') and rank {rank} ('{name}'); both should have the same values."
                        )
                distinct.setdefault(piece.src, (rank, name, piece))

    def _check_padding(self) -> None:
        for file, layout in zip(self._open_files, self._layouts, strict=True):
            for name, stored in layout.items():
                for region in stored.padding if name in file.headers else ():
                    if file.tensor(name)[slices(region)].count_nonzero():
                        raise UserError(f"'{file.path}': '{name}'{list(region)} is padding and should be zero.")


def _headers(config: TrtllmConfig, layout: Layout, linear: Mapping[str, str]) -> Headers:
    """Returns the headers of a rank's file, in its order."""
    found: Headers = {}
    for name, stored in layout.items():
        shape = stored.view or stored.shape
        if not config.fp8 or name not in linear:
            found[name] = (shape, stored.dtype)
            continue
        found[name] = (shape, _FP8)
        found[_scale_name(name, _WEIGHT_SCALE)] = ((shape[0], 1) if stored.view else (1,), "float32")
        found[_scale_name(name, _ACTIVATION_SCALE)] = ((1,), "float32")
    return found


def _scale_name(name: str, which: str) -> str:
    return f"{name.removesuffix('.weight')}.{which}"


def _check_finite(file: str, name: str, stored: StoredTensor, tensor: Tensor) -> None:
    if torch.isfinite(tensor).all():
        return
    bad = [piece.hf_name for piece in stored.pieces if not torch.isfinite(tensor[slices(piece.dst)]).all()]
    raise UserError(
        f"{file}: '{name}' would contain infinity or NaN: values of {', '.join(dict.fromkeys(bad))} are NaN or exceed "
        f"float16 (largest {torch.finfo(torch.float16).max:.0f}). Use bfloat16."
    )


def _describe_config(config: TrtllmConfig) -> dict[str, Any]:
    mapping = config.mapping
    return {
        "format": "trtllm",
        "family": config.arch.family,
        "dtype": config.dtype,
        "quant_algo": "FP8" if config.fp8 else None,
        "tp_size": mapping.tp_size,
        "pp_size": mapping.pp_size,
        "moe_tp_size": mapping.moe_tp_size,
        "moe_ep_size": mapping.moe_ep_size,
        "use_parallel_embedding": mapping.use_parallel_embedding,
        "embedding_sharding_dim": mapping.embedding_sharding_dim,
        "gpus_per_node": config.gpus_per_node,
    }
