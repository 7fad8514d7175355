"""Hugging Face folders: config.json, safetensors (one file or shards with an index), tokenizer.

Reading is for conversions and for the ranks of a job; tensors are views of mapped files, so no reader needs memory for
the entire model. For writing, this file assigns tensors to files and writes the index, config.json and the companion
files; `mrl/commands/convert/convert.py` and `mrl/trainer/hf_export.py` supply the weights.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.checkpoint.formats.base import OutFile, Source, Target
from mrl.checkpoint.formats.hf_fp8 import Fp8Scales
from mrl.checkpoint.formats.hf_mxfp4 import Mxfp4Tensors
from mrl.checkpoint.formats.safetensors_file import Header, SafetensorsFile, write_safetensors
from mrl.config.peft_folder import ADAPTER_CONFIG, is_adapter_folder
from mrl.errors import UserError, first_line, shown
from mrl.models._quantization import QUANTIZED, Fp8Format, Mxfp4Format, read_quantization
from mrl.models.base import ArchSpec, critic_of
from mrl.models.hf_config import TOKENIZER_FILES, arch_from_folder, family_of, read_config
from mrl.resharding.copy_op import ITEM_BYTES, num_bytes
from mrl.resharding.dtypes import fill_tensors
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.hf import EMBEDDINGS, HEAD, VALUE_BIAS, VALUE_HEAD, hf_layout
from mrl.resharding.hf_names import Fused, join, locate_tensors, unwrapped, written_together
from mrl.resharding.layout import Layout, Region
from mrl.resharding.regions import full_region, slices

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ROWS_AT_ONCE = 4096
"""Vocabulary rows compared at a time, so that no copy of an entire matrix is made."""

MAX_FILE_BYTES = 5 << 30

_DTYPES = ("float32", "bfloat16", "float16")


class HfSource(Source):
    """A Hugging Face folder, open for reading by regions."""

    def __init__(self, folder: str | Path, arch: ArchSpec | None = None) -> None:
        """Locates every tensor and checks the headers of all files.

        Args:
            folder: Folder with safetensors, single or sharded.
            arch: The model; None: the model of config.json, a critic if the folder has a value head.

        Raises:
            UserError: The folder has adapters, no config.json, no safetensors or two sets of them, its index is broken,
                or a file is missing or truncated.
        """
        self.folder = Path(folder)
        if is_adapter_folder(folder):
            raise UserError(
                f"model folder '{folder}' has {ADAPTER_CONFIG}: it has adapters for another model. To train them on, "
                "name the folder in actor.lora.adapter_path and the other model in model.path; to use both as one "
                f"model, merge them: mrl convert hf-to-hf --model_dir MODEL --adapter {folder} --output_dir OUT."
            )
        self.arch = arch_from_folder(folder) if arch is None else arch
        self._open_files: dict[str, SafetensorsFile] = {}
        self._file_of = self._find()
        if arch is None and any(unwrapped(name) == VALUE_HEAD for name in self._file_of):
            self.arch = critic_of(self.arch)
        form = self._quantization()
        self._scales = Fp8Scales(form, self._file_of) if isinstance(form, Fp8Format) else None
        self._packed = Mxfp4Tensors(form, self._file_of) if isinstance(form, Mxfp4Format) else None
        weights = list(self._file_of) if self._scales is None else self._scales.others
        if self._packed is not None:
            weights = [*self._packed.others, *self._packed.blocks]
        try:
            shapes = {name: self._stored_header(name).shape for name in weights}
            self._tensors = locate_tensors(self.arch, shapes)
        except UserError as error:
            raise UserError(f"model folder '{folder}': {error}") from error
        names = (*sorted(set(self._file_of.values())), INDEX, "config.json")
        self.files = tuple(name for name in names if (self.folder / name).is_file())

    def dtype(self, hf_name: str) -> str:
        """Implements `Source.dtype`."""
        stored = self._header(hf_name).dtype
        return stored if self._scales is None or stored != FP8 else self._scales.dtype

    def read(self, hf_name: str, region: Region) -> Tensor:
        """Implements `Source.read`; a view of a private memory mapping of the file; misaligned tensors are copied.

        Regions of matrices in FP8 and MXFP4 are dequantized.
        """
        located = self._tensors[hf_name]
        if self._packed is not None and located.stored in self._packed.blocks:
            return self._packed.read(located, self._stored_tensor, region)
        if self._scales is not None and self._header(hf_name).dtype == FP8 and not located.index:
            return self._scales.read(located.stored, self._stored_tensor, region)
        return self._tensor(hf_name)[slices(region)]

    def check(self) -> None:
        """Implements `Source.check`.

        Accepts rotary frequencies, a tied head that equals the embeddings, and a layer for multi-token prediction.
        """
        arch = self.arch
        expected = hf_layout(arch, "float32")
        missing = [name for name in expected if name not in self._tensors]
        unknown = [name for name in self._tensors if name not in expected and not self._is_optional(name)]
        if arch.value_head and VALUE_BIAS in map(unwrapped, unknown):
            raise UserError(
                f"model folder '{self.folder}': its value head has a bias, '{VALUE_BIAS}' (as token classification "
                "models and verl's critics have), and mrl's has none. If the bias is 0, remove the tensor; otherwise "
                "give a model without one."
            )
        if missing == [HEAD] and not unknown:
            raise UserError(
                f"model folder '{self.folder}' has no '{HEAD}': these are the weights of a model without a head, as "
                "transformers' AutoModel saves them. Save it with AutoModelForCausalLM, or set tie_word_embeddings to "
                "true in config.json if the head is the embeddings."
            )
        lacks = f"lacks {len(missing)} tensors, first {shown(missing[0])}" if missing else ""
        has = f"has {len(unknown)} unknown tensors, first {shown(unknown[0])}" if unknown else ""
        if missing or unknown:
            raise UserError(
                f"model folder '{self.folder}' {' and '.join(filter(None, (lacks, has)))}: config.json describes a "
                f"{arch.family} model with {arch.num_layers} layers. Give weights that match config.json, under the "
                "names that transformers' save_pretrained writes."
            )
        for name, stored in expected.items():
            header, located = self._header(name), self._tensors[name]
            if header.shape != located.shape:
                vocab = (
                    "; config.json has vocab_size=" + str(arch.vocab_size) if arch.vocab_size in stored.shape else ""
                )
                raise UserError(
                    f"model folder '{self.folder}': '{located.stored}' has shape {list(header.shape)}, but config.json "
                    f"requires {list(located.shape)}{vocab}."
                )
            if header.dtype not in _DTYPES and (self._scales is None or header.dtype != FP8):
                raise UserError(
                    f"model folder '{self.folder}': '{located.stored}' is stored as {header.dtype}; expected one of "
                    f"{', '.join(_DTYPES)}. Use a release of the model that is not quantized."
                )
        self._check_scales()
        if arch.tie_word_embeddings and HEAD in self._tensors:
            self._check_tied_head()

    def describe(self) -> dict[str, Any]:
        """Implements `Source.describe`."""
        tensors = {
            name: {"shape": list(located.part_of(header.shape)), "dtype": header.dtype, "file": file}
            for name, located in self._tensors.items()
            for file, header in [(self._file_with(located.stored), self._header(name))]
        }
        return {
            "format": "huggingface",
            "family": self.arch.family,
            "num_layers": self.arch.num_layers,
            "num_bytes": sum(self._open(file).num_bytes for file in set(self._file_of.values())),
            "tensors": tensors,
        }

    def close(self) -> None:
        """Implements `Source.close`; maps are released with the tensors that were read."""
        self._open_files.clear()

    def fill(self, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
        """Copies the pieces of `layout` into `tensors`, with a cast to each tensor's dtype; padding becomes zero.

        Raises:
            UserError: A file ends early or cannot be read.
        """
        fill_tensors(layout, tensors, self.read)

    def _check_tied_head(self) -> None:
        """Refuses a head that differs from tied embeddings: versions of transformers differ in whether they use it."""
        head, embeddings = (
            self.read(name, full_region(self._tensors[name].part_of(self._header(name).shape)))
            for name in (HEAD, EMBEDDINGS)
        )
        same = head.shape == embeddings.shape and all(
            torch.equal(head_rows.float(), embedding_rows.float())
            for head_rows, embedding_rows in zip(
                torch.split(head, _ROWS_AT_ONCE), torch.split(embeddings, _ROWS_AT_ONCE), strict=True
            )
        )
        if not same:
            raise UserError(
                f"model folder '{self.folder}': config.json has tie_word_embeddings=true, but '{HEAD}' differs "
                f"from '{EMBEDDINGS}'. Set tie_word_embeddings to false to use the head in the file, or remove the "
                "head from the file."
            )

    def _quantization(self) -> Fp8Format | Mxfp4Format | None:
        """Returns the form of quantized weights, if config.json has any."""
        if not (self.folder / "config.json").is_file():
            return None
        try:
            return read_quantization(read_config(self.folder))
        except UserError as error:
            raise UserError(f"model folder '{self.folder}': {error}") from error

    def _check_scales(self) -> None:
        if self._scales is None:
            return
        headers = {name: self._stored_header(name) for name in self._file_of}
        for located in self._tensors.values():
            if located.index and headers[located.stored].dtype == FP8:
                raise UserError(
                    f"model folder '{self.folder}': '{located.stored}' has the FP8 weights of all experts. Save the "
                    "model with one tensor per expert, as the original release has them."
                )
        try:
            self._scales.check(
                {name: header.dtype for name, header in headers.items()},
                {name: header.shape for name, header in headers.items()},
            )
        except UserError as error:
            raise UserError(f"model folder '{self.folder}': {error}") from error

    def num_left_out(self) -> int:
        """Implements `Source.num_left_out`: the tensors of layers for multi-token prediction."""
        return sum(map(self._is_beyond, self._tensors))

    def _is_beyond(self, name: str) -> bool:
        extra = f"model.layers.{self.arch.num_layers}.", "mtp."
        return family_of(self.arch).extra_layers and name.startswith(extra)

    def _is_optional(self, name: str) -> bool:
        is_tied_head = name == HEAD and self.arch.tie_word_embeddings
        return self._is_beyond(name) or name.endswith("rotary_emb.inv_freq") or is_tied_head

    def _find(self) -> dict[str, str]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        found = self._read_index(index) if index.is_file() else None
        if single.is_file() and (found is None or set(found.values()) == {SINGLE}):
            return dict.fromkeys(self._open(SINGLE).headers, SINGLE)
        if single.is_file():
            raise UserError(
                f"model folder '{self.folder}' has two sets of weights: {SINGLE}, which transformers reads, and the "
                f"shards of {INDEX}. Remove {SINGLE}, or the index with its shards."
            )
        if found is not None:
            return found
        raise UserError(
            f"model folder '{self.folder}' has neither {SINGLE} nor {INDEX}. mrl reads safetensors; convert other "
            "formats with transformers' save_pretrained."
        )

    def _read_index(self, path: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            found = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {first_line(error)[:300]}"
            raise UserError(f"'{path}' is not a safetensors index: {reason}") from error
        if not found:
            raise UserError(f"'{path}' is not a safetensors index: its weight_map is empty.")
        here = {entry.name for entry in self.folder.iterdir()}
        for file in sorted(set(found.values())):
            if file not in here or not (self.folder / file).is_file():
                raise UserError(
                    f"'{path}' lists the file {shown(file)}, which is not in the folder. Download it again."
                )
            inside = self._open(file).headers
            lacking = [name for name, where in found.items() if where == file and name not in inside]
            if lacking:
                raise UserError(f"'{path}' lists {shown(lacking[0])} in '{file}', but it is not there.")
        return found

    def _header(self, hf_name: str) -> Header:
        """Returns the header of the stored tensor that contains this one."""
        return self._stored_header(self._tensors[hf_name].stored)

    def _stored_header(self, stored: str) -> Header:
        """Returns the header of a stored tensor, or of the tensor that is dequantized from several."""
        if self._packed is None or stored not in self._packed.blocks:
            return self._open(self._file_of[stored]).headers[stored]
        headers = {name: self._stored_header(name) for name in self._packed.parts_of(stored)}
        shapes, dtypes = ({name: getattr(each, what) for name, each in headers.items()} for what in ("shape", "dtype"))
        blocks = headers[self._packed.blocks[stored]]
        return Header(self._packed.shape(stored, shapes, dtypes), self._packed.dtype, blocks.start, blocks.stop)

    def _file_with(self, stored: str) -> str:
        return self._file_of[stored if self._packed is None else self._packed.blocks.get(stored, stored)]

    def _tensor(self, hf_name: str) -> Tensor:
        located = self._tensors[hf_name]
        return located.view_in(self._stored_tensor(located.stored))

    def _stored_tensor(self, stored: str) -> Tensor:
        return self._open(self._file_of[stored]).tensor(stored)

    def _open(self, file: str) -> SafetensorsFile:
        if file not in self._open_files:
            self._open_files[file] = SafetensorsFile(self.folder / file)
        return self._open_files[file]


def load_from_hf(folder: str | Path, arch: ArchSpec, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Fills one rank's tensors from a Hugging Face folder. Not collective: each rank reads its own parts.

    Args:
        folder: Folder with safetensors, single or sharded.
        arch: The model of config.json.
        layout: Layout of this rank (`megatron_layout`, `native_layout`, `hf_layout`).
        tensors: Name -> tensor to fill in place, for each name of the layout; dtypes may differ from the files'.

    Raises:
        UserError: The files are missing or corrupt, or do not match `arch`.
    """
    with closing(HfSource(folder, arch)) as weights:
        weights.check()
        weights.fill(layout, tensors)


