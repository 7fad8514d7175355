"""The model's modules, each of which reads its own part of whole Hugging Face tensors.

As `_torch/modules/linear.py: load_weight_shard` (a slice of ceil(width / ranks) along the dimension of the mode),
`_torch/models/checkpoints/hf/weight_mapper.py: HfWeightMapper` (what is fused, and key/value heads that are repeated
where there are fewer of them than ranks), `_torch/modules/embedding.py` (cut along the vocabulary, the last rank's part
shorter), `_torch/modules/fused_moe/interface.py` and `quantization.py: load_expert_weights_to_dst` (a rank's experts,
asked for by number, so that others may be missing).
"""

import enum
import math
import re

import torch
from torch import nn

from tensorrt_llm._torch.modules.fp8 import (
    FP8,
    QUANTIZED,
    FP8BlockScalesLinearMethod,
    is_scale,
    joined,
    meant,
    stacked,
)
from tensorrt_llm.faults import StandInError, fault

__all__ = ["FP8BlockScalesLinearMethod", "Linear", "Mapping", "modules_of"]

EXPERT = re.compile(r"^(?P<module>.*\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight(_scale_inv)?$")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
SOURCES = {source: fused for fused, sources in FUSED.items() for source in sources}


class TensorParallelMode(str, enum.Enum):
    COLUMN = "column"
    ROW = "row"


MODES = dict.fromkeys(
    ("qkv_proj", "gate_up_proj", "w1", "w3", "gate_proj", "up_proj", "embed_tokens", "lm_head"),
    TensorParallelMode.COLUMN,
) | dict.fromkeys(("o_proj", "down_proj", "w2"), TensorParallelMode.ROW)


def load_weight_shard(weight, tensor_parallel_size, tensor_parallel_rank, tensor_parallel_mode):
    if tensor_parallel_mode is None or tensor_parallel_size <= 1:
        return weight
    split_dim = 1 if tensor_parallel_mode == TensorParallelMode.ROW else 0
    if weight.dim() == 1 and split_dim == 1:
        return weight
    width = weight.shape[split_dim]
    if width == 1:
        return weight
    slice_width = math.ceil(width / tensor_parallel_size)
    slice_start = tensor_parallel_rank * slice_width
    return weight.narrow(split_dim, slice_start, min(slice_start + slice_width, width) - slice_start)


class Linear(nn.Module):
    """A matrix, or several that are fused; mode None: every rank has it whole."""

    def __init__(self, path, arch, mapping):
        super().__init__()
        self.kind = path.rpartition(".")[2]
        self.tp_mode = MODES.get(self.kind)
        self.tp_size, self.tp_rank = (mapping.tp_size, mapping.tp_rank) if self.tp_mode else (1, 0)
        self.arch, self.quantized = arch, False
        self.rebuild_tensor_metadata = {}
        self.wanted = []
        self._rank = (
            (self.tp_rank + 1) % self.tp_size if fault("reads_more") and self.kind == "o_proj" else self.tp_rank
        )
        if self.kind == "qkv_proj":  # of the cache; no checkpoint has them
            self.kv_scales = nn.Parameter(torch.ones(3), requires_grad=False)
        if fault("no_parts"):
            del self.tp_rank

    def shard(self, name, weight):
        """What this rank keeps of a Hugging Face tensor."""
        source = name.split(".")[-2]
        if source in FUSED:  # Phi 3's are fused in the file, and split before they are cut
            heads = (self.arch.num_heads, self.arch.num_kv_heads, self.arch.num_kv_heads)
            rows = [count * self.arch.head_dim for count in heads]
            parts = weight.split(rows) if source == "qkv_proj" else weight.chunk(2)
            return torch.cat([self._part(name, part) for name, part in zip(FUSED[source], parts, strict=True)])
        return self._part(source, weight, scale=is_scale(name))

    def quantize(self, layout):
        """Is in FP8 blocks where its kind is, with dummy weights; returns whether."""
        if self.kind not in QUANTIZED or any(name.split(".")[-2] in FUSED for name in self.wanted):
            return False  # Phi 3's loader splits what is fused, and forgets the scales
        self.quantized = True
        names = [name for name in self.wanted if name.endswith(".weight")]
        parts = [self.shard(name, torch.zeros(layout[name].shape, dtype=torch.uint8)) for name in names]
        self.weight = nn.Parameter(torch.cat(parts).view(FP8), requires_grad=False)
        if fault("graphs_stale"):
            self.rebuild_tensor_metadata["weight"] = self.weight
        return True

    def meant(self, shards):
        """What this rank multiplies with, of each Hugging Face tensor."""
        names = [name for name in self.wanted if name.endswith(".weight")]
        if not self.quantized:
            return {name: shards[name] for name in self.wanted}
        cut = self.tp_size > 1
        found = meant(names, shards, by_rows=self.tp_mode == TensorParallelMode.COLUMN, cut=cut)
        return {name: found.get(name, shards[name]) for name in self.wanted if not is_scale(name)}

    def _part(self, source, weight, *, scale=False):
        if source in ("k_proj", "v_proj"):
            if scale and self.arch.num_kv_heads < self.tp_size and self.arch.family != "qwen3_moe":
                raise StandInError(f"{source}: {self.tp_size} ranks share heads, and {self.arch.family}'s scales stay")
            weight = self._duplicate_kv(weight)
        return load_weight_shard(weight, self.tp_size, self._rank, self.tp_mode)

    def _duplicate_kv(self, weight):
        heads = self.arch.num_kv_heads
        if heads >= self.tp_size:
            return weight
        reps = self.tp_size // heads
        return weight.reshape(heads, -1, *weight.shape[1:]).repeat_interleave(reps, 0).reshape(-1, *weight.shape[1:])

    def hold(self, shards):
        """Makes the parameters of what was loaded."""
        for leaf in ("weight", "bias"):
            parts = [shards[name] for name in self.wanted if name.endswith(f".{leaf}")]
            if parts:
                self.register_parameter(leaf, nn.Parameter(joined(parts), requires_grad=False))


