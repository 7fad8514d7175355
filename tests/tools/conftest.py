"""Benchmarks whose processes are spared the imports."""

from types import SimpleNamespace

import pytest

from mrl.distributed.local_ranks import forks
from mrl.observe import contenders
from tests.ranks import PRELOAD
from tests.vllm.conftest import vllm_ranks  # noqa: F401 -- a fixture


@pytest.fixture
def forked(monkeypatch):
    """Contenders are forked; those that start anew are in `tests/observe/test_contenders.py`."""
    monkeypatch.setattr(contenders, "multiprocessing", SimpleNamespace(get_context=lambda method: forks(PRELOAD)))
