"""The pool of keys and values on a GPU: its memory goes back to the device, whatever was allocated meanwhile."""

import pytest
import torch

from mrl.engines.native.kv_cache import KVCache

MIB = 1 << 20


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
