"""The benchmark measures real conversions of a model of the size that was asked for."""

import argparse
import runpy

import pytest

from mrl.models.hf_config import arch_from_folder
from tests.source import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "bench_convert.py"))


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("size_gb", [0.5, 2.0])
def test_the_model_has_about_the_size(size_gb, moe):
    target = TOOL["HfTarget"](TOOL["model"](size_gb, moe), "bfloat16")
    num_bytes = sum(TOOL["torch"].Size(stored.shape).numel() * 2 for stored in target.layout.values())
    assert abs(num_bytes / 1e9 - size_gb) < 0.1


def test_a_stage_reports_what_it_did(tmp_path):
    arch = TOOL["model"](0.0, False)
    size = TOOL["write_random"](tmp_path / "hf", arch, 50_000_000)
    assert arch_from_folder(tmp_path / "hf") == arch
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    args = argparse.Namespace(
        stage="megatron", source=tmp_path / "hf", target=tmp_path / "out", moe=False, num_workers=1
    )
    found = TOOL["run_stage"](args)
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert abs(found["target_bytes"] - size) < size / 100
    assert found["s"] > 0 and found["peak_rss"] > found["peak_own"] > 0
    assert found["cpu_s"] > 0
    copied = TOOL["copy"]([tmp_path / "hf" / "config.json"], tmp_path / "copy")
    assert 0 < copied["cp_s"] <= copied["cp_synced_s"] and copied["cp_cpu_s"] >= 0


def test_a_comparison_that_cannot_run_says_why(tmp_path):
    found = TOOL["mbridge"](tmp_path / "nowhere")
    assert found["conversion"] == "mbridge" and found["skipped"]
