"""cuDNN's fused attention, all masks and windows, grouped queries, [s, b], [b, s] and packed sequences.

`softmax_stats` is the log of the sum of exponentials in fp32: [tokens, heads, 1] of packed sequences, else
[batch, heads, queries, 1], as cuDNN 9.6 and later return it. The backward pass uses the output and the stats that it is
given: with context parallelism these are of all ranks' keys.
"""

import torch

from tests.megatron.te import cuda
from tests.megatron.te.extension.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

CAUSAL = (NVTE_Mask_Type.NVTE_CAUSAL_MASK, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK)
BOTTOM_RIGHT = (
    NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
)
PADDED = (
    NVTE_Mask_Type.NVTE_PADDING_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK,
    NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
)
PACKED_FROM = (9, 0)
"""The first compute capability on which cuDNN takes packed sequences: `sm_arch_ >= 90` in fused_attn.cpp."""


def get_fused_attn_backend(*asked):
    """Takes one object from 2.20 on, and gives a reason too; before, the 19 arguments of `_backend`."""
    if len(asked) > 1:
        return _backend(*asked)
    (params,) = asked
    if _formats(params.qkv_layout)[0] == "thd" and 0 in (params.num_tokens_q, params.num_tokens_kv):
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "a graph of no tokens"
    found = _backend(
        *(params.is_training, params.qkv_dtype, params.qkv_dtype, params.qkv_layout),
        *(params.bias_type, params.attn_mask_type, params.softmax_type, params.dropout),
        *(params.num_attn_heads, params.num_gqa_groups, params.max_seqlen_q, params.max_seqlen_kv),
    )
    return found, "" if found != NVTE_Fused_Attn_Backend.NVTE_No_Backend else "no stand-in on a CPU"


def _backend(is_training, q_dtype, kv_dtype, layout, bias_type, mask_type, softmax_type, dropout, *rest):
    takes = (
        bias_type == NVTE_Bias_Type.NVTE_NO_BIAS
        and softmax_type == NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
        and dropout == 0
        and (_formats(layout)[0] != "thd" or cuda.CAPABILITY >= PACKED_FROM)
        and (mask_type not in BOTTOM_RIGHT or _takes_bottom_right(*rest[2:4]))
    )
    return NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen" if takes else "NVTE_No_Backend"]


def _takes_bottom_right(max_seqlen_q, max_seqlen_kv):
    """cuDNN 9.6; from 9.7 the lengths need not be multiples."""
    return max_seqlen_q % 64 == 0 and max_seqlen_kv % 64 == 0 and max_seqlen_q <= max_seqlen_kv


def _formats(layout):
    """Of the queries and of the keys: "thd", "sbhd" or "bshd"."""
    parts = NVTE_QKV_Layout(layout).name.removeprefix("NVTE_").lower().split("_")
    if parts[0] in ("paged", "bhsd", "qkv"):
        raise NotImplementedError(f"attention on {'_'.join(parts)} has no stand-in on a CPU")
    names = [part.replace("2", "").replace("3", "") for part in parts]
    return names[0], names[-1]


def _need_format(layout, *formats):
    own = NVTE_QKV_Format[f"NVTE_{_formats(layout)[0].upper()}"]
    if any(each not in (None, own) for each in formats):
        raise NotImplementedError("an output in another format than the queries has no stand-in on a CPU")


class _Side:
    """Where the queries, or the keys, of each sequence lie in their tensor."""

    def __init__(self, fmt, tensor, cu_seqlens, cu_padded, mask_type):
        self.packed = fmt == "thd"
        ends = cu_seqlens.tolist() if self.packed or mask_type in PADDED else None
        self.batch = len(ends) - 1 if self.packed else tensor.shape[fmt.index("b")]
        self.steps = 0 if self.packed else tensor.shape[fmt.index("s")]
        starts = ends if cu_padded is None else cu_padded.tolist()
        self.rows = []
        for index in range(self.batch):
            length = self.steps if ends is None else ends[index + 1] - ends[index]
            if self.packed:
                self.rows.append(slice(starts[index], starts[index] + length))
            else:
                self.rows.append((slice(0, length), index) if fmt == "sbhd" else (index, slice(0, length)))


class _Sequences:
    """The sequences of a call, and what their queries may see."""

    def __init__(self, layout, mask_type, window, bottom_right, cu_q, cu_kv, padded_q, padded_kv, q, k):
        q_format, kv_format = _formats(layout)
        self.q = _Side(q_format, q, cu_q, padded_q, mask_type)
        self.kv = _Side(kv_format, k, cu_kv, padded_kv, mask_type)
        self.mask_type, self.window = mask_type, tuple(window)
        self.bottom_right = mask_type in BOTTOM_RIGHT if bottom_right is None else bottom_right

    def __iter__(self):
        return enumerate(zip(self.q.rows, self.kv.rows, strict=True))

    def _hidden(self, queries, keys):
        """True where a query must not see a key; None: it may see all."""
        shift = keys - queries if self.bottom_right else 0
        left, right = self.window
        if self.mask_type in CAUSAL + BOTTOM_RIGHT:
            right = 0
        if left < 0 and right < 0:
            return None
        distance = torch.arange(keys).view(1, -1) - torch.arange(queries).view(-1, 1) - shift
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if right >= 0:
            hidden |= distance > right
        if left >= 0:
            hidden |= distance < -left
        return hidden

    def scores(self, q, k, scale):
        """[heads, queries, keys] in fp32, and the keys repeated for every query head."""
        q, k = q.float().transpose(0, 1), _spread(k, q.shape[1])
        scores = q @ k.transpose(1, 2) * scale
        hidden = self._hidden(q.shape[1], k.shape[1])
        return (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)), k


