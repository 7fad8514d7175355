"""FP8 blocks, as `_torch/modules/linear.py` and `_torch/modules/fused_moe/quantization.py` load them.

A rank's part of a scale table is cut like the matrix, by even parts rounded up, and lies in the fused table where its
matrix begins, in blocks rounded up. Where these do not meet, the real ones copy the wrong scales or fail in a copy of
another shape; here it raises.
"""

import math

import torch

from tensorrt_llm.faults import StandInError
from tests.engines.trtllm.signature import flavour, signed

SIDE = 128
SCALE = "_scale_inv"
FP8 = torch.float8_e4m3fn
QUANTIZED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Modules that are; heads, embeddings, norms, routers and the shared expert's gate are made without quantisation."""

ENTRY = "tensorrt_llm._torch.modules.linear.FP8BlockScalesLinearMethod.load_weights_vanilla"


class FP8BlockScalesLinearMethod:
    if flavour() == "1.3":

        @signed(ENTRY)
        def load_weights_vanilla(self, module, weights, allow_partial_loading=False):
            raise StandInError("mrl reloads models, not layers")

    else:

        @signed(ENTRY)
        def load_weights_vanilla(self, module, weights):
            raise StandInError("mrl reloads models, not layers")


def is_scale(name):
    return name.endswith(SCALE)


def joined(tensors, dim=0):
    """`torch.cat`, which has no FP8 everywhere."""
    return _by_bytes(torch.cat, tensors, dim)


def stacked(tensors):
    return _by_bytes(torch.stack, tensors, 0)


def _by_bytes(make, tensors, dim):
    if tensors[0].dtype != FP8:
        return make(tensors, dim)
    return make([tensor.contiguous().view(torch.uint8) for tensor in tensors], dim).view(FP8)


def scale_shape(rows, columns):
    return math.ceil(rows / SIDE), math.ceil(columns / SIDE)


def meant(names, shards, *, by_rows, cut):
    """What a rank multiplies with of matrices that are one module, one below the other: name -> fp32.

    Args:
        names: Of the matrices.
        shards: The rank's parts of these and of their scales.
        by_rows: The rank has some of the rows of each.
        cut: It does not have all of each.
    """
    rows, columns = sum(len(shards[name]) for name in names), shards[names[0]].shape[1]
    table = torch.full(scale_shape(rows, columns), torch.nan)
    first = 0
    for name in names:
        count, scales = len(shards[name]), shards[name + SCALE]
        if first % SIDE or (cut and (count if by_rows else columns) % SIDE):
            raise StandInError(f"{name}: {count} rows at {first} and {columns} columns of a rank, in blocks of {SIDE}")
        if tuple(scales.shape) != scale_shape(count, columns):
            raise StandInError(f"{name}: scales {list(scales.shape)} of a rank for {count} rows, {columns} columns")
        table[first // SIDE : first // SIDE + len(scales)] = scales
        first += count
    found, first = {}, 0
    spread = table.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :columns]
    for name in names:
        count = len(shards[name])
        found[name] = shards[name].float() * spread[first : first + count]
        first += count
    return found
