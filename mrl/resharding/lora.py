"""Low-rank adapters (LoRA) of one rank: which matrices have them, and the layout of their tensors in PEFT's names.

A matrix W [out, in] of the Hugging Face model gets a pair lora_A [r, in] and lora_B [out, r]; the layer then computes
(W + scale * lora_B lora_A) x. A rank's fused matrix (query, key and value; gate and up) has one tensor of each kind:
`lora_A` has the projections' lora_A below each other, `lora_B` has the rows of the fused matrix. If the matrix is cut
by rows over tensor-parallel ranks, so is lora_B, and every rank has all of lora_A; if it is cut by columns, so is
lora_A, and every rank has all of lora_B. Rows of lora_B that belong to no adapted projection stay zero.

Layouts and files have a pair for each expert, also if the experts of a layer share one (`share_expert_adapters`): the
tensors of a rank's experts are then one tensor under several names.

Sources, peft 0.21: its LoRA layer (shapes, scale, initial values) and `check_target_module_exists` (an entry names
every module whose name ends with it). It imports no Megatron.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from mrl.config.config import ALL_LINEAR, LoraConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.errors import UserError
from mrl.models.base import ArchSpec, PipelineStage, ShardKind
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.layout import Layout, Piece, Region, StoredTensor
from mrl.resharding.megatron import RankTensor, rank_tensors
from mrl.resharding.shards import hf_tensors, layers_of, param_specs

LINEAR = (ShardKind.ROW, ShardKind.QKV, ShardKind.GATE_UP, ShardKind.EXPERT_GATE_UP, ShardKind.EXPERT_DOWN)
"""Kinds of parameters that may have adapters, if they are matrices."""

CUT_BY_COLUMNS = (ShardKind.ROW, ShardKind.EXPERT_DOWN)
"""Kinds of matrices that tensor parallelism cuts along the inputs."""

PEFT_PREFIX = "base_model.model."
"""Prefix of the names in PEFT's files."""

WEIGHT = ".weight"

_EXPERT = re.compile(r"experts\.\d+\.")
"""Number of an expert in Hugging Face's names and in those of Megatron's local layers."""


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix of one rank that has adapters.

    Attributes:
        weight: Its name in the rank's layout.
        stored: Its shape and pieces.
        modules: Hugging Face names of the adapted projections, in the order of the rows of `lora_A`.
        lora_a: Stored lora_A [len(modules) * r, inputs of this rank].
        lora_b: Stored lora_B [outputs of this rank, r].
    """

    weight: str
    stored: StoredTensor
    modules: tuple[str, ...]
    lora_a: StoredTensor
    lora_b: StoredTensor

    @property
    def a_name(self) -> str:
        """Name of lora_A in the rank's layout of adapters."""
        return adapter_name(self.weight, "lora_A")

    @property
    def b_name(self) -> str:
        """Name of lora_B in the rank's layout of adapters."""
        return adapter_name(self.weight, "lora_B")

    def segments(self) -> list[tuple[int, int, int]]:
        """Returns (index in `modules`, first row, row after the last) of each run of adapted rows, in stored order."""
        found = []
        for piece in self.stored.pieces:
            module = piece.hf_name.removesuffix(WEIGHT)
            if module in self.modules:
                found.append((self.modules.index(module), *piece.dst[0]))
        return found


@dataclass(frozen=True)
class TrainedMatrix(AdaptedMatrix):
    """An adapted matrix of a Megatron rank, with its position in the model."""

    tensor: RankTensor

    @property
    def is_expert(self) -> bool:
        """True for a matrix of an expert."""
        return self.tensor.spec.kind.is_expert

    @property
    def is_cut_by_columns(self) -> bool:
        """True if tensor-parallel ranks have different columns, its inputs; False: different rows."""
        return self.tensor.spec.kind in CUT_BY_COLUMNS

    @property
    def is_gated(self) -> bool:
        """True for [gate; up], of which each rank has rows of both."""
        return self.tensor.spec.kind in (ShardKind.GATE_UP, ShardKind.EXPERT_GATE_UP)


def scale_of(lora: LoraConfig) -> float:
    """Returns the factor of the product of a pair of adapters."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


def adapter_name(weight: str, which: str) -> str:
    """Returns the name of a matrix's adapter: "x.weight" and "x" -> "x.lora_A", "x.weight3" -> "x.lora_A3"."""
    module, found, number = weight.rpartition(WEIGHT)
    return f"{module}.{which}{number}" if found else f"{weight}.{which}"


def peft_name(module: str, which: str) -> str:
    """Returns the name of an adapter in PEFT's files; `which` is "lora_A" or "lora_B"."""
    return f"{PEFT_PREFIX}{module}.{which}{WEIGHT}"


