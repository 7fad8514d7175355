"""What benchmarks share: the device that is asked for, the clock, and the device's own limits."""

import argparse
import re

import pytest
import torch
from bench import measure

from tests.source import ROOT

CPU = torch.device("cpu")
MEASURING = ("bench_commit", "bench_memory", "bench_refit", "bench_rollout", "bench_step")
"""Tools whose figures are a device's; conversion and the exchange of samples happen in host memory."""


def parsed(*words):
    parser = argparse.ArgumentParser()
    measure.add_device(parser)
    return parser.parse_args(words).device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_device_is_the_cpu_and_cuda_is_refused(capsys):
    assert parsed() == parsed("--device", "auto") == parsed("--device", "cpu") == "cpu"
    for word, said in (("cuda", "torch sees no CUDA device"), ("tpu", "there is no device 'tpu'")):
        with pytest.raises(SystemExit):
            parsed("--device", word)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("tool", MEASURING)
def test_tools_take_the_device_and_name_none_themselves(tool):
    text = (ROOT / "tools" / f"{tool}.py").read_text()
    assert "add_device(parser)" in text
    assert not re.search(r"""torch\.device\("cpu"\)|["']device["']: ["']cpu["']|device_name\(\)""", text)


def test_limits_are_those_of_the_device(monkeypatch):
    monkeypatch.setattr(measure, "READ_BYTES", 1 << 22)
    monkeypatch.setattr(measure, "MATRIX_WIDTH", {"cpu": 64})
    assert measure.memory_bandwidth(CPU) > 1e8 and measure.matrix_rate(torch.float32, CPU) > 1e6


def test_short_times_keep_their_digits():
    assert measure.spread([2.0, 1.23456789, 0.000123456789]) == {"median": 1.2346, "min": 0.0001235, "max": 2.0}


@pytest.mark.gpu
def test_the_clock_waits_for_the_gpu():
    cuda = torch.device("cuda", torch.cuda.current_device())
    a = torch.randn(8192, 8192, device=cuda)
    work = lambda: [a @ a for _ in range(20)]  # noqa: E731
    work()
    flops = 20 * 2 * 8192**3 / measure.seconds(work, cuda)
    assert flops < 2e15, "no GPU is that fast in fp32: the clock stopped before it was done"


def test_without_git_the_revision_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure.commit() == "unknown"
    broken = tmp_path / "git"
    broken.write_text("")
    assert measure.commit() == "unknown"
    broken.chmod(0o755)
    assert measure.commit() == "unknown"
