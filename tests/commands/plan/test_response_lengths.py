"""Expected response lengths: times by hand, lengths from a run's metrics, and what is refused."""

import json
import math
import re

import pytest

from mrl.commands.cli import main
from mrl.commands.plan.durations import predict_durations
from mrl.commands.plan.fit import device_of
from mrl.commands.plan.memory import memory_by_stage, num_kv_rows
from mrl.commands.plan.response_lengths import READ_STEPS, ResponseLengths, expected_lengths
from mrl.config.config import load
from mrl.errors import UserError
from mrl.observability.hardware import HARDWARE
from mrl.observability.metrics import forward_flops
from mrl.trainer.run_plan import resolve
from tests.source import ROOT

H100 = HARDWARE["h100"]
DENSE = ROOT / "configs" / "grpo_qwen3-8b_1x8_tp2.yaml"
LARGE = ["rollout.max_num_seqs=1024"]

CONFIG = """
model: {preset: qwen3_tiny, tokenizer: "char:0123456789<>+#", dtype: bfloat16}
rollout: {prompt_length: 64, response_length: 256}
actor: {max_tokens_per_microbatch: 4096}
train: {num_steps: 100}
data: {task: addition}
reward: {functions: [{name: exact_match}]}
"""


def write_metrics(path, lengths):
    rows = [{"step": 0, "phase": "val", "response_length/mean": 1.0, "response_length/max": 1.0}]
    rows += [
        {"step": step, "phase": "train", "response_length/mean": mean, "response_length/max": most}
        for step, (mean, most) in enumerate(lengths, 1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_full_lengths_as_expected_lengths_change_nothing():
    found = resolve(load(DENSE), 8)
    assert predict_durations(found, H100, 64, ResponseLengths(4096.0, 4096)) == predict_durations(found, H100, 64)


def test_an_update_computes_the_expected_tokens():
    found = resolve(load(DENSE, ["actor.use_prefix_grouper=false"]), 8)
    times = predict_durations(found, H100, 64, ResponseLengths(499.5, 4096))
    rate = 8 * H100.bf16_flops * H100.train_flops_frac
    assert math.isclose(times.score, 1024 * forward_flops(found.arch, [1024 + 500]) / rate)


def test_sampling_waits_for_the_longest_response_or_for_the_cache():
    found = resolve(load(DENSE), 8)
    sequences = math.ceil(128 / found.grid.num_replicas) * found.config.rollout.n
    roomy, tight = (predict_durations(found, H100, rows, ResponseLengths(512.0, 3000)) for rows in (sequences, 8))
    assert roomy.decode_steps == 3000
    assert tight.decode_steps == sequences * 512 // 8
    assert roomy.decode < predict_durations(found, H100, sequences).decode


def test_lengths_are_those_of_the_last_steps(tmp_path):
    early, late = [(1000.0, 1000.0)] * 5, [(200.0, 600.0), (300.0, 700.0)] * (READ_STEPS // 2)
    path = write_metrics(tmp_path / "metrics.jsonl", early + late)
    config = load(DENSE)
    assert expected_lengths(config, None, path) == ResponseLengths(250.0, 650)
    assert expected_lengths(config, None, tmp_path) == ResponseLengths(250.0, 650)
    assert expected_lengths(config, 250, None) == ResponseLengths(250.0, config.rollout.response_length)
    assert expected_lengths(config, None, None) is None


def test_lengths_that_cannot_be_are_refused(tmp_path):
    config = load(DENSE)
    with pytest.raises(UserError, match="rollout.response_length=4096"):
        expected_lengths(config, 5000, None)
    with pytest.raises(UserError, match="--metrics"):
        expected_lengths(config, None, tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="--expected-response-length"):
        expected_lengths(config, None, write_metrics(tmp_path / "m.jsonl", []))


def test_the_command_states_the_lengths_and_the_step_is_shorter(tmp_path, capsys):
    path, config = write_metrics(tmp_path / "metrics.jsonl", [(16.0, 40.0)]), tmp_path / "run.yaml"
    config.write_text(CONFIG)
    steps = []
    for more in ([], ["--metrics", str(path)]):
        assert main(["plan", str(config), "--world-size", "2", *more]) == 0
        printed = capsys.readouterr().out
        steps.append(float(re.search(r"^  total +([0-9.]+)", printed[printed.index("a step, s") :], re.M)[1]))
    assert "16 tokens on average and 40 at most" in printed
    assert steps[1] < steps[0]
    both = ["--metrics", str(path), "--expected-response-length", "7"]
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(config), *both])


def test_a_paged_cache_holds_more_of_shorter_sequences():
    paged, fixed = (resolve(load(DENSE, [f"rollout.name={name}", *LARGE]), 8) for name in ("vllm", "native"))
    lengths = ResponseLengths(256.0, 4096)
    for plan, grows in ((paged, True), (fixed, False)):
        device = device_of(H100, plan.grid)
        full = num_kv_rows(memory_by_stage(plan, device))
        assert full > 0
        assert (lengths.decoded_rows(plan, device, full) > full) == grows
