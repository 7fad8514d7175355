"""`mrl plan`: what is printed follows from layouts and stated figures."""

import pytest

from mrl.cli import main
from mrl.config import load
from mrl.errors import UserError
from mrl.hardware import HARDWARE, load_hardware
from mrl.models.presets import arch_from_preset
from mrl.plan import predict_refit
from mrl.preflight import grid_of

CONFIG = """
model: {preset: qwen3_tiny, tokenizer: "char:0123456789+=#", dtype: bfloat16}
parallel: {tensor_model_parallel_size: 2}
rollout: {tensor_model_parallel_size: 4, prompt_length: 64, response_length: 64}
data: {task: addition}
reward: {functions: [{name: exact_match}]}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def test_slower_links_take_longer_and_the_bound_is_below(config):
    loaded = load(config)
    arch = arch_from_preset("qwen3_tiny", {}, None)
    times = {
        name: predict_refit(loaded, arch, grid_of(loaded, 16), HARDWARE[name]) for name in ("a100", "h100", "b200")
    }
    assert times["a100"].seconds > times["h100"].seconds > times["b200"].seconds
    for found in times.values():
        assert 0 < found.bound_s <= found.seconds


def test_the_command_prints_bytes_and_time(config, capsys):
    assert main(["plan", str(config), "--world-size", "16", "--gpus-per-node", "4"]) == 0
    printed = capsys.readouterr().out
    assert "16 ranks on 4 node(s) of 4" in printed
    for line in ("copied inside ranks", "sent inside nodes", "sent between nodes", "predicted time"):
        assert line in printed


def test_a_run_that_would_be_refused_is_refused(config, capsys):
    assert main(["plan", str(config), "--world-size", "3"]) == 2
    assert "does not divide the 3 rank(s)" in capsys.readouterr().err


def test_figures_of_ones_own_replace_the_tables(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: h200\ninter_node_bytes_per_s: 2.5e10\n")
    found = load_hardware(str(path))
    assert found.inter_node_bytes_per_s == 2.5e10
    assert found.memory_bytes == HARDWARE["h200"].memory_bytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: h300", "expected a mapping with base"),
        ("memory: 3", "unknown figure 'memory'. Known: bf16_flops"),
        ("memory_bytes: lots", "memory_bytes is 'lots'; expected a number above 0"),
        ("- 1", "expected a mapping with base"),
        ("{", "cannot be read"),
    ],
)
def test_wrong_figures_are_named(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_hardware(str(path))


def test_an_unknown_row_names_the_nearest():
    with pytest.raises(UserError, match=r"h10 is not in the table\. Did you mean 'h100'"):
        load_hardware("h10")