def adapted_matrices(
    arch: ArchSpec, grid: ParallelLayout, rank: int, lora: LoraConfig, *, dtype: str, te: bool
) -> list[TrainedMatrix]:
    """Returns the matrices of a rank that have adapters, in the order of Megatron's chunks.

    Args:
        arch: The model.
        grid: Parallel layout of the job.
        rank: Global rank.
        lora: Config section; `rank` is above 0.
        dtype: Dtype of the adapters.
        te: True for the names of TransformerEngine's layer spec.
    """
    wanted = adapted_modules(arch, lora)
    found = []
    for tensor in rank_tensors(arch, grid, rank, dtype=dtype):
        modules = tuple(module for module in _modules_of(tensor) if module in wanted)
        if modules:
            spec = tensor.spec
            name = spec.megatron_te if te and spec.megatron_te else spec.megatron
            weight = f"chunk{tensor.chunk}.{name.format(layer=tensor.local_layer, expert=tensor.local_expert)}"
            pair = _pair(tensor.stored, modules, lora.rank, dtype)
            found.append(TrainedMatrix(weight, tensor.stored, modules, *pair, tensor))
    return found


def engine_matrices(arch: ArchSpec, layout: Layout, lora: LoraConfig, dtype: str) -> list[AdaptedMatrix]:
    """Returns the matrices of an engine's rank that have adapters, in the order of its layout.

    Args:
        arch: The model.
        layout: Stored weights of the rank.
        lora: Config section; `rank` is above 0.
        dtype: Dtype of the adapters.
    """
    wanted = adapted_modules(arch, lora)
    found = []
    for name, stored in layout.items():
        modules = dict.fromkeys(piece.hf_name.removesuffix(WEIGHT) for piece in stored.pieces)
        adapted = tuple(module for module in modules if module in wanted and len(stored.shape) == 2)
        if adapted:
            found.append(AdaptedMatrix(name, stored, adapted, *_pair(stored, adapted, lora.rank, dtype)))
    return found


def projection_pair(matrix: AdaptedMatrix, module: str, first: int, rows: int) -> tuple[StoredTensor, StoredTensor]:
    """Returns the stored lora_A and lora_B of one projection, which has `rows` rows of the matrix from `first` on."""
    (own_a,) = [piece for piece in matrix.lora_a.pieces if piece.hf_name == peft_name(module, "lora_A")]
    shape = tuple(stop - start for start, stop in own_a.src)
    lora_a = StoredTensor(shape, matrix.lora_a.dtype, (Piece(own_a.hf_name, own_a.src, tuple((0, n) for n in shape)),))
    pieces = tuple(
        Piece(piece.hf_name, piece.src, ((start - first, stop - first), piece.dst[1]))
        for piece in matrix.lora_b.pieces
        for start, stop in [piece.dst[0]]
        if first <= start < first + rows
    )
    return lora_a, StoredTensor((rows, matrix.lora_b.shape[1]), matrix.lora_b.dtype, pieces)


def adapter_layout(matrices: Sequence[AdaptedMatrix]) -> Layout:
    """Returns the layout of a rank's adapters: name -> tensor, in the coordinates of PEFT's files."""
    layout: Layout = {}
    for matrix in matrices:
        layout[matrix.a_name], layout[matrix.b_name] = matrix.lora_a, matrix.lora_b
    return layout


def peft_layout(arch: ArchSpec, lora: LoraConfig, dtype: str) -> Layout:
    """Returns the tensors of a PEFT file with all adapters of a model: PEFT's name -> tensor."""
    layout: Layout = {}
    for module, (outputs, inputs) in adapted_modules(arch, lora).items():
        for which, shape in (("lora_A", (lora.rank, inputs)), ("lora_B", (outputs, lora.rank))):
            region: Region = ((0, shape[0]), (0, shape[1]))
            layout[peft_name(module, which)] = StoredTensor(
                shape, dtype, (Piece(peft_name(module, which), region, region),)
            )
    return layout


