"""Megatron's distributed checkpoint as source and target of conversions, without Megatron, a model or a process group.

A source locates the model's part of a folder (mrl's own or Megatron-LM's) and checks its keys; a target plans the files
of a parallel layout. `resharding/dist_checkpoint.py` maps keys to weights, `torch_dist.py` reads and writes the files.

A written checkpoint can be loaded at any parallel layout with `megatron.core.dist_checkpointing.load`. Optimizer states
are neither read nor written.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.checkpoint.formats.base import OutFile, Source, Target
from mrl.checkpoint.formats.checkpoint_metadata import METADATA
from mrl.checkpoint.formats.torch_dist import (
    BACKEND_FILE,
    Chunk,
    ChunkFiles,
    GlobalTensor,
    read_contents,
    write_blobs,
    write_contents,
)
from mrl.checkpoint.io.hashed_writer import OutputFile
from mrl.config.did_you_mean import did_you_mean_path
from mrl.errors import UserError
from mrl.models.base import ArchSpec, critic_of
from mrl.models.hf_config import arch_from_folder, family_of
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.dist_checkpoint import (
    EXTRA_STATE,
    Shard,
    StackedPiece,
    extra_state_keys,
    global_tensors,
    key_formats,
    known_keys,
    rank_shards,
)
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Layout, Region
from mrl.resharding.megatron import OUTPUT, VOCABULARY
from mrl.resharding.regions import full_region, intersect, slices, translate, volume

CONFIG = "config.json"
ADAPTERS = "adapters.json"
"""File of a checkpoint that has low-rank adapters and no other weights."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File in Megatron-LM's folder with the number of the last iteration, or "release"."""

_ACTOR = "actor"
MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
_COMMON = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": False},
}
"""Content that Megatron-LM expects in `common.pt`; the version means that query, key and value need no reordering."""


@dataclass(frozen=True)
class _Box:
    """A part of a Hugging Face tensor in a file.

    Attributes:
        chunk: Box of the global tensor that contains the part.
        inside: Region of the part in the global tensor.
        dtype: Stored dtype.
        own: Region of the part in the Hugging Face tensor.
    """

    chunk: Chunk
    inside: Region
    dtype: str
    own: Region


