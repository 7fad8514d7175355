"""Packed ("thd") sequences: to rows and back, and what the ring of context parallelism does with them.

Over the ring each sequence is two halves on a rank; `cu_seqlens` are of whole sequences there.
"""

import itertools

import torch


def convert_thd_to_bshd(tensor, cu_seqlens, batch, max_seqlen):
    out = tensor.new_zeros(batch, max_seqlen, *tensor.shape[1:])
    for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        out[row, : end - start] = tensor[start:end]
    return out


def convert_bshd_to_thd(tensor, cu_seqlens, num_tokens):
    out = tensor.new_zeros(num_tokens, *tensor.shape[2:])
    for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        out[start:end] = tensor[row, : end - start]
    return out


def _half(cu_seqlens, which):
    """Rows of every sequence's first (0) or second (1) half."""
    pieces = itertools.pairwise(cu_seqlens.tolist())
    return torch.cat(
        [torch.arange(start + which * (end - start) // 2, start + (1 + which) * (end - start) // 2)
         for start, end in pieces]
    )  # fmt: skip


def thd_read_half_tensor(tensor, cu_seqlens, half_idx):
    return tensor.index_select(tensor.dim() - 3, _half(cu_seqlens, half_idx))


def thd_second_half_lse_correction(lse, lse_per_step, cu_seqlens, lse_packed):
    _need_packed(lse_packed)
    rows = _half(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step[:, : len(rows)])


def thd_read_second_half_lse(lse, cu_seqlens, lse_packed, second_half_lse_seqlen):
    _need_packed(lse_packed)
    rows = _half(cu_seqlens, 1)
    out = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    out[:, : len(rows)] = lse[:, rows]
    return out


def thd_out_correction(out, out_per_step, *rest):
    """Adds a step's output with its weight; from 2.20 on `out` has the weight it had before that step."""
    *old, lse, lse_per_step, cu_seqlens, only_second_half, lse_packed = rest
    _need_packed(lse_packed)
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(cu_seqlens[-1])
    new = _weights(lse_per_step[:, : len(rows)], lse[:, rows]) * out_per_step[: len(rows)].float()
    kept = out[rows].float()
    for before in old:
        kept = kept * _weights(before[:, rows], lse[:, rows])
    out[rows] = (kept + new).to(out.dtype)


def _weights(lse, total):
    return torch.exp(lse - total).t().unsqueeze(-1)


def thd_grad_correction(grad, grad_per_step, cu_seqlens, first_half, second_half):
    """Each half is set ("copy"), added to ("add") or left ("none")."""
    both = "none" not in (first_half, second_half)
    for which, what in enumerate((first_half, second_half)):
        if what == "none":
            continue
        rows = _half(cu_seqlens, which)
        new = grad_per_step[rows] if both else grad_per_step[: len(rows)]
        grad[rows] = grad[rows] + new if what == "add" else new


def thd_get_partitioned_indices(cu_seqlens, total_tokens, world_size, rank):
    """Of 2 x world_size pieces of a sequence a rank has one from the front and its mirror image from the back."""
    rows = []
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        size = (end - start) // (2 * world_size)
        for piece in (rank, 2 * world_size - 1 - rank):
            rows.append(torch.arange(start + piece * size, start + (piece + 1) * size))
    return torch.cat(rows).to(torch.int32)


def _need_packed(lse_packed):
    if not lse_packed:
        raise NotImplementedError("a log-sum-exp that is not packed has no stand-in on a CPU")