def _spread(t, heads):
    return t.float().transpose(0, 1).repeat_interleave(heads // t.shape[1], 0)


def _gathered(t, groups):
    return t.view(groups, -1, *t.shape[1:]).sum(1).transpose(0, 1)


def fused_attn_fwd(*arguments):
    return _forward(*_as_of_2_15(arguments, formats=2, counts=(29, 30, 32)))


def fused_attn_bwd(*arguments):
    arguments = list(arguments)
    if len(arguments) < 32:  # the dtype of the gradients, before 2.15
        del arguments[-8]
    return _backward(*_as_of_2_15(arguments, formats=5, counts=(26, 27, 32)))


def _as_of_2_15(arguments, formats, counts):
    """2.12 added `bottom_right_diagonal` behind the window, 2.15 formats behind the layout.

    `counts`: how many arguments 2.11, 2.12 and 2.15 pass.
    """
    arguments = list(arguments)
    if len(arguments) not in counts:
        raise TypeError(f"fused attention with {len(arguments)} arguments has no stand-in on a CPU")
    layout = next(index for index, each in enumerate(arguments) if isinstance(each, NVTE_QKV_Layout))
    if len(arguments) == counts[0]:
        arguments.insert(layout + 5, None)
    if len(arguments) == counts[1]:
        arguments[layout + 1 : layout + 1] = [None] * formats
    return arguments


def _forward(
    max_seqlen_q, max_seqlen_kv, is_training, attn_scale, dropout, fast_zero_fill, layout, o_format, scale_inv_format,
    bias_type, mask_type, softmax_type, window_size, bottom_right, cu_q, cu_kv, q, k, v, fake_dtype, padded_q,
    padded_kv, page_table_k, page_table_v, s_quantizer, o_quantizer, bias, softmax_offset, rng_gen, rng_elts,
    return_max_logit, cuda_graph,
):  # fmt: skip
    _need_format(layout, o_format)
    found = _Sequences(layout, mask_type, window_size, bottom_right, cu_q, cu_kv, padded_q, padded_kv, q, k)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    heads = q.shape[-2]
    stats = torch.zeros(q.shape[0], heads, 1) if found.q.packed else torch.zeros(found.q.batch, heads, found.q.steps, 1)
    for index, (at_q, at_kv) in found:
        scores, _ = found.scores(q[at_q], k[at_kv], attn_scale)
        if scores.numel() == 0:
            continue
        lse = scores.logsumexp(-1)
        probabilities = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)  # of a query that sees nothing
        out[at_q] = (probabilities @ _spread(v[at_kv], heads)).transpose(0, 1).to(out.dtype)
        if found.q.packed:
            stats[at_q] = lse.t().unsqueeze(-1)
        else:
            stats[index, :, : lse.shape[1]] = lse.unsqueeze(-1)
    return [out, stats, torch.zeros(2, dtype=torch.int64)]


def _backward(
    max_seqlen_q, max_seqlen_kv, attn_scale, dropout, fast_zero_fill, layout, o_format, do_format, dqkv_layout,
    scale_inv_format, do_scale_inv_format, bias_type, mask_type, softmax_type, window_size, bottom_right, deterministic,
    cu_q, cu_kv, q, k, v, o, d_o, fake_dtype, aux, padded_q, padded_kv, s_quantizer, dp_quantizer, dqkv_quantizer,
    cuda_graph,
):  # fmt: skip
    _need_format(layout, o_format, do_format)
    if dqkv_layout not in (None, layout):
        raise NotImplementedError("gradients in another layout than the inputs have no stand-in on a CPU")
    found = _Sequences(layout, mask_type, window_size, bottom_right, cu_q, cu_kv, padded_q, padded_kv, q, k)
    stats, heads, groups = aux[0], q.shape[-2], k.shape[-2]
    d_o = d_o.reshape(o.shape)
    dq, dk, dv = (torch.zeros(t.shape, dtype=t.dtype) for t in (q, k, v))
    for index, (at_q, at_kv) in found:
        scores, keys = found.scores(q[at_q], k[at_kv], attn_scale)
        if scores.numel() == 0:
            continue
        lse = stats[at_q].transpose(0, 1) if found.q.packed else stats[index, :, : scores.shape[1]]
        probabilities = torch.exp(scores - lse).nan_to_num(0.0)
        d_out, out = (t[at_q].float().transpose(0, 1) for t in (d_o, o))
        dv[at_kv] = _gathered(probabilities.transpose(1, 2) @ d_out, groups).to(dv.dtype)
        d_probabilities = d_out @ _spread(v[at_kv], heads).transpose(1, 2)
        d_scores = probabilities * (d_probabilities - (d_out * out).sum(-1, keepdim=True)) * attn_scale
        dq[at_q] = (d_scores @ keys).transpose(0, 1).to(dq.dtype)
        dk[at_kv] = _gathered(d_scores.transpose(1, 2) @ q[at_q].float().transpose(0, 1), groups).to(dk.dtype)
    return [dq, dk, dv, None, None]
