"""Ranks that have imported vLLM before a test starts, and models for them."""

import functools

import pytest

from tests.engines.vllm import tiny
from tests.ranks import server


@pytest.fixture(scope="module")
def vllm_ranks():
    """Ranks that have imported vLLM and end after the module's tests: vLLM changes its process."""
    with server("tests.engines.vllm.imported"):
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Family -> folder of its random model."""
    return functools.cache(lambda family: str(tiny.save(tmp_path_factory.mktemp(family), family)))