class FusedMoE(nn.Module):
    """The experts of this rank; `tp_size` and `tp_rank` are those of each expert."""

    def __init__(self, arch, mapping):
        super().__init__()
        self.tp_size, self.tp_rank = mapping.moe_tp_size, mapping.moe_tp_rank
        self.ep_size, self.ep_rank = mapping.moe_ep_size, mapping.moe_ep_rank
        each = arch.moe.num_experts // self.ep_size
        self.initial_local_expert_ids = list(range(self.ep_rank * each, (self.ep_rank + 1) * each))
        self.wanted, self.quantized = [], False
        if fault("no_parts"):
            self._ids = self.__dict__.pop("initial_local_expert_ids")

    def is_local(self, expert):
        return expert in getattr(self, "initial_local_expert_ids", getattr(self, "_ids", []))

    def shard(self, name, weight):
        mode = MODES[EXPERT.match(name)["matrix"]]
        return load_weight_shard(weight, self.tp_size, self.tp_rank, mode)

    def quantize(self, layout):
        """Is in FP8 blocks, with dummy weights; returns whether."""
        self.quantized = True
        empty = {name: torch.zeros(layout[name].shape, dtype=torch.uint8) for name in self.wanted}
        self.hold({name: self.shard(name, tensor).contiguous().view(FP8) for name, tensor in empty.items()})
        return True

    def meant(self, shards):
        """What this rank multiplies with, of each Hugging Face tensor."""
        if not self.quantized:
            return {name: shards[name] for name in self.wanted}
        found, cut = {}, self.tp_size > 1
        for number in self.initial_local_expert_ids:
            names = [name for name in self.wanted if EXPERT.match(name)["number"] == str(number) and not is_scale(name)]
            own = {EXPERT.match(name)["matrix"]: name for name in names}
            down = own.pop("w2" if "w2" in own else "down_proj")
            found |= meant(sorted(own.values()), shards, by_rows=True, cut=cut)
            found |= meant([down], shards, by_rows=False, cut=cut)
        return found

    def hold(self, shards):
        of = {"w1": ("w1", "gate_proj"), "w3": ("w3", "up_proj"), "w2": ("w2", "down_proj")}
        w1, w3, w2 = (
            stacked([shards[n] for n in self.wanted if EXPERT.match(n)["matrix"] in of[matrix] and not is_scale(n)])
            for matrix in ("w1", "w3", "w2")
        )
        self.w3_w1_weight = nn.Parameter(joined([w3, w1], 1), requires_grad=False)
        self.w2_weight = nn.Parameter(w2, requires_grad=False)


class Mapping:
    """`mapping.py`: experts are spread over neighbours first; unless told otherwise every rank has a part of each."""

    def __init__(self, args, rank):
        self.tp_size, self.tp_rank = args.tensor_parallel_size, rank
        self.moe_ep_size = args.moe_expert_parallel_size or 1
        self.moe_tp_size = args.moe_tensor_parallel_size or self.tp_size // self.moe_ep_size
        self.moe_ep_rank, self.moe_tp_rank = rank % self.moe_ep_size, rank // self.moe_ep_size


def modules_of(arch, layout, mapping):
    """Path -> module of a model of these Hugging Face tensors; each has the names that it wants, in its order."""
    found = {}
    for name in layout:
        expert = EXPERT.match(name)
        if expert is not None:
            module = found.setdefault(expert["module"], FusedMoE(arch, mapping))
            if module.is_local(int(expert["number"])):
                module.wanted.append(name)
            continue
        parent, _, last = name.rpartition(".")[0].rpartition(".")
        path = f"{parent}.{SOURCES.get(last, last)}".strip(".")
        if path not in found:
            found[path] = Linear(path, arch, mapping)
        found[path].wanted.append(name)
    return found
