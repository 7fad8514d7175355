"""The acceptance run of vLLM, whole on its build for CPUs."""

import json
import runpy
import sys

import pytest
from acceptance import vllm
from acceptance.vllm import VllmAcceptance
from acceptance.vllm_table import CHECKS

from tests import warm
from tests.source import ROOT

TINY = [
    "model.overrides.hidden_size=128", "model.overrides.intermediate_size=128", "model.overrides.num_hidden_layers=2",
    "model.overrides.num_attention_heads=4", "model.overrides.vocab_size=64", "model.dtype=float32",
    "rollout.prompt_length=16", "rollout.response_length=8", "rollout.gpu_memory_utilization=0.02",
    "run.num_threads=1",
]  # fmt: skip
NOT_HERE = {"graphs": "no CUDA graphs", "graphs_asleep": "no CUDA graphs", "fp8": "FP8 kernels for CPUs repack"}


def accept(*words):
    return runpy.run_path(str(ROOT / "tools" / "accept_vllm.py"))["main"]([*map(str, words)])


def read(folder):
    return json.loads((folder / "acceptance-vllm.json").read_text())


@pytest.mark.vllm
def test_all_that_a_cpu_has_works_and_the_rest_is_skipped_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "executable", warm.python("tests.engines.vllm.imported"))
    asked = [name for name in CHECKS if name not in ("contract", "seeds")]
    assert accept("--output_dir", tmp_path / "out", "--engines", "vllm", "--checks", *asked, *TINY) == 0
    found = {each["check"]: each for each in read(tmp_path / "out")["results"]}
    assert list(found) == asked
    for name, each in found.items():
        assert each["status"] == ("skipped" if name in NOT_HERE else "works"), each["said"]
        assert NOT_HERE.get(name, "") in each["said"]
    assert found["logprobs"]["facts"]["largest, nats"] < 1e-4
    experts = found["experts"]["facts"]
    assert experts["largest, nats"] < 1e-4 < experts["mean difference by experts of another token, nats"]
    page = (tmp_path / "out" / "acceptance-vllm.md").read_text()
    assert "**vllm works here in all checks that ran: 8 work, 0 fail, 3 skipped**" in page


def test_without_vllm_it_ends_with_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(vllm, "installed", lambda: None)
    assert accept("--output_dir", tmp_path / "out") == 2
    said = capsys.readouterr()
    assert "vLLM is not installed" in said.err and len(said.err.splitlines()) == 1


def test_several_ranks_are_started_by_torchrun(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(VllmAcceptance, "run", lambda self: made.append(self) or [])
    assert accept("--output_dir", tmp_path / "out", "--num_ranks", 2, *TINY) == 0
    assert made[0].launcher == ["torchrun", "--standalone", "--no-python", "--nproc-per-node", "2"]
    assert made[0].overrides == ["rollout.tensor_model_parallel_size=2", *TINY]
