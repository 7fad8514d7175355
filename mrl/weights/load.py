"""Safetensors of a Hugging Face folder -> the tensors of one rank.

Owns reading: finding the tensors of a folder (one file or shards with an index), checking them against the model's
layout, and copying each rank's slices straight into place with a cast. No rank holds the whole model, and no collective
is involved: ranks read what they store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.weights.hf import hf_layout
from mrl.weights.layout import Layout
from mrl.weights.regions import slices
from mrl.weights.tensors import check_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TIED_HEAD = "lm_head.weight"

_DTYPES = ("F32", "BF16", "F16", "F64")


class HfWeights:
    """The tensors of a Hugging Face folder, open for reading by slice; use it in a `with` block."""

    def __init__(self, folder: str | Path) -> None:
        """Opens nothing yet; finds which file holds which tensor.

        Raises:
            UserError: The folder has no safetensors, its index is broken, or a file is missing or corrupt.
        """
        self._folder = Path(folder)
        self._open_files = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of = self._find()

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open_files.close()
        self._files.clear()

    def check(self, arch: ArchSpec) -> None:
        """Compares names, shapes and dtypes with what `arch` needs; reads headers only.

        Raises:
            UserError: A tensor is missing, unknown, of another shape, or not of a float dtype.
        """
        expected = hf_layout(arch, "float32")
        optional = {name for name in self._file_of if name.endswith("rotary_emb.inv_freq")}
        if arch.tie_word_embeddings:
            optional.add(TIED_HEAD)
        missing = [name for name in expected if name not in self._file_of]
        unknown = [name for name in self._file_of if name not in expected and name not in optional]
        for what, names in (("lacks", missing), ("has unknown", unknown)):
            if names:
                raise UserError(
                    f"model folder '{self._folder}' {what} {len(names)} tensors of a {arch.family} model with "
                    f"{arch.num_layers} layers, first '{names[0]}'. config.json and the weights do not belong together."
                )
        for name, stored in expected.items():
            shape, dtype = self._header(name)
            if shape != stored.shape:
                vocab = (
                    "; config.json says vocab_size=" + str(arch.vocab_size) if arch.vocab_size in stored.shape else ""
                )
                raise UserError(
                    f"model folder '{self._folder}': '{name}' has shape {list(shape)}, but config.json asks for "
                    f"{list(stored.shape)}{vocab}."
                )
            if dtype not in _DTYPES:
                raise UserError(
                    f"model folder '{self._folder}': '{name}' is stored as {dtype}; expected one of "
                    f"{', '.join(_DTYPES)}. Use a release of the model that is not quantized."
                )

    def fill(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        """Copies what `layout` says into `tensors`, with a cast to each tensor's dtype; padding becomes zero.

        Raises:
            UserError: A file ends early or cannot be read.
        """
        check_tensors(layout, tensors, dtypes=False)
        with torch.no_grad():
            for name, stored in layout.items():
                for region in stored.padding:
                    tensors[name][slices(region)] = 0
                for piece in stored.pieces:
                    tensors[name][slices(piece.dst)].copy_(self._read(piece.hf_name, slices(piece.src)))

    def _find(self) -> dict[str, str]:
        index = self._folder / INDEX
        if index.is_file():
            return self._read_index(index)
        if (self._folder / SINGLE).is_file():
            return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        raise UserError(
            f"model folder '{self._folder}' has neither {SINGLE} nor {INDEX}. mrl reads safetensors; convert other "
            "formats with transformers' save_pretrained."
        )

    def _read_index(self, path: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            found = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"'{path}' is not a safetensors index: {type(error).__name__}: {error}") from error
        for file in sorted(set(found.values())):
            if Path(file).name != file or not (self._folder / file).is_file():
                raise UserError(f"'{path}' names the file '{file}', which is not in the folder. Download it again.")
            inside = set(self._handle(file).keys())
            lacking = [name for name, where in found.items() if where == file and name not in inside]
            if lacking:
                raise UserError(f"'{path}' says that '{lacking[0]}' is in '{file}', but it is not.")
        return found

    def _handle(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            try:
                handle = safe_open(str(path), framework="pt")
                self._files[file] = self._open_files.enter_context(handle)
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"'{path}' is not a readable safetensors file: {error}. Download or export it again."
                ) from error
        return self._files[file]

    def _header(self, name: str) -> tuple[tuple[int, ...], str]:
        handle = self._handle(self._file_of[name]).get_slice(name)
        return tuple(handle.get_shape()), handle.get_dtype()

    def _read(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, as a view of the mapped file: only what is copied from it is read."""
        file = self._file_of[name]
        try:
            part: Tensor = self._handle(file).get_slice(name)[where]
        except (OSError, SafetensorError) as error:
            raise UserError(f"'{self._folder / file}': '{name}' cannot be read: {error}") from error
        return part


def load_from_hf(folder: str | Path, arch: ArchSpec, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Fills one rank's tensors from a Hugging Face folder.

    Args:
        folder: With safetensors, single or sharded.
        arch: What config.json says.
        layout: What this rank stores (`megatron_layout`, `native_layout`, `hf_layout`).
        tensors: Name -> tensor to fill in place, each name of the layout; dtypes may differ from the files'.

    Raises:
        UserError: The files are missing or corrupt, or do not fit `arch`.
    """
    with HfWeights(folder) as weights:
        weights.check(arch)
        weights.fill(layout, tensors)
