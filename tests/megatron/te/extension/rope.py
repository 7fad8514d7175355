"""Fused rotary embedding: frequencies [s, 1, 1, d2], the pairs that are rotated are halves of the head."""

import itertools

import torch

from tests.megatron.te.extension.enums import NVTE_QKV_Format


def _rotated(t, freqs, starts, fmt, interleaved, cu_seqlens, cp_size, cp_rank, backward):
    if interleaved or starts is not None:
        raise NotImplementedError("fused rope, interleaved or with start positions, has no stand-in on a CPU")
    angles = freqs.view(freqs.shape[0], -1).float()
    if fmt == NVTE_QKV_Format.NVTE_THD:
        ends = [end // cp_size for end in cu_seqlens.tolist()]
        lens = [stop - start for start, stop in itertools.pairwise(ends)]
        angles = torch.cat([angles[_positions(length, cp_size, cp_rank)] for length in lens]).unsqueeze(1)
    elif cp_size > 1:
        raise NotImplementedError("fused rope over context parallel ranks has a stand-in for packed sequences only")
    elif fmt == NVTE_QKV_Format.NVTE_SBHD:
        angles = angles[: t.shape[0]].view(t.shape[0], 1, 1, -1)
    else:
        angles = angles[: t.shape[1]].view(1, t.shape[1], 1, -1)
    width = angles.shape[-1]
    turned, rest = t[..., :width].float(), t[..., width:]
    if backward:
        first, second = (turned * angles.sin()).chunk(2, -1)
        out = turned * angles.cos() + torch.cat((second, -first), -1)
    else:
        first, second = turned.chunk(2, -1)
        out = turned * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
    return torch.cat((out.to(t.dtype), rest), -1)


def _positions(length, cp_size, cp_rank):
    """In its sequence, of the tokens that a rank has: a piece from the front and its mirror image from the back."""
    if cp_size == 1:
        return torch.arange(length)
    half = length // 2
    back = (2 * cp_size - 1 - cp_rank) * half
    return torch.cat([torch.arange(cp_rank * half, (cp_rank + 1) * half), torch.arange(back, back + half)])


def fused_rope_forward(input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotated(input, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, False)


def fused_rope_backward(grad, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotated(grad, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank, True)
