"""Benchmarks whose processes are spared the imports."""

from types import SimpleNamespace

import pytest
from bench import alternate

from mrl.distributed.local_ranks import fork_server_context
from tests.engines.vllm.conftest import vllm_ranks  # noqa: F401 -- a fixture
from tests.ranks import PRELOAD


@pytest.fixture
def forked(monkeypatch):
    """Contenders are forked; those that start anew are in `tests/tools/bench/test_alternate.py`."""
    monkeypatch.setattr(
        alternate, "multiprocessing", SimpleNamespace(get_context=lambda method: fork_server_context(PRELOAD))
    )
