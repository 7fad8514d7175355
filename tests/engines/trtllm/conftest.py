"""Puts the stand-in on sys.path for one test, imported anew in the wanted flavour."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.engines.trtllm.signature import FLAVOUR_VARIABLE

STANDIN = Path(__file__).with_name("standin")
FAULTS = "MRL_STANDIN_FAULTS"


def forget():
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorrt_llm", "tensorrt")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Checks after each test that the next one finds no TensorRT-LLM, unless it is installed."""
    found = importlib.util.find_spec("tensorrt_llm")
    yield
    forget()  # undoing a monkeypatch of sys.modules puts the stand-in back
    assert importlib.util.find_spec("tensorrt_llm") == found


@pytest.fixture(params=["1.2", "1.3"])
def flavour(request, monkeypatch):
    """The stand-in of each line of releases."""
    monkeypatch.setenv(FLAVOUR_VARIABLE, request.param)
    monkeypatch.syspath_prepend(str(STANDIN))
    forget()
    yield request.param
    forget()


@pytest.fixture
def standin(monkeypatch):
    """The stand-in of 1.2."""
    monkeypatch.syspath_prepend(str(STANDIN))
    forget()
    yield monkeypatch
    forget()
