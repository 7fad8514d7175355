"""mrl and TensorRT-LLM 1.2.1 fit into one environment: the proof is a set of versions that satisfies both.

`requirements.json` holds TensorRT-LLM's requirements, as its source package on PyPI states them (Requires-Dist of
PKG-INFO; the package itself is a stub that fetches NVIDIA's wheel), and the set that `uv pip compile` found for
`mrl[trtllm,mpi]` and these, for Python 3.12 on Linux: name -> version, and what that version requires there, as pip
reports it. NVIDIA's CUDA libraries, of whose stubs pip learns nothing, stand there with their version only.
"""

import json

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source import ROOT
from tests.test_packaging import setup_keyword

PROOF = json.loads((ROOT / "tests" / "engines" / "trtllm" / "requirements.json").read_text())
THEIRS: list[str] = PROOF["requires"]
FOUND: dict[str, list[str]] = PROOF["set"]
"""Name -> version, then what it requires."""

OURS = [*setup_keyword("install_requires"), *setup_keyword("extras_require")["mpi"]]
MARKERS = {"python_version": "3.12", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}


def unmet(requirements):
    """Those that the set does not satisfy."""
    for text in requirements:
        asked = Requirement(text)
        if asked.marker is not None and not asked.marker.evaluate(MARKERS):
            continue
        version = FOUND.get(canonicalize_name(asked.name), [None])[0]
        if version is None or not asked.specifier.contains(version, prereleases=True):
            yield f"{text}: the set has {version}"


def test_the_set_satisfies_mrl():
    """Where a new range does not, mend it, or find a set again: `uv pip compile`, TensorRT-LLM's requirements given."""
    assert list(unmet(OURS)) == []


def test_the_set_satisfies_tensorrt_llm_and_each_of_its_members():
    assert list(unmet(THEIRS)) == []
    assert [(name, wrong) for name, (_, *requires) in FOUND.items() for wrong in unmet(requires)] == []


def test_the_extra_takes_the_version_that_the_set_is_for():
    (extra,) = map(Requirement, setup_keyword("extras_require")["trtllm"])
    assert extra.specifier.contains("1.2.1")


@pytest.mark.parametrize("pin", ["transformers>=5,<6", "huggingface-hub>=1,<3", "numpy>=2", "tokenizers>=0.24"])
def test_a_range_that_tensorrt_llm_excludes_is_found(pin):
    assert list(unmet([pin]))