def adapted_modules(arch: ArchSpec, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Returns Hugging Face name -> (outputs, inputs) of each module with adapters, in the order of the layers.

    Raises:
        UserError: The model has latent or linear attention, an entry of `target_modules` or `exclude_modules` names no
            module, no module is left, or shared adapters would belong to some of a layer's experts only, or to none.
    """
    if arch.mla is not None:
        raise UserError(
            f"actor.lora.rank: '{arch.family}' has multi-head latent attention, for whose projections mrl has no "
            "adapters yet. Set it to 0, which trains all parameters."
        )
    if arch.linear_attention is not None or arch.output_gate:
        raise UserError(
            f"actor.lora.rank={lora.rank}: this {arch.family} model has linear attention and output gates, for which "
            "mrl has no adapters. Remove the section to train all weights."
        )
    modules = dict(_linear_modules(arch))
    for key, entries in (("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)):
        for entry in entries:
            is_all = entry == ALL_LINEAR and key == "target_modules"
            if not is_all and not any(_is_named(module, [entry]) for module in modules):
                names = sorted({module.rpartition(".")[2] for module in modules})
                raise UserError(
                    f"actor.lora.{key}: no projection of this {arch.family} model is named '{entry}'."
                    f"{did_you_mean(entry, names)} Use {', '.join(names)}, a longer end of a module's name, or "
                    f"{ALL_LINEAR} for all. Embeddings, output layer and MoE routers have no adapters."
                )
    everything = ALL_LINEAR in lora.target_modules
    found = {
        module: shape
        for module, shape in modules.items()
        if (everything or _is_named(module, lora.target_modules)) and not _is_named(module, lora.exclude_modules)
    }
    for entry in lora.exclude_modules:
        if not everything and not any(
            _is_named(module, [entry]) for module in modules if _is_named(module, lora.target_modules)
        ):
            raise UserError(
                f"actor.lora.exclude_modules: '{entry}' would have no effect, because target_modules names none of "
                "these modules. Remove it."
            )
    if not found:
        raise UserError(
            f"actor.lora.target_modules={lora.target_modules} without exclude_modules={lora.exclude_modules} leaves no "
            "module with adapters. Name at least one."
        )
    if lora.share_expert_adapters:
        _check_shared(list(modules), found)
    return found


def first_expert(name: str) -> str:
    """Returns the name of the same module or parameter of expert 0; other names are unchanged."""
    return _EXPERT.sub("experts.0.", name)


def _check_shared(modules: Sequence[str], adapted: Collection[str]) -> None:
    """Raises UserError unless all experts of a layer that share a pair have adapters."""
    experts = [module for module in modules if _EXPERT.search(module)]
    shared = {first_expert(module) for module in adapted if _EXPERT.search(module)}
    if not shared:
        raise UserError(
            "actor.lora.share_expert_adapters=true would have no effect, because no expert has adapters. Remove it."
        )
    for module in experts:
        if first_expert(module) in shared and module not in adapted:
            raise UserError(
                f"actor.lora.share_expert_adapters=true: '{module}' has no adapters, but other experts of its layer "
                "have. Name all experts of a layer, or set share_expert_adapters to false."
            )


def modules_hash(arch: ArchSpec, lora: LoraConfig) -> str:
    """Returns a hash of the names of the adapted modules, 16 hex digits."""
    return blake2b("\n".join(sorted(adapted_modules(arch, lora))).encode(), digest_size=8).hexdigest()


def num_parameters(arch: ArchSpec, lora: LoraConfig) -> int:
    """Returns the number of elements of all adapters of a model."""
    shapes = adapted_modules(arch, lora)
    if lora.share_expert_adapters:
        shapes = {first_expert(module): shape for module, shape in shapes.items()}
    return sum(lora.rank * (outputs + inputs) for outputs, inputs in shapes.values())


def _linear_modules(arch: ArchSpec) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields Hugging Face name and (outputs, inputs) of every projection that may have adapters."""
    rows = [spec for spec in param_specs(arch) if spec.kind in LINEAR and spec.place is PipelineStage.LAYER]
    for layer in range(arch.num_layers):
        for spec in rows:
            if layer not in layers_of(spec, arch):
                continue
            experts = range(arch.moe.num_experts) if spec.kind.is_expert and arch.moe is not None else (None,)
            for expert in experts:
                for name, shape in hf_tensors(spec, arch).items():
                    if len(shape) == 2:
                        module = name.format(layer=layer, expert=expert).removesuffix(WEIGHT)
                        yield module, (shape[0], shape[1])


def _modules_of(tensor: RankTensor) -> list[str]:
    """Returns the Hugging Face modules of a rank's matrix, also those of which this rank has no rows."""
    if tensor.spec.kind not in LINEAR or len(tensor.stored.shape) != 2:
        return []
    names = (name.format(layer=tensor.layer, expert=tensor.expert) for name in tensor.spec.hf)
    return [name.removesuffix(WEIGHT) for name in names]


def _pair(stored: StoredTensor, modules: Sequence[str], rank: int, dtype: str) -> tuple[StoredTensor, StoredTensor]:
    """Returns the stored lora_A and lora_B of a rank's matrix."""
    all_of_rank = (0, rank)
    outputs, inputs = stored.shape
    columns = stored.pieces[0].src[1]  # of this rank; the same for all projections of a matrix
    a_pieces = tuple(
        Piece(peft_name(module, "lora_A"), (all_of_rank, columns), ((i * rank, (i + 1) * rank), (0, inputs)))
        for i, module in enumerate(modules)
    )
    b_pieces, padding = [], []
    for piece in stored.pieces:
        module, rows = piece.hf_name.removesuffix(WEIGHT), (piece.dst[0], all_of_rank)
        if module in modules:
            b_pieces.append(Piece(peft_name(module, "lora_B"), (piece.src[0], all_of_rank), rows))
        else:
            padding.append(rows)
    return (
        StoredTensor((rank * len(modules), inputs), dtype, a_pieces),
        StoredTensor((outputs, rank), dtype, tuple(b_pieces), tuple(padding)),
    )


def _is_named(module: str, entries: Sequence[str]) -> bool:
    return any(module == entry or module.endswith(f".{entry}") for entry in entries)
