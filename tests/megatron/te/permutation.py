"""TransformerEngine's Triton kernels that sort tokens by expert and back, its module `pytorch.triton.permutation`.

A map [tokens, 2 x experts + 1] has the row of each token at each expert in its first columns, -1 where it does not go
there; rows lie expert after expert. It only ever comes back to here.
"""

import torch


def make_row_id_map(routing_map, num_tokens, num_experts):
    chosen = routing_map.bool().t()
    places = chosen.flatten().cumsum(0).view_as(chosen) - 1
    found = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    found[:, :num_experts] = torch.where(chosen, places, -1).t()
    return found


def _pairs(row_id_map, num_experts):
    """Token, expert and row of each token at each expert."""
    tokens, experts = torch.nonzero(row_id_map[:, :num_experts] >= 0, as_tuple=True)
    return tokens, experts, row_id_map[tokens, experts].long()


def _sizes(given, count):
    """The last `count` arguments; from 2.12 on `pad_offsets` comes before them."""
    padding = given[:-count]
    if any(each is not None for each in padding):
        raise NotImplementedError("rows filled up per expert have no stand-in on a CPU")
    return given[-count:]


def permute_with_mask_map(inp, row_id_map, probs, scale, *sizes):
    _, num_experts, num_out_tokens, hidden_size, _ = _sizes(sizes, 5)
    if scale is not None:
        raise NotImplementedError("scales of quantized tensors have no stand-in on a CPU")
    tokens, experts, rows = _pairs(row_id_map, num_experts)
    output = inp.new_empty(num_out_tokens, hidden_size)
    output[rows] = inp[tokens]
    if probs is None:
        return output, None, None
    permuted = probs.new_empty(num_out_tokens)
    permuted[rows] = probs[tokens, experts]
    return output, None, permuted


def unpermute_with_mask_map(inp, row_id_map, merging_probs, permuted_probs, *sizes):
    num_tokens, num_experts, hidden_size = _sizes(sizes, 3)
    tokens, experts, rows = _pairs(row_id_map, num_experts)
    parts = inp[rows].float()
    if merging_probs is not None:
        parts = parts * merging_probs[tokens, experts].float().unsqueeze(1)
    output = torch.zeros(num_tokens, hidden_size).index_add_(0, tokens, parts).to(inp.dtype)
    if permuted_probs is None:
        return output, None
    probs = permuted_probs.new_zeros(num_tokens, num_experts)
    probs[tokens, experts] = permuted_probs[rows]
    return output, probs


def unpermute_with_mask_map_bwd_with_merging_probs(fwd_output_grad, row_id_map, fwd_input, merging_probs, *sizes):
    num_tokens, num_experts, num_out_tokens, hidden_size = _sizes(sizes, 4)
    tokens, experts, rows = _pairs(row_id_map, num_experts)
    grads = fwd_output_grad[tokens].float()
    act_grad = fwd_output_grad.new_zeros(num_out_tokens, hidden_size)
    act_grad[rows] = (grads * merging_probs[tokens, experts].float().unsqueeze(1)).to(act_grad.dtype)
    probs_grad = merging_probs.new_zeros(num_tokens, num_experts)
    probs_grad[tokens, experts] = (grads * fwd_input[rows].float()).sum(1).to(probs_grad.dtype)
    return act_grad, probs_grad


def make_chunk_sort_map(split_sizes, sorted_indices, num_tokens, num_splits):
    """Of each row the place where it goes."""
    chunks = torch.arange(num_tokens).split(split_sizes.tolist())
    order = torch.cat([chunks[index] for index in sorted_indices.tolist()])
    found = torch.empty(num_tokens, dtype=torch.int32)
    found[order] = torch.arange(num_tokens, dtype=torch.int32)
    return found


def sort_chunks_by_map(inp, row_id_map, probs, num_tokens, hidden_size, is_forward):
    places = row_id_map.long()
    taken = places.argsort() if is_forward else places
    return inp[taken], None if probs is None else probs[taken]
