"""Megatron's distributed checkpoint, read and written straight from and to its files.

Owns the two ends of a conversion: where the model's part of a folder is (mrl's own, Megatron-LM's), which keys it must
have, and what a checkpoint of a parallel layout consists of. One process does it, without Megatron, a model or a
process group. Which key holds what is known to `resharding/dist_checkpoint.py`, how files hold it to `torch_dist.py`.

A written checkpoint loads at any layout with `megatron.core.dist_checkpointing.load`. Optimizer states are neither read
nor written.
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
from mrl.parallel_layout import Grid
from mrl.resharding.dist_checkpoint import (
    EXTRA_STATE,
    Shard,
    StackedPiece,
    extra_states,
    global_tensors,
    known_keys,
    rank_shards,
    spellings,
)
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.layout import Layout, Region
from mrl.resharding.megatron import OUTPUT, VOCABULARY
from mrl.resharding.regions import intersect, slices, translate, volume, whole

CONFIG = "config.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""In Megatron-LM's folder: the number of the last iteration, or "release"."""

_ACTOR = "actor"
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.")
_COMMON = {
    "checkpoint_version": 3.0,
    "iteration": 0,
    "content_metadata": {"singleton_local_shards": False, "non_homogeneous_layers": False},
}
"""What Megatron-LM looks for in `common.pt`; the version says that query, key and value need no reordering."""


@dataclass(frozen=True)
class _Box:
    """A part of a Hugging Face tensor in a file: `inside` of a chunk, in its global tensor's coordinates, is `own`."""

    chunk: Chunk
    inside: Region
    dtype: str
    own: Region


class MegatronSource(Source):
    """A distributed checkpoint, open for reading by parts."""

    def __init__(self, folder: str | Path, arch: ArchSpec | None = None) -> None:
        """Finds the model and reads the metadata.

        Args:
            folder: A commit of a run of mrl, a checkpoint folder of Megatron-LM (the last iteration is taken), one of
                its iterations, or what `MegatronTarget` wrote.
            arch: The model; None: what config.json says, in the folder or in the one it was found in; a critic where
                the output layer is a value head.

        Raises:
            UserError: There is no such checkpoint, it is of another backend, its metadata is broken or asks for code,
                or nothing says which model it is.
        """
        self.folder = _model_folder(Path(folder))
        self.arch = _arch(Path(folder), self.folder) if arch is None else arch
        self._contents = read_contents(self.folder)
        self._tensors = self._contents.tensors
        if arch is None and OUTPUT in self._tensors and self._tensors[OUTPUT].shape[0] == 1:
            self.arch = critic_of(self.arch)
        self._stacks = global_tensors(self.arch, self._tensors.keys())
        self._places: dict[str, list[tuple[str, StackedPiece]]] = defaultdict(list)
        for key, stack in self._stacks.items():
            for part in stack.parts:
                self._places[part.piece.hf_name].append((key, part))
        self._files = ChunkFiles(self.folder)
        names = {chunk.file for key in self._stacks if key in self._tensors for chunk in self._tensors[key].chunks}
        self.files = (METADATA, BACKEND_FILE, *sorted(names))

    def dtype(self, hf_name: str) -> str:
        """See `Source`."""
        key, _ = self._place(hf_name)[0]
        return self._tensors[key].dtype

    def read(self, hf_name: str, region: Region) -> Tensor:
        """See `Source`; a view of the file where one box holds the region and lies aligned, else a copy."""
        found = self.view(hf_name, region)
        if found is None:
            found = torch.empty([stop - start for start, stop in region], dtype=DTYPES[self.dtype(hf_name)])
            self.copy_into(found, hf_name, region)
        return found

    def view(self, hf_name: str, region: Region) -> Tensor | None:
        """See `Source`."""
        boxes = list(islice(self._boxes(hf_name, region), 2))
        if len(boxes) != 1 or boxes[0].own != region:
            return None
        return self._read(boxes[0])

    def copy_into(self, tensor: Tensor, hf_name: str, region: Region) -> None:
        """See `Source`; each box goes to its place at once."""
        found = 0
        for box in self._boxes(hf_name, region):
            tensor[slices(translate(box.own, region, whole(tensor.shape)))] = self._read(box)
            found += volume(box.own)
        if found != volume(region):
            raise UserError(f"checkpoint '{self.folder}' lacks a part of '{hf_name}' {list(region)}.")

    def _boxes(self, hf_name: str, region: Region) -> Iterator[_Box]:
        """What holds parts of a region."""
        for key, part in self._place(hf_name):
            both = intersect(region, part.piece.src)
            if both is not None:
                tensor = self._tensors[key]
                for chunk, inside in tensor.chunks_in(part.outward(both)):
                    yield _Box(chunk, inside, tensor.dtype, part.inward(inside))

    def _read(self, box: _Box) -> Tensor:
        found = self._files.read(box.chunk, box.inside, box.dtype)
        return found.view([stop - start for start, stop in box.own])

    def check(self) -> None:
        """See `Source`; every file must be there and as long as the metadata says."""
        missing = [key for key in self._stacks if key not in self._tensors]
        if missing:
            raise self._misfit(f"lacks {len(missing)} tensors", missing[0])
        known = known_keys(self.arch) | set(self._stacks)
        given = [*self._tensors, *self._contents.pickled]
        unknown = [key for key in given if key.startswith(_MODEL_KEYS) and key not in known and EXTRA_STATE not in key]
        if unknown:
            raise self._misfit(f"has {len(unknown)} unknown tensors", unknown[0])
        for key, stack in self._stacks.items():
            self._check_tensor(key, stack.shape)
        self._files.check(chunk for key in self._stacks for chunk in self._tensors[key].chunks)

    def describe(self) -> dict[str, Any]:
        """See `Source`."""
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
            "spelling": sorted(spelling.value for spelling in spellings(self.arch, self._tensors.keys())),
            "tensors": tensors,
            "not_read": {"tensors": len(others), "objects": len(self._contents.pickled)},
        }

    def close(self) -> None:
        """See `Source`."""
        self._files.close()

    def _place(self, hf_name: str) -> list[tuple[str, StackedPiece]]:
        if hf_name not in self._places:
            raise KeyError(f"a {self.arch.family} model has no tensor '{hf_name}'")
        for key, _ in self._places[hf_name]:
            if key not in self._tensors:
                raise self._misfit("lacks a tensor", key)
        return self._places[hf_name]

    def _check_tensor(self, key: str, expected: tuple[int, ...]) -> None:
        tensor = self._tensors[key]
        fits = tensor.shape == expected
        if key in VOCABULARY:  # padded to whatever the job that saved it wanted
            fits = len(tensor.shape) == 2 and tensor.shape[0] >= expected[0] and tensor.shape[1:] == expected[1:]
        if not fits:
            raise UserError(
                f"checkpoint '{self.folder}': '{key}' has shape {list(tensor.shape)}, but {CONFIG} asks for "
                f"{list(expected)}. They do not belong together."
            )
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"checkpoint '{self.folder}': '{key}' is stored as {tensor.dtype}; expected one of {', '.join(DTYPES)}."
            )
        try:
            tensor.check_cover()
        except ValueError as error:
            raise UserError(f"'{self.folder / METADATA}' is wrong: '{key}' {error}.") from error

    def _misfit(self, what: str, first: str) -> UserError:
        return UserError(
            f"checkpoint '{self.folder}' {what} of a {self.arch.family} model with {self.arch.num_layers} layers, "
            f"first '{first}'. {CONFIG} and the weights do not belong together."
        )


