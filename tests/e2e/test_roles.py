"""Rollouts on ranks of their own: the run of ranks that do both in turns, byte for byte, also killed and resumed."""

import contextlib
import json
import os
import random
import re
import signal
import time

import psutil
import pytest

from mrl.commands.plan import dryrun
from mrl.commands.serve.serve import ListenOptions, serve
from mrl.config.config import load
from mrl.errors import UserError
from mrl.trainer.run_plan import check_run
from mrl.trainer.validation.world_size import WorldSize
from tests.e2e import runs

pytestmark = pytest.mark.slow

STEPS = ["train.num_steps=3", "train.eval_interval=2", "checkpoint.interval=2"]
OWN = "rollout.num_ranks"
TP, ROLLOUT_TP = "parallel.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size=2"
PPO = [
    "algorithm.name=ppo",
    "algorithm.kl_in=reward",
    "algorithm.kl_ctrl={type: adaptive, target_kl: 0.01, horizon: 9}",
]


FP8 = [
    "rollout.quantization=fp8",
    "rollout.dtype=bfloat16",
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "model.overrides.hidden_size=256",
    "model.overrides.intermediate_size=256",
    "model.overrides.num_key_value_heads=4",
]
BIASES = ["model.preset=glm4_moe_tiny", "model.overrides.head_dim=8", "actor.moe_router_bias_update_rate=0.01"]


def logged(folder, name):
    return (folder / "run" / name).read_text().splitlines()


def without_refits(folder):
    """Lines of metrics.jsonl, and the bytes of each refit: how far they went is all that may differ."""
    lines, refits = [], []
    for row in map(json.loads, logged(folder, "metrics.jsonl")):
        told = [row.pop(f"refit/bytes_{name}", None) for name in ("local", "moved", "lower_bound")]
        refits += [told] if told[0] is not None else []
        lines.append(json.dumps(row))
    return lines, refits


PAIRS = {
    "grpo": (1, 1, []),
    "ppo": (1, 1, PPO),
    "reference that moves, groups dropped": (1, 1, ["reference.update_interval=1", "algorithm.dynamic_sampling=true"]),
    "truncated sampling": (1, 1, ["rollout.top_p=0.8"]),
    "an engine in FP8": (1, 1, FP8),
    "a router with biases": (1, 1, BIASES),
    "tp 2, and a replica of two": (2, 2, [TP, ROLLOUT_TP]),
    "dp 2, and a replica for each": (2, 2, []),
}
"""Ranks that train, ranks that sample, and settings: actor and engine are cut as they are on the trainers alone."""


