"""Compiled operations: PyTorch's numbers, each row's bits by itself, and what happens without a compiler."""

import pytest
import torch
import torch.nn.functional as F

from mrl.algorithms.functional.sampling import stream_key
from mrl.engines.native.cpu_ops import Compiled, operations
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.torch_ops import Heads, Operations
from mrl.errors import UserError
from mrl.models.kernels import bindings, build, build_cache

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RTOL = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""fp32 sums in another order; bf16 results are rounded once, PyTorch's after each operator."""
ATOL = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=sorted(DTYPES))
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture
def fast(dtype):
    found, problem = operations(dtype, CPU, eager=False)
    assert (type(found), problem) == (Compiled, None)
    return found


def numbers(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_close(found, wide, dtype):
    """What was found in `dtype` against fp32's."""
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wide, rtol=RTOL[dtype], atol=ATOL[dtype])


@pytest.mark.compiler
@pytest.mark.parametrize("columns", [5, 48, 512, 700])
def test_norm_adds_in_place_and_norms(fast, dtype, columns):
    shapes = ((7, columns), (7, columns), (columns,))
    x, delta, weight = (numbers(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    summed, normed = fast.norm(x.clone(), weight, 1e-6, delta)
    assert torch.equal(summed, x + delta)
    assert_close(normed, F.rms_norm((x + delta).float(), (columns,), weight.float(), 1e-6), dtype)
    kept, normed = fast.norm(x, weight, 1e-6)
    assert kept is x
    assert_close(normed, F.rms_norm(x.float(), (columns,), weight.float(), 1e-6), dtype)
    _, normed = fast.norm(x, weight, 1e-6, offset=1.0)
    assert_close(normed, F.rms_norm(x.float(), (columns,), weight.float() + 1, 1e-6), dtype)


@pytest.mark.compiler
@pytest.mark.parametrize("columns", [3, 80, 1408])
def test_gate(fast, dtype, columns):
    gate_up = numbers(9, 2 * columns, dtype=dtype, scale=4.0)
    gate_up[0, :2] = torch.tensor([-200.0, 200.0])
    gate, up = gate_up.float().chunk(2, 1)
    assert_close(fast.gate(gate_up), F.silu(gate) * up, dtype)
    assert_close(fast.gate(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up, dtype)


def heads_of(dtype, num_heads, num_kv_heads, dim):
    turned = dim - 8 if dim == 32 else dim  # of a partly rotated head
    angles = torch.outer(torch.arange(64.0), 100.0 ** -(torch.arange(0, turned, 2) / turned))
    cos, sin = (torch.cat(parts, 1).to(dtype) for parts in ([angles.cos()] * 2, [-angles.sin(), angles.sin()]))
    return Heads(num_heads, num_kv_heads, 1e-6, cos, sin)


@pytest.mark.compiler
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("shape", [(4, 2, 12), (7, 1, 64), (3, 3, 32), (14, 2, 64)], ids=str)
def test_decoding_rotates_and_attends_over_each_rows_own_slots(fast, dtype, shape, with_norms):
    num_heads, num_kv_heads, dim = shape
    heads = heads_of(dtype, *shape)
    norms = (numbers(dim, dtype=dtype, seed=5), numbers(dim, dtype=dtype, seed=6)) if with_norms else None
    positions = torch.tensor([0, 63, 17, 62, 1])
    qkv = numbers(5, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    results, pools = [], []
    for found in (fast, Operations()):
        used = dtype if found is fast else torch.float32  # the judge has fp32 throughout
        cache = KVCache(
            windows=[None] * 2,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            dtype=used,
            device=CPU,
            budget_bytes=2**24,
            scale=0.2 if with_norms else None,
        )
        cache.reserve(6, 64)
        cache.keys[1].copy_(numbers(*cache.keys[1].shape, dtype=dtype, seed=1))
        cache.values[1].copy_(numbers(*cache.keys[1].shape, dtype=dtype, seed=2))
        wide = Heads(num_heads, num_kv_heads, 1e-6, heads.cos.to(used), heads.sin.to(used), float(dim == 12))
        rotated = found.rotation(wide, positions)(
            qkv.clone().to(used), None if norms is None else (norms[0].to(used), norms[1].to(used))
        )
        results.append(found.decode_attention(cache, positions, 64, num_heads)(1, *rotated))
        pools.append(cache._rows)
    assert_close(results[0], results[1], dtype)
    assert_close(pools[0][0], pools[1][0], dtype)


def streams(count):
    return torch.tensor([stream_key(3, uid, 0) for uid in range(count)])


@pytest.mark.compiler
@pytest.mark.parametrize("vocabulary", [1, 99, 256, 257, 5000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("greedy", [False, True])
def test_samples_are_those_of_pytorchs_softmax(fast, dtype, vocabulary, temperature, greedy):
    padded = numbers(64, vocabulary + 3, dtype=dtype, scale=3.0)
    logits, keys, counts = padded[:, :vocabulary], streams(64), torch.arange(64)
    logits[5] = -torch.inf
    logits[5, vocabulary // 2] = 0.0
    logits[6, :-1] -= 200.0
    before = logits.clone()
    tokens, logprobs = fast.sample(logits, keys, counts, temperature, greedy=greedy)
    assert torch.equal(logits, before)
    expected, expected_logprobs = Operations().sample(logits.clone(), keys, counts, temperature, greedy=greedy)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.compiler
@pytest.mark.parametrize("greedy", [False, True])
def test_logits_that_are_no_distribution_have_no_finite_logprob(fast, dtype, greedy):
    logits = numbers(5, 600, dtype=dtype)
    logits[0, 599] = torch.nan
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    tokens, logprobs = fast.sample(logits, streams(5), torch.arange(5), 1.0, greedy=greedy)
    assert logprobs.isfinite().tolist() == [False] * 4 + [True]
    assert ((tokens >= 0) & (tokens < 600)).all()


@pytest.mark.compiler
def test_the_bits_of_a_row_depend_on_neither_the_others_nor_the_threads(fast, dtype):
    x, weight, logits = (numbers(*shape, dtype=dtype) for shape in ((300, 700), (700,), (300, 999)))
    keys, counts, heads = streams(300), torch.arange(300), heads_of(dtype, 8, 2, 64)
    qkv = numbers(300, 12, 64, dtype=dtype)
    cache = KVCache(windows=[None], num_kv_heads=2, head_dim=64, dtype=dtype, device=CPU, budget_bytes=2**27)
    cache.reserve(300, 64)

    def outputs(rows):
        at = torch.arange(300)[rows] % 64
        turned = fast.rotation(heads, at)(qkv[rows].clone(), None)
        yield fast.norm(x[rows].clone(), weight, 1e-6)[1]
        yield fast.gate(x[rows].contiguous())
        yield from turned
        yield from fast.sample(logits[rows], keys[rows], counts[rows], 1.0, greedy=False)
        if rows.start in (None, 0):  # rows of the cache are the first ones
            yield fast.decode_attention(cache, at, 64, 8)(0, *turned)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = list(outputs(slice(None)))
        torch.set_num_threads(3)
        for start, stop in ((0, 1), (0, 37), (0, 300), (5, 6), (29, 200)):
            for found, all_rows in zip(outputs(slice(start, stop)), whole, strict=False):
                assert torch.equal(found, all_rows[start:stop])
    finally:
        torch.set_num_threads(before)


def test_eager_and_other_devices_have_pytorchs_operators():
    for device, eager in ((CPU, True), (torch.device("cuda"), False)):
        found, problem = operations(torch.float32, device, eager=eager)
        assert (type(found), problem) == (Operations, None)


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    bindings.load_library.cache_clear()
    yield
    bindings.load_library.cache_clear()


def test_without_a_compiler_pytorchs_operators_run_and_the_reason_is_told(without_compiler):
    found, problem = operations(torch.float32, CPU, eager=False)
    assert (type(found), problem) == (Operations, "there is no C compiler (no-such-compiler)")


def test_a_rank_that_cannot_follow_the_others_is_refused(without_compiler, monkeypatch):
    monkeypatch.setattr(build_cache, "first_rank_value", lambda *_: "compiled")
    with pytest.raises(
        UserError, match=r"there is no C compiler .* install a C compiler .* or set rollout.enforce_eager"
    ):
        operations(torch.float32, CPU, eager=False)


@pytest.mark.compiler
def test_a_rank_follows_those_that_cannot_compile(monkeypatch):
    monkeypatch.setattr(build_cache, "first_rank_value", lambda *_: "plain")
    found, problem = operations(torch.float32, CPU, eager=False)
    assert (type(found), problem) == (Operations, "another rank of this job cannot compile")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("writable", [True, False])
def test_it_is_compiled_once_where_the_cache_folder_can_be_written(tmp_path, monkeypatch, writable):
    home = tmp_path / "cache"
    if not writable:
        home.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    made = []
    compile_it = build._compile
    monkeypatch.setattr(build, "_compile", lambda *given: made.append(given) or compile_it(*given))
    for _ in range(2):
        bindings.load_library.cache_clear()
        assert type(operations(torch.float32, CPU, eager=False)[0]) is Compiled
    assert len(made) == (1 if writable else 2)
