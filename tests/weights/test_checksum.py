import pytest
import torch

from mrl.weights import checksum
from mrl.weights.checksum import MODULUS, bit_sum, copy_bits

DTYPES = [(torch.float32, torch.int32, 32), (torch.bfloat16, torch.int16, 16)]


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype, bits, width", DTYPES)
def test_it_is_the_wrapped_sum_of_the_bit_patterns_in_the_upper_bits(dtype, bits, width):
    tensor = random(300_001, dtype=dtype)
    patterns = tensor.view(bits).to(torch.int64) % (1 << width)
    assert bit_sum(tensor) == (sum(patterns.tolist()) << (64 - width)) % MODULUS


@pytest.mark.parametrize("dtype, bits, width", DTYPES)
def test_parts_add_up_in_any_order_and_cut(dtype, bits, width):
    tensor = random(64, 95, dtype=dtype)
    parts = [part for rows in tensor.split(10) for part in rows.split(7, dim=1)]
    assert sum(map(bit_sum, reversed(parts))) % MODULUS == bit_sum(tensor) == bit_sum(tensor.t())


@pytest.mark.parametrize("dtype, bits, width", DTYPES)
def test_every_single_bit_counts(dtype, bits, width):
    tensor = torch.ones(3, dtype=dtype)
    for element in range(3):
        for bit in range(width):
            damaged = tensor.clone()
            damaged.view(bits)[element] ^= (1 << bit) - (1 << width if bit == width - 1 else 0)
            assert bit_sum(damaged) != bit_sum(tensor)


def test_minus_zero_and_nan_are_patterns_like_others():
    assert bit_sum(torch.tensor([-0.0])) != bit_sum(torch.tensor([0.0]))
    assert bit_sum(torch.tensor([torch.nan])) == bit_sum(torch.tensor([torch.nan]))
    assert bit_sum(torch.zeros(0)) == bit_sum(torch.zeros(5)) == 0


SHAPES = [(), (0, 3), (7,), (9_001,), (100, 121), (3, 7_000), (5, 4, 33)]
ALL_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]


def cuts(tensor):
    """The tensor, and views of it whose rows are apart, whose columns are, and that are transposed."""
    yield tensor
    if tensor.dim() >= 2 and tensor.size(0) > 2:
        yield tensor[1:, 1:]
        yield tensor[::2]
    if tensor.dim() == 2:
        yield tensor[:, ::3]
        yield tensor.t()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("with_torch", [False, True])
def test_a_copy_is_whole_and_its_sums_are_those_of_both_sides(dtype, with_torch, threads, monkeypatch):
    if with_torch:
        monkeypatch.setattr(checksum, "compiled", None)
    elif checksum.compiled is None:
        pytest.skip("mrl was installed without a compiler")
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 3_000)
    monkeypatch.setattr(checksum, "THREAD_BYTES", 3_000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in SHAPES:
            for source in cuts((random(*shape, dtype=torch.float32) * 50).to(dtype)):
                for room in cuts(torch.zeros([extent * 2 + 3 for extent in source.shape]).to(dtype)):
                    into = room[tuple(slice(1, extent + 1) for extent in source.shape)]
                    if into.shape != source.shape:
                        continue
                    given, stored = copy_bits(into, source, both=True)
                    assert torch.equal(as_bytes(into), as_bytes(source))
                    assert int(given) % MODULUS == int(stored) % MODULUS == bit_sum(source) == bit_sum(room)
                    assert int(copy_bits(into, source)[0]) % MODULUS == bit_sum(source)
                    assert bit_sum(room) == bit_sum(source), "nothing beside it was written"
                    into.zero_()
    finally:
        torch.set_num_threads(before)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_copy_that_casts_sums_what_is_stored():
    source = random(40, 33, dtype=torch.float32)
    into = torch.empty(40, 33, dtype=torch.bfloat16)
    _, stored = copy_bits(into, source)
    assert torch.equal(into, source.bfloat16())
    assert int(stored) % MODULUS == bit_sum(source.bfloat16())


def test_a_copy_does_not_stretch_its_source():
    with pytest.raises(RuntimeError, match=r"\[1\] cannot be copied into \[4\]"):
        copy_bits(torch.zeros(4), torch.ones(1))