class HfTarget(Target):
    """A Hugging Face folder to write.

    Attributes:
        layout: All tensors, in the order of the model.
    """

    def __init__(
        self,
        arch: ArchSpec,
        dtype: str | Mapping[str, str],
        *,
        like: str | Path | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Assigns tensors to files.

        Args:
            arch: The model.
            dtype: Dtype of every tensor, or tensor name -> dtype.
            like: Model folder whose tokenizer, generation settings and further config.json keys are copied; None: no
                copies.
            max_file_bytes: Largest safetensors file, unless one tensor is larger.
        """
        self.arch = arch
        if isinstance(dtype, str):
            self.layout = hf_layout(arch, dtype)
        else:
            by_dtype = {each: hf_layout(arch, each) for each in set(dtype.values())}
            self.layout = {name: by_dtype[dtype[name]][name] for name in hf_layout(arch, "float32")}
        self._like = None if like is None else Path(like)
        self._fused = written_together(arch)
        assigned = assign_files(self.layout, max_file_bytes, self._fused)
        self.files = tuple(OutFile(name, part) for name, part in assigned.items())
        units = _stored_units(self.layout, self._fused)
        self.buffer_bytes = max((sum(map(num_bytes, units[name].values())) for name in self._fused), default=0)

    def write(self, path: Path, file: OutFile, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """Implements `Target.write`."""
        shapes = stored_shapes(file.layout, self._fused)
        return write_safetensors(path, shapes, join(tensors, self._fused), {"format": "pt"})

    def finish(self, folder: Path, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Implements `Target.finish`."""
        write_metadata_files(folder, self.arch, {file.name: file.layout for file in self.files}, self._like)

    def describe(self) -> dict[str, Any]:
        """Implements `Target.describe`."""
        dtypes = Counter(stored.dtype for stored in self.layout.values())
        return {
            "format": "huggingface",
            "family": self.arch.family,
            "dtypes": dict(sorted(dtypes.items())),
            "num_files": len(self.files),
        }


def stored_shapes(layout: Layout, fused: Fused) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns stored name -> (shape, dtype) of the tensors of a file, in the order in which `join` yields them."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for stored, unit in _stored_units(layout, fused).items():
        name = next(iter(unit))
        shapes[stored] = (fused[stored][name].shape if stored in fused else unit[name].shape, unit[name].dtype)
    return shapes


def _stored_units(layout: Layout, fused: Fused) -> dict[str, Layout]:
    """Returns stored name -> the tensors of the table that are stored under it."""
    stored_of = {own: stored for stored, parts in fused.items() for own in parts}
    units: dict[str, Layout] = {}
    for name, stored in layout.items():
        units.setdefault(stored_of.get(name, name), {})[name] = stored
    return units


def assign_files(layout: Layout, max_file_bytes: int, fused: Fused | None = None) -> dict[str, Layout]:
    """Returns file name -> its tensors, in the order of the layout; only a single larger tensor exceeds the limit.

    Inside a file, wider dtypes come first, as the format's alignment requires. Tensors that are stored together
    (`written_together`) are in one file, one after another.
    """
    parts: list[Layout] = []
    room = 0
    for unit in _stored_units(layout, fused or {}).values():
        size = sum(num_bytes(stored) for stored in unit.values())
        if size > room:
            parts.append({})
            room = max_file_bytes
        parts[-1].update(unit)
        room -= size
    parts = [dict(sorted(part.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])) for part in parts]
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{index:05}-of-{len(parts):05}.safetensors": part for index, part in enumerate(parts, 1)}


