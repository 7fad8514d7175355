"""Compiled operations with a gradient: the values and gradients of PyTorch's in fp64, the same bits by any threads."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algorithms.functional.logprobs import OPERATORS
from mrl.data.shared_prefix import shared_prefixes
from mrl.megatron.attention import shared_prefix_mask
from mrl.megatron.attention_segments import rank_segments
from mrl.models.kernels.training import training_kernels

pytestmark = pytest.mark.compiler

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 0.1}}
"""Sums of up to a few hundred products of numbers around 1; bfloat16 is rounded once, of sums up to 10."""
ACTIVATIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
SIZES = {"rows": st.integers(1, 70), "cols": st.integers(1, 90)}


def numbers(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def compare(found, right, inputs, dtype):
    """Of two functions of the same inputs, the second one in fp64: values, and gradients by the same one."""
    ours = [x.detach().clone().requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = found(*ours), right(*theirs)
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[dtype])
    grad = numbers(*out.shape, dtype=dtype, seed=9)
    gradients = torch.autograd.grad(out, ours, grad)
    for own, other in zip(gradients, torch.autograd.grad(expected, theirs, grad.double()), strict=True):
        torch.testing.assert_close(own.double(), other, **TOLERANCE[dtype])
    return [out.detach(), *gradients]


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(**SIZES)
def test_a_norm(dtype, offset, rows, cols):
    x, weight = numbers(rows, 1, cols, dtype=dtype, seed=rows), numbers(cols, dtype=dtype, seed=cols)
    compare(
        lambda x, w: training_kernels(dtype).norm(x, w, 1e-3, offset),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * (w + offset),
        [x, weight],
        dtype,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(**SIZES)
def test_a_gate(dtype, activation, rows, cols):
    def right(x):
        gate, up = x.chunk(2, -1)
        return ACTIVATIONS[activation](gate) * up

    def found(x):
        return training_kernels(dtype).gate(x, activation)

    compare(found, right, [numbers(rows, 1, 2 * cols, dtype=dtype, seed=rows) * 3], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(1, 20), heads=st.integers(1, 5), half=st.integers(1, 40), rest=st.integers(0, 19))
def test_a_rotation_of_the_beginnings_of_heads_that_lie_apart(dtype, rows, heads, half, rest):
    angles = torch.rand(rows, half) * 7
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def right(x):
        turned, kept = x[:, :, 3:].split([2 * half, rest], -1)
        low, high = turned.chunk(2, -1)
        c, s = cos[:, None].double(), sin[:, None].double()
        return torch.cat([low * c - high * s, high * c + low * s, kept], -1)

    x = numbers(rows, heads, 3 + 2 * half + rest, dtype=dtype, seed=rows)
    compare(lambda x: training_kernels(dtype).apply_rope(x[:, :, 3:], (cos, sin)), right, [x], dtype)


def dense(q, k, v, lens, prefixes, window=None):
    """Each sequence by itself, its shared tokens computed again."""
    outputs, group = [], q.size(1) // k.size(1)
    for rows in prefixes.distinct_P.split(lens):
        keys, values = (x[rows].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qnd,knd->nqk", q[rows], keys) * 0.3
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        hidden = ~(visible if window is None else visible.triu(1 - window))
        outputs.append(torch.einsum("nqk,knd->qnd", scores.masked_fill(hidden, -torch.inf).softmax(2), values))
    return torch.cat(outputs)[prefixes.origin_D]


# few tokens: many sequences begin alike, and some are the beginnings of others
SHAPES = [(4, 2, 12), (3, 1, 32), (2, 2, 70), (40, 1, 4)]
"""Heads, those of keys and values, and their dim."""
sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    drawn=sequences,
    long=st.integers(0, 60),
    shape=st.sampled_from([(4, 2, 12), (3, 1, 32), (2, 2, 70), (40, 1, 4)]),
    window=st.none() | st.integers(1, 60),
)
def test_attention_of_sequences_that_share_tokens(dtype, drawn, long, shape, window):
    heads, kv_heads, dim = shape
    drawn = [[0] * long + part for part in drawn]
    lens, tokens = [len(part) for part in drawn], torch.tensor([token for part in drawn for token in part])
    prefixes = shared_prefixes(tokens, lens)
    seen, rows = shared_prefix_mask(rank_segments(1, 0, lens, prefixes)), prefixes.origin_D.numel()
    q, mixed = numbers(rows, heads, dim, dtype=dtype, seed=1), numbers(rows, kv_heads, 2 * dim, dtype=dtype, seed=2)
    compare(
        lambda q, kv: training_kernels(dtype).attention(q, kv[:, :, :dim], kv[:, :, dim:], seen, 0.3, window),
        lambda q, kv: dense(q, kv[:, :, :dim], kv[:, :, dim:], lens, prefixes, window),
        [q, mixed],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(dtype):
    compiled, before = training_kernels(dtype), torch.get_num_threads()
    lens, dim = [90, 50, 90, 7] * 3, 24
    tokens = torch.randint(0, 9, (sum(lens),), generator=torch.Generator().manual_seed(0))
    prefixes = shared_prefixes(tokens, lens)
    seen, rows = shared_prefix_mask(rank_segments(1, 0, lens, prefixes)), prefixes.origin_D.numel()
    x = numbers(rows, 4 * dim, dtype=dtype, seed=3)
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            own, weight = x.clone().requires_grad_(), torch.ones(4 * dim, dtype=dtype, requires_grad=True)
            normed = compiled.norm(own, weight, 1e-5).view(rows, 4, dim)
            attended = compiled.attention(normed[:, :2], normed[:, 2:3], normed[:, 3:], seen, 0.3)
            out = compiled.gate(attended.flatten(1))
            out.backward(numbers(*out.shape, dtype=dtype, seed=4))
            found.append((out.detach(), own.grad, weight.grad))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 20), cols=st.integers(1, 100), dropped=st.integers(0, 60), bent=st.booleans())
def test_sums_and_gradients_of_logits(dtype, rows, cols, dropped, bent):
    """fp32, whatever the dtype; of what is dropped nothing is left, and the largest may be far from 0."""
    generator = torch.Generator().manual_seed(rows * cols)
    logits = torch.randn(rows, cols, generator=generator) * 9 + 50
    logits[:, 1 : 1 + dropped] = -1e30
    normalizer, slope, bend = logits.logsumexp(1), *torch.randn(2, rows, generator=generator)
    sums, taken = training_kernels(dtype).sums(logits)
    right, _ = OPERATORS.sums(logits.double())
    assert taken is None
    torch.testing.assert_close(sums.double(), right, rtol=2e-6, atol=2e-6)
    found = training_kernels(dtype).gradient(logits.clone(), normalizer, slope, bend if bent else None)
    log_probs = logits.double() - normalizer.double()[:, None]
    expected = -log_probs.exp() * (slope[:, None] + (bend[:, None] * log_probs if bent else 0))
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)
