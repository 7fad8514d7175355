"""The pool of keys and values: on a CPU it takes memory as it is written, on a GPU memory that it gives back."""

from pathlib import Path

import pytest
import torch

from mrl.engines.native.kv_cache import KVCache

MIB = 1 << 20
PAGE = 4096
ALIGNED = 64
"""Bytes of a cache line."""
SIZES = {
    "windows": [None] * 2,
    "num_kv_heads": 2,
    "head_dim": 64,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_on_a_cpu_is_zeros_and_takes_memory_where_it_is_written(dtype):
    sizes = {"windows": [None] * 2, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype}
    cache = KVCache(**sizes, device=torch.device("cpu"), budget_bytes=4096 * MIB)
    before = resident_bytes()
    for rows in (3, cache.fitting(4096)):  # the second after the first was given back
        assert cache.reserve(rows, 4096) == rows
        assert cache.allocated_bytes == rows * cache.row_bytes(4096)
        assert not any(part.data_ptr() % ALIGNED for part in (*cache.keys, *cache.values))
        cache.keys[1][rows - 1] = cache.values[0][0] = 1.0
        assert cache.keys[1][rows - 1].all() and cache.values[0][0].all()
        assert not (cache.values[1][rows - 1].any() or cache.keys[0][0].any())
        assert resident_bytes() - before < 256 * MIB
        cache.free()
        assert cache.allocated_bytes == 0


def test_it_comes_back_where_it_was_and_in_the_shape_that_it_had():
    cache = KVCache(**SIZES, budget_bytes=64 * MIB)
    assert cache.reserve(5, 100) == 5
    place, shape = cache.addresses, (cache.num_rows, cache.row_len)
    held = list(cache.keys)
    cache.keys[0].fill_(torch.nan)
    cache.free()
    assert cache.keys == cache.values == [] and cache.allocated_bytes == 0
    for rows, length in ((5, 100), (2, 30), (4, 112)):
        assert cache.reserve(rows, length) == rows
        assert (cache.num_rows, cache.row_len) == shape and cache.addresses == place
    assert not cache.keys[0].any(), "what was not a number outlived its call"
    assert held[0].data_ptr() == cache.keys[0].data_ptr()


def test_its_shape_grows_until_it_holds_all_calls_and_no_further_than_the_budget():
    cache = KVCache(**SIZES, budget_bytes=0)
    cache.budget_bytes = 64 * cache.row_bytes(256)
    assert cache.reserve(64, 128) == 64
    assert cache.reserve(8, 200) == 8 and (cache.num_rows, cache.row_len) == (64, 208)
    assert cache.reserve(64, 128) == 64 and (cache.num_rows, cache.row_len) == (64, 208)
    assert cache.reserve(32, 512) == 32 and (cache.num_rows, cache.row_len) == (32, 512)  # 64 x 512 do not fit
    assert cache.allocated_bytes <= cache.budget_bytes
    assert cache.reserve(64, 208) == 64 and (cache.num_rows, cache.row_len) == (64, 208)


@pytest.mark.gpu
def test_the_device_has_its_memory_again_when_the_pool_is_away():
    """Though its tensors are held, and nobody empties torch's cache."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    cache = KVCache(**{**SIZES, "windows": [None] * 8, "num_kv_heads": 8, "device": cuda}, budget_bytes=512 * MIB)
    free = lambda: torch.cuda.mem_get_info(cuda)[0]  # noqa: E731
    before = free()
    cache.reserve(16, 512)
    pool, place, held = cache.allocated_bytes, cache.addresses, list(cache.keys)
    assert before - free() >= pool > 100 * MIB
    cache.free()
    assert before - free() < 16 * MIB
    moments = torch.ones(pool // 8, device=cuda)  # must not settle in the pool's place
    cache.reserve(16, 512)
    assert cache.addresses == place and held[0].data_ptr() == cache.keys[0].data_ptr()
    assert bool(moments.all()) and not bool(cache.keys[0].any())