def write_metadata_files(
    folder: Path,
    arch: ArchSpec,
    files: Mapping[str, Layout],
    like: Path | None,
    extra_files: Mapping[str, Any] | None = None,
) -> None:
    """Writes everything of a folder except weights: the index, copied files, and last config.json.

    Args:
        folder: Existing folder.
        arch: The model.
        files: Return value of `assign_files`.
        like: Model folder whose tokenizer, generation settings and further config.json keys are copied; None: no
            copies.
        extra_files: Additional keys of config.json; None: no additional keys.

    Raises:
        UserError: `like` has no readable config.json.
        OSError: The disk refuses.
    """
    own = family_of(arch).arch_to_hf(arch)
    config = dict(own)
    if like is not None:
        config = {**read_config(like), **own}
        for key in QUANTIZED:
            config.pop(key, None)
        if "layer_types" not in own:
            # of a deeper model, or of a window as long as the context; without it the family's default applies
            config.pop("layer_types", None)
        for name in TOKENIZER_FILES:
            if (like / name).is_file():
                shutil.copyfile(like / name, folder / name)
    if len(files) > 1:
        sizes = [num_bytes(stored) for content in files.values() for stored in content.values()]
        fused = written_together(arch)
        weight_map = {name: file for file, content in files.items() for name in stored_shapes(content, fused)}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    dtypes: Counter[str] = Counter()
    for content in files.values():
        for stored in content.values():
            dtypes[stored.dtype] += num_bytes(stored)
    dtype = dtypes.most_common(1)[0][0]
    config |= {"dtype": dtype, "torch_dtype": dtype, **(extra_files or {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