class MegatronSource(Source):
    """A distributed checkpoint, open for reading by regions."""

    def __init__(self, folder: str | Path, arch: ArchSpec | None = None) -> None:
        """Locates the model and reads the metadata.

        Args:
            folder: A checkpoint of an mrl run, a folder of Megatron-LM (uses the last iteration), one of its
                iterations, or the output of `MegatronTarget`.
            arch: The model; None: the model of config.json, in the given folder or the one with the metadata; a critic
                if the output layer is a value head.

        Raises:
            UserError: There is no such checkpoint, it has another backend, its metadata is damaged or refers to code,
                there is no config.json, or it has only adapters (see `AdapterCheckpoint`).
        """
        self.folder = model_folder(Path(folder))
        if (self.folder / ADAPTERS).is_file():
            raise UserError(
                f"checkpoint '{folder}' has only low-rank adapters ({ADAPTERS}), not the weights of their model. Give "
                "the model too: mrl convert megatron-to-hf --base MODEL merges them, megatron-to-peft writes a PEFT "
                "folder. With checkpoint.export_hf=true a run exports both, as hf/ and adapter/ of each checkpoint."
            )
        self.arch = find_arch(Path(folder), self.folder) if arch is None else arch
        self._contents = read_contents(self.folder)
        self._tensors = self._contents.tensors
        if arch is None and OUTPUT in self._tensors and self._tensors[OUTPUT].shape[0] == 1:
            self.arch = critic_of(self.arch)
        self._stacks = global_tensors(self.arch, self._tensors.keys())
        self._pieces: dict[str, list[tuple[str, StackedPiece]]] = defaultdict(list)
        for key, stack in self._stacks.items():
            for part in stack.parts:
                self._pieces[part.piece.hf_name].append((key, part))
        self._files = ChunkFiles(self.folder)
        names = {chunk.file for key in self._stacks if key in self._tensors for chunk in self._tensors[key].chunks}
        self.files = (METADATA, BACKEND_FILE, *sorted(names))

    def dtype(self, hf_name: str) -> str:
        """Implements `Source.dtype`."""
        key, _ = self._pieces_of(hf_name)[0]
        return self._tensors[key].dtype

    def read(self, hf_name: str, region: Region) -> Tensor:
        """Implements `Source.read`; a view of the file if one aligned box contains the region, else a copy."""
        found = self.view(hf_name, region)
        if found is None:
            found = torch.empty([stop - start for start, stop in region], dtype=DTYPES[self.dtype(hf_name)])
            self.copy_into(found, hf_name, region)
        return found

    def view(self, hf_name: str, region: Region) -> Tensor | None:
        """Implements `Source.view`."""
        boxes = list(islice(self._boxes(hf_name, region), 2))
        if len(boxes) != 1 or boxes[0].own != region:
            return None
        return self._read(boxes[0])

    def copy_into(self, tensor: Tensor, hf_name: str, region: Region) -> None:
        """Implements `Source.copy_into`; copies each box directly to its place."""
        found = 0
        for box in self._boxes(hf_name, region):
            tensor[slices(translate(box.own, region, full_region(tensor.shape)))] = self._read(box)
            found += volume(box.own)
        if found != volume(region):
            raise UserError(f"checkpoint '{self.folder}' lacks a part of '{hf_name}' {list(region)}.")

    def _boxes(self, hf_name: str, region: Region) -> Iterator[_Box]:
        """Yields the boxes that contain parts of a region."""
        for key, part in self._pieces_of(hf_name):
            both = intersect(region, part.piece.src)
            if both is not None:
                tensor = self._tensors[key]
                for chunk, inside in tensor.chunks_in(part.to_global(both)):
                    yield _Box(chunk, inside, tensor.dtype, part.to_hf(inside))

    def _read(self, box: _Box) -> Tensor:
        found = self._files.read(box.chunk, box.inside, box.dtype)
        return found.view([stop - start for start, stop in box.own])

    def check(self) -> None:
        """Implements `Source.check`; also checks that every file exists with the size given by the metadata."""
        missing = [key for key in self._stacks if key not in self._tensors]
        if missing:
            raise self._mismatch_error(f"lacks {len(missing)} tensors", missing[0])
        known = known_keys(self.arch) | set(self._stacks)
        given = [*self._tensors, *self._contents.pickled]
        unknown = [key for key in given if key.startswith(MODEL_KEYS) and key not in known and EXTRA_STATE not in key]
        if unknown:
            raise self._mismatch_error(f"has {len(unknown)} unknown tensors", unknown[0])
        for key, stack in self._stacks.items():
            self._check_tensor(key, stack.shape)
        self._files.check(chunk for key in self._stacks for chunk in self._tensors[key].chunks)

    def describe(self) -> dict[str, Any]:
        """Implements `Source.describe`."""
        tensors = {}
        for key in self._stacks:
            if key in self._tensors:
                tensor = self._tensors[key]
                tensors[key] = {"shape": list(tensor.shape), "dtype": tensor.dtype, "num_chunks": len(tensor.chunks)}
        others = [key for key in self._tensors if key not in self._stacks]
        return {
            "format": "megatron",
            "family": self.arch.family,
            "num_layers": self.arch.num_layers,
            "num_bytes": sum(chunk.num_bytes for key in tensors for chunk in self._tensors[key].chunks),
            "spelling": sorted(spelling.value for spelling in key_formats(self.arch, self._tensors.keys())),
            "tensors": tensors,
            "not_read": {"tensors": len(others), "objects": len(self._contents.pickled)},
        }

    def close(self) -> None:
        """Implements `Source.close`."""
        self._files.close()

    def _pieces_of(self, hf_name: str) -> list[tuple[str, StackedPiece]]:
        if hf_name not in self._pieces:
            raise KeyError(f"a {self.arch.family} model has no tensor '{hf_name}'")
        for key, _ in self._pieces[hf_name]:
            if key not in self._tensors:
                raise self._mismatch_error("lacks a tensor", key)
        return self._pieces[hf_name]

    def _check_tensor(self, key: str, expected: tuple[int, ...]) -> None:
        tensor = self._tensors[key]
        fits = tensor.shape == expected
        if key in VOCABULARY:  # the padding depends on the job that saved it
            fits = len(tensor.shape) == 2 and tensor.shape[0] >= expected[0] and tensor.shape[1:] == expected[1:]
        if not fits:
            raise UserError(
                f"checkpoint '{self.folder}': '{key}' has shape {list(tensor.shape)}, but {CONFIG} requires "
                f"{list(expected)}. Use the {CONFIG} of this checkpoint's model."
            )
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"checkpoint '{self.folder}': '{key}' is stored as {tensor.dtype}; expected one of {', '.join(DTYPES)}."
            )
        try:
            tensor.check_coverage()
        except ValueError as error:
            raise UserError(f"'{self.folder / METADATA}' is invalid: '{key}' {error}.") from error

    def _mismatch_error(self, what: str, first: str) -> UserError:
        if any(".lora_A" in key for key in self._tensors):
            return UserError(
                f"checkpoint '{self.folder}' has only adapters (actor.lora), without the model's weights. Use the "
                "Hugging Face folders that checkpoint.export_hf=true writes beside it: hf/ with the adapters merged, "
                "adapter/ for PEFT."
            )
        return UserError(
            f"checkpoint '{self.folder}' {what} of a {self.arch.family} model with {self.arch.num_layers} layers, "
            f"first '{first}'. {CONFIG} does not match the weights."
        )


