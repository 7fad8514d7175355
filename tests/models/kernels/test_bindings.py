"""Compiled products and scores: right, and a row's bits follow from the row alone, whoever computes it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.errors import UserError
from mrl.models.kernels import bindings, build, build_cache
from mrl.models.kernels.bindings import required
from mrl.models.kernels.rope_tables import rotary_tables
from mrl.models.presets import arch_from_preset

pytestmark = pytest.mark.compiler

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-7, "atol": 2e-2}}
"""Sums of up to 300 products of numbers around 1; bfloat16 is rounded once."""

sizes = st.integers(1, 300)


def numbers(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(rows=st.integers(1, 200), inputs=sizes, outputs=sizes, with_bias=st.booleans(), data=st.data())
def test_each_row_of_a_product_has_its_own_bits(dtype, rows, inputs, outputs, with_bias, data):
    """Whatever rows are beside it, wherever its weight's rows stand, whoever holds some of them; by any threads."""
    compiled = required(dtype)
    x, weight = numbers(rows, inputs, dtype=dtype, seed=rows), numbers(outputs, inputs, dtype=dtype, seed=inputs)
    bias = numbers(outputs, dtype=dtype, seed=3) if with_bias else None
    whole = compiled.product(x, compiled.pack(weight), bias, outputs)
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), right, **TOLERANCE[dtype])
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    assert torch.equal(compiled.product(x[first:last], compiled.pack(weight), bias, outputs), whole[first:last])
    order = torch.randperm(outputs, generator=torch.Generator().manual_seed(5))[: data.draw(st.integers(1, outputs))]
    moved = compiled.product(x, compiled.pack(weight[order]), None if bias is None else bias[order], len(order))
    assert torch.equal(moved, whole[:, order])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "inner"), [(128, 352), (40, 1000), (33, 65)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_an_mlp_has_the_bits_of_its_parts_whatever_rows_it_takes_at_a_time(dtype, columns, inner, with_bias):
    compiled = required(dtype)
    first = numbers(2 * inner, columns, dtype=dtype, seed=1) / columns**0.5
    second = numbers(columns, inner, dtype=dtype, seed=2) / inner**0.5
    biases = [numbers(n, dtype=dtype, seed=n) if with_bias else None for n in (2 * inner, columns)]
    gate_up, down = compiled.pack(first), compiled.pack(second)
    for rows in (1, 13, 256, 700):
        x = numbers(rows, columns, dtype=dtype, seed=rows)
        whole = compiled.mlp(x, (gate_up, biases[0]), (down, biases[1]), inner)
        gated = compiled.gate(compiled.product(x, gate_up, biases[0], 2 * inner))
        assert torch.equal(whole, compiled.product(gated, down, biases[1], columns))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit_of_a_product(dtype):
    compiled, before = required(dtype), torch.get_num_threads()
    x, weight = numbers(200, 300, dtype=dtype, seed=1), numbers(500, 300, dtype=dtype, seed=2)
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(compiled.product(x, compiled.pack(weight), None, 500))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=st.integers(1, 40), vocabulary=st.integers(1, 1500), temperature=st.sampled_from([1.0, 0.7, 1.3]))
def test_a_token_is_scored_in_the_bits_with_which_it_was_sampled(dtype, rows, vocabulary, temperature):
    compiled = required(dtype)
    logits = numbers(rows, vocabulary + 5, dtype=dtype, seed=vocabulary)[:, :vocabulary] * 3
    logits[:, 1::3] = -torch.inf  # dropped
    keys, counts = torch.arange(rows) * 7919, torch.arange(rows)
    tokens, logprobs = compiled.sample(logits, keys, counts, temperature, greedy=False)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    scored = compiled.score(logits[order], tokens[order], temperature)
    assert torch.equal(scored, logprobs[order])
    right = (logits.double() / temperature).log_softmax(1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(scored.double(), right[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(lens=st.lists(st.integers(1, 150), min_size=1, max_size=4), heads=st.sampled_from([(4, 2, 12), (7, 1, 64)]))
def test_attention_of_a_prompt_has_the_bits_of_attention_token_by_token(dtype, lens, heads):
    num_heads, kv_heads, dim = heads
    compiled, rows, slots = required(dtype), len(lens), max(lens)
    q, k, v = (numbers(sum(lens), n, dim, dtype=dtype, seed=n + dim) for n in (num_heads, kv_heads, kv_heads))
    at = torch.tensor([(row, slot) for row, length in enumerate(lens) for slot in range(length)])
    keys, values = torch.zeros(2, rows, kv_heads, slots, dim, dtype=dtype)
    keys[at[:, 0], :, at[:, 1]] = k
    values[at[:, 0], :, at[:, 1]] = v
    order = torch.randperm(len(at), generator=torch.Generator().manual_seed(2))
    found = compiled.attend_at(q[order], at[order, 0].contiguous(), at[order, 1].contiguous(), keys, values)
    one_by_one, empty = torch.zeros_like(q), torch.zeros_like(keys)
    empty_values = torch.zeros_like(values)
    for index, (row, slot) in enumerate(at.tolist()):
        one = slice(index, index + 1)
        here = torch.tensor([slot])
        one_by_one[one] = compiled.attend(
            q[one], k[one], v[one], here, empty[row : row + 1], empty_values[row : row + 1]
        )
    assert torch.equal(found, one_by_one[order])


@pytest.mark.parametrize("family", ["qwen2_tiny", "llama_tiny"])
def test_the_angles_at_a_position_do_not_depend_on_how_many_there_are(family):
    arch = arch_from_preset(family, {}, 128)
    for dtype in DTYPES:
        whole = rotary_tables(arch, 300, dtype, torch.device("cpu"))
        for num in (1, 2, 17, 299):
            for part, table in zip(rotary_tables(arch, num, dtype, torch.device("cpu")), whole, strict=True):
                assert torch.equal(part, table[:num])


def test_ranks_with_other_functions_are_refused(monkeypatch):
    bindings.check_alike(torch.float32)
    monkeypatch.setattr(build_cache, "first_rank_value", lambda name, own: f"not {own}")
    with pytest.raises(UserError, match=r"compiled functions differ from those of another rank .* Use identical hosts"):
        bindings.check_alike(torch.float32)


def test_without_a_compiler_the_mode_is_refused(monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    for known in (bindings.load_library, bindings.required):
        known.cache_clear()
    try:
        with pytest.raises(UserError, match=r"rollout.true_on_policy=true needs .* there is no C compiler"):
            required(torch.float32)
    finally:
        for known in (bindings.load_library, bindings.required):
            known.cache_clear()
