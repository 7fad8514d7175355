"""`mrl plan`: what is printed follows from layouts and stated figures."""

import json
import time
from dataclasses import replace

import pytest

from mrl.commands.cli import main
from mrl.commands.plan import plan
from mrl.commands.plan.memory import num_parameters
from mrl.commands.plan.plan import describe, predict
from mrl.commands.plan.published import SYNC_DIRECT, SYNC_GATHERED
from mrl.commands.plan.weight_sync_cost import one_layer_of_each, predict_refit
from mrl.commands.rehearse.check import check_real_run
from mrl.commands.rehearse.report import Report
from mrl.config.config import load
from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.observability.hardware import HARDWARE, load_hardware
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import megatron_layouts
from mrl.resharding.native import native_layouts
from mrl.resharding.transfer_cost import traffic
from mrl.trainer.validation.parallel import build_parallel_layout
from tests.source import ROOT

SECONDS = 20  # of CPU time; 2 to 3 are usual

CONFIG = """
model: {preset: qwen3_tiny, tokenizer: "char:0123456789<>+#", dtype: bfloat16}
parallel: {tensor_model_parallel_size: 2}
rollout: {tensor_model_parallel_size: 4, prompt_length: 64, response_length: 64}
train: {num_steps: 100}
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
        name: predict_refit(loaded, arch, build_parallel_layout(loaded, 16), HARDWARE[name])
        for name in ("a100", "h100", "b200")
    }
    assert times["a100"].seconds > times["h100"].seconds > times["b200"].seconds
    for found in times.values():
        assert 0 < found.bound_s <= found.seconds


def test_published_rates_of_direct_transfers_apply_between_nodes_only(config):
    loaded = load(config)
    arch = arch_from_preset("qwen3_tiny", {}, None)
    apart = predict_refit(loaded, arch, build_parallel_layout(loaded, 16), replace(HARDWARE["h100"], gpus_per_node=1))
    assert apart.closest is SYNC_DIRECT
    assert apart.published[SYNC_DIRECT] == pytest.approx(apart.received_bytes / 6.01e9, rel=1e-3)
    together = predict_refit(loaded, arch, build_parallel_layout(loaded, 4), HARDWARE["h100"])
    assert together.closest is SYNC_GATHERED and SYNC_DIRECT not in together.published
    # Qwen3-30B-A3B, 30.5 x 10^9 parameters of two bytes, takes 7 s
    assert together.published[SYNC_GATHERED] == pytest.approx(together.model_bytes * 7 / 61e9)
    assert together.model_bytes == 2 * num_parameters(arch)


def test_the_command_prints_bytes_and_time(config, capsys):
    assert main(["plan", str(config), "--world-size", "16", "--gpus-per-node", "4"]) == 0
    printed = capsys.readouterr().out
    assert "16 ranks on 4 nodes of 4" in printed
    for line in ("copied inside ranks", "sent inside nodes", "sent between nodes", "predicted time"):
        assert line in printed
    for line in ("KV cache", "optimizer", "rollout, responses", "update", "total"):
        assert line in printed


def test_json_has_the_peak_and_the_published_time_of_each_phase_with_its_source(config, capsys):
    assert main(["plan", str(config), "--world-size", "16", "--gpus-per-node", "4", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    total = printed["step_seconds"].pop("total")
    assert {"refit", "rollout, prompts", "rollout, responses", "update"} <= set(printed["step_seconds"])
    for phase in printed["step_seconds"].values():
        assert 0 < phase["at_peak"] <= phase["at_assumed_fractions"]
        assert phase["at_peak"] < phase["at_published_efficiency"]
        assert phase["published"] and all(one["measured"] and "https://" in one["source"] for one in phase["published"])
    for key, seconds in total.items():
        if key != "published":
            assert seconds == pytest.approx(sum(phase[key] for phase in printed["step_seconds"].values()))
    assert len(printed["weight_sync"]["at_published_rates"]) == 2
    assert printed["memory_bytes"][0]["phases"]["update"]["weights"] > 0


def test_fields_of_megatron_are_counted_or_said_not_to_be(config, capsys):
    fields = ["megatron.ddp={grad_reduce_in_fp32: false, check_for_nan_in_grad: true}", "megatron.unchecked=true"]
    more = "megatron.transformer={recompute_granularity: selective, recompute_modules: [mlp], softmax_scale: 0.1}"
    assert main(["plan", str(config), "--world-size", "16", *fields, more]) == 0
    printed = capsys.readouterr().out
    assert "not counted: megatron.transformer.softmax_scale, megatron.ddp.check_for_nan_in_grad\n" in printed
    assert "megatron.transformer.softmax_scale is used only because of megatron.unchecked=true" in printed


def test_a_run_that_does_not_fit_is_refused_with_the_term_and_what_fits(config, tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text("{memory_bytes: 4.0e9, context_bytes: 1, communicator_bytes: 1}")
    arguments = ["plan", str(config), "--world-size", "16", "--hardware", str(mine)]
    longer = ["model.overrides={intermediate_size: 131072}"]
    assert main([*arguments, *longer]) == 2
    refused = capsys.readouterr().err
    assert "does not fit GPUs of 4 GB" in refused and "the largest term is activations" in refused
    fits = refused.partition("This fits: ")[2].split()
    assert fits and main([*arguments, *longer, *fits]) == 0


@pytest.mark.parametrize(
    ("preset", "grid"),
    [
        ("qwen3_tiny", ParallelLayout(16, tp=2, rollout_tp=4)),
        ("qwen2_tiny", ParallelLayout(16, tp=2, pp=2, vpp=2, rollout_tp=2)),
        ("llama_tiny", ParallelLayout(8, pp=4, first_stage_layers=1, rollout_tp=2)),
        ("qwen3_moe_tiny", ParallelLayout(16, tp=2, pp=2, ep=4, etp=1, rollout_tp=4, rollout_ep=2)),
        ("qwen2_moe_tiny", ParallelLayout(8, ep=2, rollout_tp=4)),
    ],
)
def test_one_layer_of_each_stage_stands_for_all(preset, grid):
    arch = arch_from_preset(preset, {"num_hidden_layers": 8}, None)
    grid = replace(grid, last_stage_layers=1) if grid.first_stage_layers else grid
    few, places, times = one_layer_of_each(arch, grid)
    whole, short = (
        (megatron_layouts(a, g, dtype="bfloat16", te=True), native_layouts(a, g, "bfloat16"))
        for a, g in ((arch, grid), (few, places))
    )
    assert traffic(*short, 4, times=times) == traffic(*whole, 4)


@pytest.mark.slow
def test_4096_ranks_take_seconds():
    loaded = load(ROOT / "configs" / "dapo_qwen3-235b-a22b_32x8_tp4pp8ep8.yaml", ["train.batch_size=4096"])
    began = time.process_time()
    assert "4096 ranks on 512 nodes of 8" in describe(predict(loaded, 4096, HARDWARE["h100"]))
    assert time.process_time() - began < SECONDS


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
        ("decode_frac: 1.5", r"decode_frac is 1.5; expected a fraction in \(0, 1\]"),
        ("memory_bytes: lots", "memory_bytes is 'lots'; expected a number above 0"),
        ("- 1", "expected a mapping with base"),
        ("{", "is not readable YAML"),
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


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_rehearse_and_plan_count_the_same_memory(path, monkeypatch):
    if path.stem.startswith("sums_smollm2"):
        pytest.skip("needs the folder of its model")
    checked = []
    monkeypatch.setattr(plan, "check_fits", lambda plan, hardware, stages: checked.append(stages))
    config = load(path)
    report = Report(str(path))
    real = check_real_run(config, str(path), None, HARDWARE["h100"], report, placeholders=False)
    planned = predict(config, real.plan.grid.world_size, HARDWARE["h100"]).stages
    assert [planned] == checked[:1] and checked[1:] == [planned]


def test_a_weight_sync_that_sends_nothing_has_no_staging_in_both(config, tmp_path):
    given = ["parallel.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"]
    config = load(config, given)
    planned = predict(config, 2, HARDWARE["h100"])
    assert planned.refit.staging_bytes == 0
    assert all("refit staging" not in terms for stage in planned.stages for terms in stage.phases.values())
    just_enough = int(max(stage.total(stage.peak) for stage in planned.stages) / HARDWARE["h100"].memory_frac) + 1
    hardware = replace(HARDWARE["h100"], memory_bytes=just_enough)
    report = Report("run.yaml")
    check_real_run(config, "run.yaml", 2, hardware, report, placeholders=False)
    assert report.plan_refuses == ""
