"""The model's weights, as Hugging Face tensors; `reload` reads a bucket when the next call comes, not before."""

import torch
from torch import nn

from mrl.weights.checksum import bit_sum
from mrl.weights.hf import hf_layout
from tensorrt_llm import _utils
from tensorrt_llm.faults import StandInError, fault
from tests.trtllm.signature import signed


class Fused(nn.Module):
    """A module that was removed: nobody may call it."""

    _weights_removed = True

    def pre_reload_weights(self):
        raise StandInError("a module without weights was called")

    process_weights_after_loading = post_load_weights = pre_reload_weights


class Model(nn.Module):
    """Steps of a refit: pre_reload_weights, load_weights ..., process_weights_after_loading, post_load_weights."""

    def __init__(self, arch, dtype):
        super().__init__()
        self.removed = Fused()
        self.layout = hf_layout(arch, dtype)
        self.dtype = getattr(torch, dtype)
        self.tensors = {}
        self.step = "loaded"
        self.buckets = []
        self._pending = {}
        if fault("whole_only"):
            self.load_weights = self._load_whole

    def named_parameters(self, *args, **kwargs):
        """Of what is fused, q, k and v of each layer: this rank's heads."""
        size, rank = _utils.mpi_comm().Get_size(), _utils.mpi_comm().Get_rank()
        for name in self.tensors:
            if name.endswith("self_attn.q_proj.weight"):
                parts = [self.tensors[name.replace("q_proj", f"{part}_proj")].chunk(size)[rank] for part in "qkv"]
                yield name.replace("q_proj", "qkv_proj"), torch.cat(parts)

    def pre_reload_weights(self):
        if self.step not in ("loaded", "lost"):
            raise StandInError(f"pre_reload_weights after '{self.step}'")
        self.step, self.tensors, self.buckets = "taken apart", {}, []

    def load_weights(self, weights, weight_mapper=None, params_map=None, allow_partial_loading=False):
        if self.step not in ("taken apart", "loading"):
            raise StandInError(f"load_weights after '{self.step}': pre_reload_weights comes first")
        self.read()
        self.step = "loading"
        for name, tensor in weights.items():
            if fault("reload") == name:
                raise ValueError(f"shape mismatch in {name}")
            stored = self.layout.get(name)
            if stored is None or tuple(tensor.shape) != stored.shape or tensor.dtype != self.dtype:
                raise StandInError(f"{name}: {list(tensor.shape)} {tensor.dtype} is no tensor of this model")
            if name in self.tensors:
                raise StandInError(f"{name} was loaded before")
        if not allow_partial_loading and set(weights) != set(self.layout):
            raise StandInError(f"{len(weights)} of {len(self.layout)} tensors without allow_partial_loading")
        self.buckets.append(list(weights))
        self._pending = {name: (tensor, bit_sum(tensor)) for name, tensor in weights.items()}
        self.tensors |= dict.fromkeys(weights)

    def _load_whole(self, weights, weight_mapper=None):
        type(self).load_weights(self, weights)

    def read(self):
        """Reads the last bucket."""
        for name, (tensor, before) in self._pending.items():
            if bit_sum(tensor) != before:
                raise StandInError(f"the buffer of {name} changed before it was read")
            self.tensors[name] = tensor.clone()
        self._pending = {}

    def process_weights_after_loading(self):
        if self.step != "loading":
            raise StandInError(f"process_weights_after_loading after '{self.step}'")
        self.read()
        missing = [name for name in self.layout if name not in self.tensors]
        if missing:
            raise StandInError(f"{len(missing)} tensors were not loaded: {missing[0]}")
        self.step = "processed"

    def post_load_weights(self):
        if self.step != "processed":
            raise StandInError(f"post_load_weights after '{self.step}'")
        self.step = "loaded, prefixes of old weights"


class ModelLoader:
    @signed("tensorrt_llm._torch.pyexecutor.model_loader.ModelLoader.reload")
    def reload(self, model, weights, allow_partial_loading=False):
        if allow_partial_loading:
            model.load_weights(weights, allow_partial_loading=True)
        else:
            model.load_weights(weights)