class MegatronTarget(Target):
    """A distributed checkpoint, written as the ranks of a parallel layout would save it."""

    def __init__(self, arch: ArchSpec, grid: ParallelLayout, dtype: str) -> None:
        """Plans the files: one for each rank that writes anything.

        Args:
            arch: The model.
            grid: Parallel layout; data- and context-parallel copies write nothing.
            dtype: Dtype of every tensor that has none of its own.

        Raises:
            UserError: A parallel size does not divide the model's dimensions.
        """
        self._arch, self._grid, self._dtype = arch, grid, dtype
        self._shards: dict[str, list[Shard]] = {}
        for rank in range(grid.world_size):
            shards = list(rank_shards(arch, grid, rank, dtype=dtype))
            if shards:
                self._shards[f"__{rank}_0.distcp"] = shards
        self.files = tuple(OutFile(name, _layout(shards)) for name, shards in self._shards.items())

    def write(self, path: Path, file: OutFile, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Implements `Target.write`; the record has the location of each blob in the file."""
        names = iter(file.layout.items())

        def boxes() -> Iterable[Tensor]:
            for name, tensor in tensors:
                expected, stored = next(names, ("", None))
                if stored is None or name != expected or tensor.dtype != DTYPES[stored.dtype]:
                    raise RuntimeError(f"got tensor '{name}', expected '{expected}' next in '{file.name}'")
                yield tensor.contiguous().view(stored.view or stored.shape)

        with OutputFile(path) as out:
            places = write_blobs(out, boxes())
        if len(places) != len(file.layout):
            raise RuntimeError(f"got {len(places)} tensors, expected {len(file.layout)} in '{file.name}'")
        return {"num_bytes": out.num_bytes, "xxh3": out.xxh3, "places": places}

    def finish(self, folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Implements `Target.finish`; writes config.json, and empty extra states for the modules that may load one."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, shards in self._shards.items():
            for shard, (start, num_bytes) in zip(shards, records[name]["places"], strict=True):
                sizes = shard.stored.view or shard.stored.shape
                chunks[shard.key].append(Chunk(shard.offsets, sizes, name, start, num_bytes))
                kinds[shard.key] = shard.global_shape, shard.stored.dtype
        tensors = {key: GlobalTensor(*kind, tuple(chunks[key])) for key, kind in kinds.items()}
        config = family_of(self._arch).arch_to_hf(self._arch)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_contents(folder, tensors, empty=extra_state_keys(self._arch), common=_COMMON)

    def describe(self) -> dict[str, Any]:
        """Implements `Target.describe`."""
        grid = self._grid
        sizes = {
            "world_size": grid.world_size,
            "tensor_model_parallel_size": grid.tp,
            "pipeline_model_parallel_size": grid.pp,
            "virtual_pipeline_model_parallel_size": grid.vpp,
            "expert_model_parallel_size": grid.ep,
            "expert_tensor_parallel_size": grid.expert_tp,
            "num_layers_in_first_pipeline_stage": grid.first_stage_layers,
            "num_layers_in_last_pipeline_stage": grid.last_stage_layers,
        }
        found = {"format": "megatron", "family": self._arch.family, "dtype": self._dtype}
        return found | {key: size for key, size in sizes.items() if size is not None}


def _layout(shards: Iterable[Shard]) -> Layout:
    return {shard.name: shard.stored for shard in shards}


def model_folder(folder: Path) -> Path:
    """Returns the folder with the checkpoint's metadata, inside the given one.

    Raises:
        UserError: There is none.
    """
    if not folder.is_dir():
        raise UserError(f"checkpoint folder '{folder}' does not exist.{did_you_mean_path(folder)}")
    for found in (folder, folder / _ACTOR):
        if (found / METADATA).is_file():
            return found
    tracker = folder / TRACKER
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if text != "release" and not text.isdecimal():
            raise UserError(f"'{tracker}' contains {text!r}; expected the number of an iteration, or 'release'.")
        found = folder / (text if text == "release" else f"iter_{int(text):07d}")
        if (found / METADATA).is_file():
            return found
        raise UserError(
            f"'{tracker}' names '{found.name}', but '{found}' is not a distributed checkpoint: it has no {METADATA}. "
            "Save it with Megatron's --ckpt-format torch_dist."
        )
    raise UserError(
        f"'{folder}' is not a Megatron checkpoint: it has no {METADATA} and no {TRACKER}. Give a folder such as "
        "RUN/checkpoints/step-00000010, Megatron-LM's --save folder, or one of its iterations."
    )


def find_arch(given: Path, found: Path) -> ArchSpec:
    """Returns the model of a checkpoint's config.json.

    Args:
        given: Folder that the user gave.
        found: Folder with the metadata.

    Raises:
        UserError: No config.json, or it describes no supported model.
    """
    for folder in dict.fromkeys((found, given, given / "hf")):
        if (folder / CONFIG).is_file():
            return arch_from_folder(folder)
    raise UserError(
        f"checkpoint '{given}' has no {CONFIG}, so its model is unknown. Copy the Hugging Face model's {CONFIG} into "
        "that folder."
    )
