"""Low-rank adapters in a checkpoint of an mrl run whose actor trains only them, read without Megatron.

The checkpoint has adapters and no other weights. A file beside them has their settings and a checksum of the model
that they belong to; `mrl/megatron/checkpoint.py` writes both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from mrl.checkpoint.formats.base import Source
from mrl.checkpoint.formats.checkpoint_metadata import METADATA
from mrl.checkpoint.formats.megatron import ADAPTERS, CONFIG, MODEL_KEYS, find_arch, model_folder
from mrl.checkpoint.formats.torch_dist import BACKEND_FILE, ChunkFiles, read_contents
from mrl.config.config import LoraConfig
from mrl.config.json_file import read_json
from mrl.errors import UserError, shown
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.checksum import bits, model_checksum
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Piece
from mrl.resharding.lora import adapted_matrices, adapted_modules, first_expert, peft_layout
from mrl.resharding.regions import full_region, slices, split, translate

_TRAINED_DTYPES = ("bfloat16", "float32")
"""Dtypes in which a run may have had the model (`model.dtype`)."""

_PART_ELEMENTS = 8 << 20
_SIGNIFICANT = ".12g"
"""Digits of alpha that are kept: it is computed from the scale, a rounded quotient."""


class AdapterCheckpoint:
    """The adapters of a checkpoint, open for reading.

    Attributes:
        arch: The model of the checkpoint's config.json.
        lora: Settings of the adapters; alpha is given for the scale without rsLoRA, so for the same products.
        dtype: Dtype of the adapters.
        files: Paths of the files that are read.
    """

    def __init__(self, folder: str | Path) -> None:
        """Reads the metadata and compares names, shapes and settings.

        Args:
            folder: Checkpoint of a run, or the model's folder in it.

        Raises:
            UserError: The folder is no such checkpoint, has all weights, or is damaged.
        """
        self._given, self.folder = Path(folder), model_folder(Path(folder))
        self.arch = find_arch(self._given, self.folder)
        settings = self._read_settings()
        self._checksum = settings.get("base_checksum")
        self.lora = self._lora(settings)
        contents = read_contents(self.folder)
        self._tensors = contents.tensors
        self._places: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        expected: dict[str, tuple[int, ...]] = {}
        for matrix in adapted_matrices(self.arch, ParallelLayout(1), 0, self.lora, dtype="float32", te=False):
            for name, stored in ((matrix.a_name, matrix.lora_a), (matrix.b_name, matrix.lora_b)):
                key = name.partition(".")[2]  # without the chunk
                if self.lora.share_expert_adapters:
                    key = first_expert(key)
                expected[key] = stored.shape
                for piece in stored.pieces:
                    self._places[piece.hf_name].append((key, piece))
        self._files = ChunkFiles(self.folder)
        self.dtype = self._check_tensors(expected)
        self._shapes = {name: stored.shape for name, stored in peft_layout(self.arch, self.lora, "float32").items()}
        self._read: dict[str, Tensor] = {}
        names = {chunk.file for key in expected for chunk in self._tensors[key].chunks}
        self.files = tuple(self.folder / name for name in (ADAPTERS, METADATA, BACKEND_FILE, *sorted(names)))

    def __reduce__(self) -> tuple[type[AdapterCheckpoint], tuple[Path]]:
        return AdapterCheckpoint, (self._given,)

    def tensor(self, name: str) -> Tensor:
        """Returns an adapter by its name in PEFT's files; it stays in memory.

        Raises:
            UserError: A file is damaged; the message names it.
        """
        if name not in self._read:
            found = torch.empty(self._shapes[name], dtype=DTYPES[self.dtype])
            for key, piece in self._places[name]:
                for chunk, inside in self._tensors[key].chunks_in(piece.dst):
                    part = self._files.read(chunk, inside, self.dtype)
                    found[slices(translate(inside, piece.dst, piece.src))] = part
            self._read[name] = found
        return self._read[name]

    def check_base(self, base: Source) -> None:
        """Reads all weights of a model and compares them with the one that the adapters were trained on.

        Args:
            base: The model, whose headers were checked.

        Raises:
            UserError: It is another model.
        """
        found = []
        for dtype in _TRAINED_DTYPES:
            checksum = _checksum(base, dtype)
            if checksum == self._checksum:
                return
            found.append(f"{checksum} ({dtype})")
        raise UserError(
            f"'{base.folder}' is not the model that the adapters of '{self._given}' were trained on: its weights have "
            f"the checksums {', '.join(found)}, and {ADAPTERS} has {shown(self._checksum)}. Give the folder that the "
            "run had as model.path."
        )

    def describe(self) -> dict[str, Any]:
        """Returns the settings for a manifest."""
        return {
            "folder": str(self._given),
            "base_checksum": self._checksum,
            "rank": self.lora.rank,
            "scale": self.lora.alpha / self.lora.rank,
            "modules": len(adapted_modules(self.arch, self.lora)),
        }

    def _read_settings(self) -> dict[str, Any]:
        path = self.folder / ADAPTERS
        if not path.is_file():
            raise UserError(
                f"checkpoint '{self._given}' has no {ADAPTERS}: it has all weights of the model, not adapters. Convert "
                "it without a base model (mrl convert megatron-to-hf)."
            )
        return read_json(path)

    def _lora(self, settings: dict[str, Any]) -> LoraConfig:
        rank, scale = settings.get("rank"), settings.get("scale")
        targets, excluded = settings.get("target_modules"), settings.get("exclude_modules")
        if (
            type(rank) is not int
            or rank < 1
            or not isinstance(scale, (int, float))
            or not math.isfinite(scale)
            or not _are_names(targets)
            or not _are_names(excluded)
        ):
            raise UserError(
                f"'{self.folder / ADAPTERS}' lacks a valid rank, scale, target_modules or exclude_modules. mrl did not "
                "write this file, or it is damaged."
            )
        alpha = float(f"{scale * rank:{_SIGNIFICANT}}")
        return LoraConfig(
            rank=rank,
            alpha=alpha,
            target_modules=targets,
            exclude_modules=excluded,
            share_expert_adapters=settings.get("share_expert_adapters") is True,
        )

    def _check_tensors(self, expected: dict[str, tuple[int, ...]]) -> str:
        """Compares the tensors with key -> expected shape, and returns their dtype."""
        missing = [key for key in expected if key not in self._tensors]
        unknown = [key for key in self._tensors if key.startswith(MODEL_KEYS) and key not in expected]
        if missing or unknown:
            what = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}'"
            raise UserError(
                f"checkpoint '{self.folder}' {what}: its weights do not fit the modules of {ADAPTERS} and the model of "
                f"{CONFIG}. Copy the checkpoint again."
            )
        dtype = self._tensors[next(iter(expected))].dtype
        for key, shape in expected.items():
            tensor = self._tensors[key]
            if (tensor.shape, tensor.dtype) != (shape, dtype) or dtype not in DTYPES:
                raise UserError(
                    f"checkpoint '{self.folder}': '{key}' is {list(tensor.shape)} {tensor.dtype}, expected "
                    f"{list(shape)} {dtype} for the rank of {ADAPTERS} and the model of {CONFIG}."
                )
            try:
                tensor.check_coverage()
            except ValueError as error:
                raise UserError(f"'{self.folder / METADATA}' is invalid: '{key}' {error}.") from error
        self._files.check(chunk for key in expected for chunk in self._tensors[key].chunks)
        return dtype


def _are_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _checksum(base: Source, dtype: str) -> str:
    """Returns `TrainableModel.base_checksum` of a model whose weights are cast to a dtype."""
    layout = hf_layout(base.arch, dtype)
    sums = torch.zeros(len(layout), dtype=torch.int64)
    for number, (name, stored) in enumerate(layout.items()):
        for region in split(full_region(stored.shape), _PART_ELEMENTS):
            sums[number] += bits(base.read(name, region).to(DTYPES[stored.dtype]))
    return model_checksum(sums)
