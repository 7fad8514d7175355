"""The model's weights, as this rank's parts of Hugging Face tensors (`modules/linear.py`).

`reload` reads a bucket when the next call comes, not before.
"""

import torch
from torch import nn

from mrl.resharding.checksum import bit_sum
from mrl.resharding.hf import hf_layout
from tensorrt_llm import _utils
from tensorrt_llm._torch.modules.fp8 import FP8, SCALE, scale_shape
from tensorrt_llm._torch.modules.linear import Mapping, modules_of
from tensorrt_llm.faults import StandInError, fault
from tests.engines.trtllm.signature import flavour, signed


class Fused(nn.Module):
    """A module that was removed: nobody may call it."""

    _weights_removed = True

    def pre_reload_weights(self):
        raise StandInError("a module without weights was called")

    process_weights_after_loading = post_load_weights = pre_reload_weights


class Model(nn.Module):
    """Steps of a refit: pre_reload_weights, load_weights ..., process_weights_after_loading, post_load_weights."""

    def __init__(self, arch, args, *, quantized=False):
        super().__init__()
        self.removed = Fused()
        self.layout = hf_layout(arch, args.dtype)
        self.wanted = {name: (stored.shape, getattr(torch, args.dtype)) for name, stored in self.layout.items()}
        self.quantized, self.unit_scales = quantized, set()
        self.loaders = {}
        for path, module in modules_of(arch, self.layout, Mapping(args, _utils.mpi_comm().Get_rank())).items():
            self._place(path.split("."), module)
            self.loaders |= dict.fromkeys(module.wanted, module)
            if quantized:
                self._quantize(module)
        self.tensors = {}
        self.step = "loaded"
        self.buckets = []
        self._pending = {}
        if fault("whole_only"):
            self.load_weights = self._load_whole

    def _place(self, path, module):
        at = self
        for name in path[:-1]:
            if name not in at._modules:
                at.add_module(name, nn.Module())
            at = at._modules[name]
        at.add_module(path[-1], module)

    def _quantize(self, module):
        if not (hasattr(module, "quantize") and module.wanted and module.quantize(self.layout)):
            return
        for name in [name for name in module.wanted if name.endswith(".weight")]:
            self.wanted[name] = (self.layout[name].shape, FP8)
            self.wanted[name + SCALE] = (scale_shape(*self.layout[name].shape), torch.float32)
            self.loaders[name + SCALE] = module
            module.wanted.append(name + SCALE)

    def pre_reload_weights(self):
        if self.step not in ("loaded", "lost"):
            raise StandInError(f"pre_reload_weights after '{self.step}'")
        self.step, self.tensors, self.buckets = "taken apart", {}, []

    def lose(self):
        """The memory of the parameters is another one from here on."""
        self.step, self.tensors = "lost", {}
        for parameter in self.parameters():
            parameter.fill_(torch.nan)

    def load_weights(self, weights, weight_mapper=None, params_map=None, allow_partial_loading=False):
        if self.step not in ("taken apart", "loading"):
            raise StandInError(f"load_weights after '{self.step}': pre_reload_weights comes first")
        if fault("devices") and _utils.local_mpi_rank() >= int(fault("devices")):
            raise StandInError("CUDA error: invalid device ordinal")  # torch.cuda.set_device(local_mpi_rank())
        self.read()
        self.step = "loading"
        if self.quantized and allow_partial_loading and flavour() == "1.2":
            raise AssertionError("allow_partial_loading is only supported for unquantized linear methods now")
        weights = self._without_unit_scales(weights)
        for name, tensor in weights.items():
            if fault("reload") == name:
                raise ValueError(f"shape mismatch in {name}")
            if (tuple(tensor.shape), tensor.dtype) != self.wanted.get(name):
                raise StandInError(f"{name}: {list(tensor.shape)} {tensor.dtype} is no tensor of this model")
            if name in self.tensors:
                raise StandInError(f"{name} was loaded before")
        if not allow_partial_loading and not set(self.loaders) <= set(weights):
            raise StandInError(f"{len(weights)} of {len(self.wanted)} tensors without allow_partial_loading")
        self.buckets.append(list(weights))
        self._pending = {name: (tensor, bit_sum(tensor)) for name, tensor in weights.items()}
        self.tensors |= dict.fromkeys(weights.keys() & self.loaders.keys())  # nobody asks for another rank's experts

    def _without_unit_scales(self, weights):
        """Activation scales of attention's output, which are no weights, are kept apart."""
        outputs = {name.removesuffix("weight") + "input_scale" for name in weights if ".o_proj." in name}
        found = {name for name in weights if self.quantized and name in outputs}
        for name in found:
            if weights[name].shape != () or weights[name].item() != 1.0:
                raise StandInError(f"{name}={weights[name]}: not the scale of activations that are not calibrated")
        self.unit_scales |= found
        return {name: tensor for name, tensor in weights.items() if name not in found}

    def meant(self):
        """This rank's parts of the Hugging Face tensors, as it multiplies with them."""
        found = {}
        for module in set(self.loaders.values()):
            found |= module.meant(self.tensors)
        return found

    def _load_whole(self, weights, weight_mapper=None):
        type(self).load_weights(self, weights)

    def read(self):
        """Reads the last bucket."""
        for name, (tensor, before) in self._pending.items():
            if bit_sum(tensor) != before:
                raise StandInError(f"the buffer of {name} changed before it was read")
            if name in self.loaders:
                values = tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor
                self.tensors[name] = self.loaders[name].shard(name, values).clone().view(tensor.dtype)
        self._pending = {}

    def process_weights_after_loading(self):
        if self.step != "loading":
            raise StandInError(f"process_weights_after_loading after '{self.step}'")
        self.read()
        lost = [
            name for name, scales in self.named_parameters() if name.endswith("_scales") and bool(scales.isnan().any())
        ]
        if lost:
            raise StandInError(f"no refit brings {lost[0]}, which was discarded")
        missing = [name for name in self.loaders if name not in self.tensors]
        if missing:
            raise StandInError(f"{len(missing)} tensors were not loaded: {missing[0]}")
        for module in set(self.loaders.values()):
            module.hold(self.tensors)
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
