"""Copies with sums: whole, right in every shape, and by one compiled file for all processes of a machine."""

import threading
import time

import pytest
import torch

from mrl.models.kernels import build, build_cache
from mrl.resharding import checked_copy
from mrl.resharding.checked_copy import copy_bits, sum_bits
from mrl.resharding.checksum import MODULUS, bit_sum


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


SHAPES = [(), (0, 3), (7,), (9_001,), (100, 121), (3, 7_000), (5, 4, 33), (3, 1, 2, 17)]
LARGE = [(700_003,), (3, 200_001), (1030, 641)]
"""With these a compiled copy is written past the caches, or made by several threads."""
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


@pytest.fixture
def with_torch(monkeypatch):
    monkeypatch.setattr(checked_copy, "compiled", lambda: (None, "not here"))
    monkeypatch.setattr(checked_copy, "BLOCK_BYTES", 3_000)


def whole_with_sums_of_both_sides(shapes, dtype, threads):
    """With three threads parts of a row or rows are shared where THREAD_BYTES is small."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in shapes:
            for source in cuts((random(*shape, dtype=torch.float32) * 50).to(dtype)):
                assert int(sum_bits(source)) % MODULUS == bit_sum(source)
                for room in cuts(torch.zeros([extent * 2 + 3 for extent in source.shape]).to(dtype)):
                    into = room[tuple(slice(1, extent + 1) for extent in source.shape)]
                    if into.shape != source.shape:
                        continue
                    given, written = copy_bits(into, source, both=True)
                    assert torch.equal(as_bytes(into), as_bytes(source))
                    assert int(given) % MODULUS == int(written) % MODULUS == bit_sum(source) == bit_sum(room)
                    assert int(copy_bits(into, source)[0]) % MODULUS == bit_sum(source)
                    assert bit_sum(room) == bit_sum(source), "nothing beside it was written"
                    into.zero_()
    finally:
        torch.set_num_threads(before)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_is_whole_and_its_sums_are_those_of_both_sides(dtype, threads, monkeypatch):
    monkeypatch.setattr(checked_copy, "THREAD_BYTES", 3_000)
    whole_with_sums_of_both_sides([*SHAPES, *LARGE], dtype, threads)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_pytorch_copies_the_same(dtype, with_torch):
    whole_with_sums_of_both_sides(SHAPES, dtype, 1)


def test_of_processes_that_want_the_same_at_once_one_makes_it(tmp_path, monkeypatch):
    """Threads with files of their own: the lock is a file's, not a process's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made, found, together = [], [], threading.Barrier(4)
    begun, released = threading.Event(), threading.Event()

    def make():
        made.append(1)
        begun.set()
        released.wait(5)
        return b"whole"

    def want():
        together.wait(5)
        found.append(build_cache.cached("kernels/x.so", make))

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(5)
    time.sleep(0.05)  # the others look meanwhile
    released.set()
    for thread in threads:
        thread.join(5)
    assert (made, found) == ([1], [b"whole"] * 4)
    assert [path.name for path in (tmp_path / "mrl" / "kernels").iterdir() if path.suffix != ".lock"] == ["x.so"]


def test_without_a_compiler_pytorch_copies(monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    checked_copy.compiled.cache_clear()
    try:
        assert checked_copy.compiled() == (None, "there is no C compiler (no-such-compiler)")
        source, target = random(40, 33, dtype=torch.float32), torch.empty(40, 33)
        assert int(copy_bits(target, source)[1]) % MODULUS == bit_sum(source) == bit_sum(target)
    finally:
        checked_copy.compiled.cache_clear()


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_copy_that_casts_sums_what_is_written():
    source = random(40, 33, dtype=torch.float32)
    into = torch.empty(40, 33, dtype=torch.bfloat16)
    _, written = copy_bits(into, source)
    assert torch.equal(into, source.bfloat16())
    assert int(written) % MODULUS == bit_sum(source.bfloat16())


def test_a_copy_does_not_stretch_its_source():
    with pytest.raises(RuntimeError, match=r"\[1\] into shape \[4\]"):
        copy_bits(torch.zeros(4), torch.ones(1))