@pytest.mark.parametrize("name", PAIRS)
def test_ranks_of_their_own_give_the_run_of_ranks_that_do_both(name, tmp_path):
    trainers, samplers, settings = PAIRS[name]
    runs.train_in_pool(tmp_path / "both", [*STEPS, *settings], trainers)
    runs.train_in_pool(tmp_path / "own", [*STEPS, *settings, f"{OWN}={samplers}"], trainers + samplers)
    (lines, _), (own_lines, refits) = without_refits(tmp_path / "both"), without_refits(tmp_path / "own")
    assert lines == own_lines
    assert logged(tmp_path / "both", "samples.jsonl") == logged(tmp_path / "own", "samples.jsonl")
    assert [local for local, _, _ in refits] == [0, 0, 0]
    assert all(moved == bound > 0 for _, moved, bound in refits)
    kept = [sorted(path.name for path in (tmp_path / side / "run/checkpoints").iterdir()) for side in ("both", "own")]
    assert kept[0] == kept[1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Lines of a run of one rank."""
    return runs.train_in_pool(tmp_path_factory.mktemp("alone"), STEPS, 1)


MIXED = {
    "tp 2, one that samples": (3, [TP, f"{OWN}=1"]),
    "dp 2, one that samples": (3, [f"{OWN}=1"]),
    "one that trains, a replica of two": (3, [f"{OWN}=2", ROLLOUT_TP]),
    "pp 2, one replica of two": (4, ["parallel.pipeline_model_parallel_size=2", f"{OWN}=2", ROLLOUT_TP]),
}


@pytest.mark.parametrize("name", MIXED)
def test_other_layouts_give_the_same_numbers_to_rounding(name, alone, tmp_path):
    ranks, settings = MIXED[name]
    found = runs.train_in_pool(tmp_path / "own", [*STEPS, *settings], ranks)
    assert [list(row) for row in found] == [list(row) for row in alone]
    for row, expected in zip(found, alone, strict=True):
        told = {key: value for key, value in row.items() if not key.startswith("refit/") and key != "phase"}
        far = {key: (value, expected[key]) for key, value in told.items() if abs(value - expected[key]) > 1e-4}
        assert not far
        if "refit/bytes_moved" in row:
            assert row["refit/bytes_moved"] == row["refit/bytes_lower_bound"] > 0


def kill_after(process, folder, num_lines):
    """SIGKILL to torchrun and its ranks once metrics.jsonl has so many lines."""
    file = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + runs.TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and file.read_bytes().count(b"\n") >= num_lines:
            break
        time.sleep(0.005)
    time.sleep(random.random() * 0.2)
    own = {process.pid, *children(process.pid)}
    for pid in own:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def children(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)] if psutil.pid_exists(pid) else []


def test_two_that_train_and_one_that_samples_are_killed_under_torchrun_and_go_on_identically(tmp_path):
    settings = [*STEPS, "train.num_steps=6", "reference.update_interval=3", f"{OWN}=1"]
    (tmp_path / "killed").mkdir()
    whole = runs.train_in_pool(tmp_path / "whole", settings, 3)
    for num_lines in (4, 6):
        kill_after(runs.start(tmp_path / "killed", settings, 3), tmp_path / "killed", num_lines)
    assert runs.train_in_pool(tmp_path / "killed", settings, 3) == whole


def test_a_run_goes_on_with_and_without_ranks_of_their_own(tmp_path):
    whole = runs.train_in_pool(tmp_path / "whole", ["train.num_steps=3"], 1)
    for number, (settings, ranks) in enumerate([([], 1), ([f"{OWN}=1"], 2), ([], 1)], 1):
        found = runs.train_in_pool(tmp_path / "parts", [f"train.num_steps={number}", *settings], ranks)
    for row, expected in zip(found, whole, strict=True):
        told = {key: row[key] for key in expected if not key.startswith("refit/") and not key.startswith("val")}
        assert told == {key: expected[key] for key in told}


def config_of(tmp_path, *overrides):
    runs.arguments(tmp_path)
    return load(tmp_path / "config-given.yaml", [f"run.output_dir={tmp_path}/run", *overrides])


def test_what_has_no_place_for_ranks_of_their_own_refuses_them(tmp_path):
    config = config_of(tmp_path, f"{OWN}=1")
    with pytest.raises(UserError, match=r"rollout.num_ranks=1: rank 0 would have no engine"):
        serve(config, None, ListenOptions("localhost", 0, None, ""), print)
    with pytest.raises(UserError, match="the algorithm does not sample"):
        sft = ("~algorithm", "algorithm.name=sft", "train.minibatch_size=null")
        check_run(config_of(tmp_path, f"{OWN}=1", *sft), 2)


def test_the_dry_run_shows_who_does_what(tmp_path):
    text = dryrun.describe(config_of(tmp_path, f"{OWN}=2", TP), WorldSize(4, "--world-size"))
    assert "# ranks: 4 = tp 2 x dp 1 x pp 1 + 2 that only sample" in text
    rows = [line.split() for line in text.splitlines() if line.strip() and line.split()[0] in "0123"]
    assert rows[:4] == [
        ["0", "0", "0", "0", "-"], ["1", "1", "0", "0", "-"], ["2", "-", "-", "-", "0"], ["3", "-", "-", "-", "1"]
    ]  # fmt: skip
    assert "MiB on a rank that samples" in text
    moved = next(line for line in text.splitlines() if line.startswith("sent between ranks")).split()
    assert moved[3] == moved[7] != "0.00"
    assert "copied inside ranks    0.00 MiB" in text


def running(folder, settings):
    """A run of two ranks that train and one that samples, whose first step is logged, and its ranks' processes."""
    folder.mkdir(parents=True, exist_ok=True)
    process = runs.start(folder, [*settings, f"{OWN}=1"], 3)
    file, deadline = folder / "run" / "metrics.jsonl", time.monotonic() + runs.TIMEOUT_S
    while not (file.exists() and file.read_bytes().count(b"\n") >= 4):
        assert time.monotonic() < deadline and process.poll() is None, (folder / "output.txt").read_text()
        time.sleep(0.01)
    ranks = [child for child in psutil.Process(process.pid).children() if "mrl" in child.cmdline()]
    return process, {int(child.environ()["RANK"]): child for child in ranks}


@pytest.mark.parametrize("rank", [0, 2], ids=["trains", "samples"])
def test_a_rank_of_either_kind_that_dies_is_named_and_the_job_ends(rank, tmp_path):
    process, ranks = running(tmp_path, ["train.num_steps=200"])
    assert sorted(ranks) == [0, 1, 2]
    ranks[rank].kill()
    assert process.wait(runs.TIMEOUT_S) not in (0, None)
    said = (tmp_path / "output.txt").read_text()
    assert re.search(rf"rank {rank}\b.*(died|gone|ended|killed)", said), said[-3000:]


def test_a_stop_by_a_signal_is_agreed_on_by_both_kinds_and_the_run_goes_on_identically(tmp_path):
    settings = ["train.num_steps=20", "train.eval_interval=0"]
    process, ranks = running(tmp_path / "stopped", settings)
    ranks[2].send_signal(signal.SIGUSR1)
    assert process.wait(runs.TIMEOUT_S) != 0
    assert "stopped by" in (tmp_path / "stopped" / "output.txt").read_text()
    assert len(logged(tmp_path / "stopped", "metrics.jsonl")) < 22
    found = runs.train_in_pool(tmp_path / "stopped", [*settings, f"{OWN}=1"], 3)
    assert found == runs.train_in_pool(tmp_path / "whole", [*settings, f"{OWN}=1"], 3)