class MegatronTarget(Target):
    """A distributed checkpoint as the ranks of a parallel layout would save it."""

    def __init__(self, arch: ArchSpec, grid: Grid, dtype: str) -> None:
        """Plans the files: one for each rank that holds something that no copy of it writes.

        Args:
            arch: The model.
            grid: The parallel layout; ranks beyond one copy of the model write nothing.
            dtype: Of every tensor.

        Raises:
            UserError: A parallel size does not divide what it splits.
        """
        self._arch, self._grid, self._dtype = arch, grid, dtype
        self._shards: dict[str, list[Shard]] = {}
        for rank in range(grid.world_size):
            shards = list(rank_shards(arch, grid, rank, dtype=dtype))
            if shards:
                self._shards[f"__{rank}_0.distcp"] = shards
        self.files = tuple(OutFile(name, _layout(shards)) for name, shards in self._shards.items())

    def write(self, path: Path, file: OutFile, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """See `Target`; the record has each blob's place in the file."""
        names = iter(file.layout.items())

        def boxes() -> Iterable[Tensor]:
            for name, tensor in tensors:
                expected, stored = next(names, ("", None))
                if stored is None or name != expected or tensor.dtype != DTYPES[stored.dtype]:
                    raise RuntimeError(f"'{name}' is not what comes next in '{file.name}': '{expected}'")
                yield tensor.contiguous().view(stored.view or stored.shape)

        with OutputFile(path) as out:
            places = write_blobs(out, boxes())
        if len(places) != len(file.layout):
            raise RuntimeError(f"'{file.name}' has {len(file.layout)} tensors, {len(places)} were given")
        return {"num_bytes": out.num_bytes, "xxh3": out.xxh3, "places": places}

    def finish(self, folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        """See `Target`; also config.json, and an empty extra state for each module that may ask for one."""
        chunks: dict[str, list[Chunk]] = defaultdict(list)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shards in self._shards.items():
            for shard, (start, num_bytes) in zip(shards, records[name]["places"], strict=True):
                sizes = shard.stored.view or shard.stored.shape
                chunks[shard.key].append(Chunk(shard.offsets, sizes, name, start, num_bytes))
                shapes[shard.key] = shard.global_shape
        tensors = {key: GlobalTensor(shapes[key], self._dtype, tuple(chunks[key])) for key in shapes}
        config = family_of(self._arch).arch_to_hf(self._arch)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        write_contents(folder, tensors, empty=extra_states(self._arch), common=_COMMON)

    def describe(self) -> dict[str, Any]:
        """See `Target`."""
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


def _model_folder(folder: Path) -> Path:
    """Where the checkpoint's metadata is, inside what the user named."""
    if not folder.is_dir():
        raise UserError(f"checkpoint folder '{folder}' does not exist.{did_you_mean_path(folder)}")
    for found in (folder, folder / _ACTOR):
        if (found / METADATA).is_file():
            return found
    tracker = folder / TRACKER
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if text != "release" and not text.isdecimal():
            raise UserError(f"'{tracker}' holds {text!r}; expected the number of an iteration, or 'release'.")
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


def _arch(given: Path, found: Path) -> ArchSpec:
    for folder in dict.fromkeys((found, given, given / "hf")):
        if (folder / CONFIG).is_file():
            return arch_from_folder(folder)
    raise UserError(
        f"checkpoint '{given}' has no {CONFIG}, so nothing says which model it is. Copy the Hugging Face model's "
        f"{CONFIG} into that folder."
    )
