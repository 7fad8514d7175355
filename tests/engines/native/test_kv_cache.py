"""The pool of keys and values: on a CPU it takes memory as it is written, on a GPU memory that it gives back."""

from pathlib import Path

import pytest
import torch

from mrl.engines.native.kv_cache import ALIGNED, KVCache

MIB = 1 << 20
PAGE = 4096


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_on_a_cpu_is_zeros_and_takes_memory_where_it_is_written(dtype):
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype}
    cache = KVCache(**sizes, device=torch.device("cpu"), budget_bytes=4096 * MIB)
    before = resident_bytes()
    for rows in (cache.fitting(4096), 3):  # the second after the first was given back
        assert cache.reserve(rows, 4096) == rows
        assert cache.allocated_bytes == rows * 4096 * cache.token_bytes
        assert not any(part.data_ptr() % ALIGNED for part in (*cache.keys, *cache.values))
        cache.keys[1][rows - 1] = cache.values[0][0] = 1.0
        assert cache.keys[1][rows - 1].all() and cache.values[0][0].all()
        assert not (cache.values[1][rows - 1].any() or cache.keys[0][0].any())
        assert resident_bytes() - before < 256 * MIB
        cache.free()
        assert cache.allocated_bytes == 0


@pytest.mark.gpu
def test_what_is_allocated_while_the_pool_is_away_does_not_settle_in_its_place():
    cuda = torch.device("cuda", torch.cuda.current_device())
    sizes = {"num_layers": 4, "num_kv_heads": 8, "head_dim": 64, "dtype": torch.bfloat16}
    cache = KVCache(**sizes, device=cuda, budget_bytes=512 * MIB)
    before = torch.cuda.memory_reserved()
    cache.reserve(64, 512)
    pool = cache.allocated_bytes
    assert torch.cuda.memory_reserved() - before >= pool > 100 * MIB
    cache.free()
    moments = [torch.ones(MIB, device=cuda) for _ in range(8)]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < pool // 2
    cache.reserve(64, 512)
    del moments
