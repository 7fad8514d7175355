"""Every split of a job's ranks is timed as the config that asks for it, and the best one is the best of all."""

import math
import re
import time
from dataclasses import replace

import pytest

from mrl.commands.cli import main
from mrl.commands.plan import rank_split as of_splits
from mrl.commands.plan.durations import Durations, predict_durations, predict_step, step_time
from mrl.commands.plan.fit import check_fits, device_of, format_overrides
from mrl.commands.plan.memory import memory_by_stage
from mrl.commands.plan.rank_split import explain_fastest, find_splits, splits_text
from mrl.commands.plan.weight_sync_cost import predict_refit
from mrl.config.config import load
from mrl.errors import UserError
from mrl.observability.hardware import HARDWARE
from mrl.trainer.run_plan import resolve
from tests.source import ROOT

H100 = HARDWARE["h100"]
DENSE = ROOT / "configs" / "grpo_qwen3-8b_1x8_tp2.yaml"
MIXTURE = ROOT / "configs" / "dapo_qwen3-30b-a3b_4x8_tp2ep8.yaml"
STAGED = ROOT / "configs" / "grpo_llama3.1-70b_8x8_tp8pp4.yaml"
NATIVE = "rollout.name=native"
RUNS = {
    "dense": (DENSE, (NATIVE,), 16),
    "as the config has a split": (DENSE, ("rollout.name=vllm", "rollout.num_ranks=4"), 12),
    "in nodes": (DENSE, (NATIVE, "rollout.nnodes=2", "rollout.n_gpus_per_node=4"), 16),
    "experts, TensorRT-LLM over MPI": (MIXTURE, (), 32),
    "stages": (STAGED, (NATIVE,), 96),
}
SECONDS = 10
"""Of CPU time for 256 ranks; 1 to 2 are usual."""


@pytest.fixture(scope="module")
def found():
    """Name -> (the run, its splits)."""
    made = {}
    for name, (file, overrides, ranks) in RUNS.items():
        run = resolve(load(file, overrides), ranks)
        made[name] = run, find_splits(run, H100)
    return made


@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", RUNS)
def test_the_best_split_is_no_slower_than_any_other(name, overlaps, found, monkeypatch):
    run, splits = found[name]
    ranked = splits.ranked(overlaps=overlaps)
    assert len(ranked) == len(splits.fitting) > 1
    steps = [split.step(overlaps=overlaps).step for split in ranked]
    assert steps == sorted(steps)
    assert any(split.grid == run.grid for split in ranked)
    monkeypatch.setattr(of_splits, "TIMED_RANKS", 0)  # only those that can be it are timed
    few = splits.ranked(overlaps=overlaps)
    assert few[0].step(overlaps=overlaps).step == steps[0] and len(few) <= len(ranked)


@pytest.mark.parametrize("name", RUNS)
def test_a_split_takes_what_the_config_that_asks_for_it_takes(name, found):
    file, overrides, ranks = RUNS[name]
    _, splits = found[name]
    for split in splits.fitting:
        asked = resolve(load(file, [*overrides, *format_overrides(split.overrides).split()]), ranks)
        assert asked.grid == split.grid
        stages = memory_by_stage(asked, device_of(H100, asked.grid))
        check_fits(asked, H100, stages)
        refit_s = predict_refit(asked.config, asked.arch, asked.grid, H100).seconds
        times = predict_step(asked, H100, stages, None)
        for overlaps in (False, True):
            expected = step_time(times, refit_s, has_roles=asked.grid.has_separate_rollout, overlaps=overlaps)
            assert split.step(overlaps=overlaps) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_other_split_is_counted_with_a_reason_for_which_it_is_refused(name, found):
    file, overrides, ranks = RUNS[name]
    _, splits = found[name]
    assert len(splits.fitting) + splits.left_out.total() == ranks
    for samplers in set(range(1, ranks)) - {len(split.grid.samplers) for split in splits.fitting}:
        settings = ("rollout.nnodes=0", "rollout.n_gpus_per_node=8", f"rollout.num_ranks={samplers}")
        with pytest.raises(UserError):
            asked = resolve(load(file, [*overrides, *settings]), ranks)
            check_fits(asked, H100, memory_by_stage(asked, device_of(H100, asked.grid)))


def test_longer_responses_move_ranks_to_rollouts():
    """As long as a replica has room for all of its samples at once; then whole waves of them count."""
    samplers = []
    for length in (256, 512, 1024, 2048, 4096):
        run = resolve(load(DENSE, [NATIVE, f"rollout.response_length={length}"]), 32)
        ranked = find_splits(run, H100).ranked(overlaps=True)
        samplers.append(next(len(split.grid.samplers) for split in ranked if split.grid.has_separate_rollout))
    assert samplers == sorted(samplers) and samplers[0] < samplers[-1], samplers


def test_a_step_is_its_parts_by_hand():
    times = Durations(prefill=1, decode=5, decode_steps=9, bound_by="weights", score=2, update=7, bubble_frac=0)
    together = step_time(times, 1.0, has_roles=False, overlaps=True)
    assert (together.step, together.idle_trainers, together.idle_samplers) == (16, 0, 0)
    in_turns = step_time(times, 1.0, has_roles=True, overlaps=False)
    assert (in_turns.step, in_turns.idle_trainers, in_turns.idle_samplers) == (16, 6 / 16, 9 / 16)
    beside = step_time(times, 1.0, has_roles=True, overlaps=True)
    assert (beside.step, beside.idle_trainers, beside.idle_samplers) == (10, 0, 3 / 10)


def test_the_reason_names_the_longer_side_and_who_waits(found):
    _, splits = found["dense"]
    ranked = splits.ranked(overlaps=True)
    said = explain_fastest(ranked, overlaps=True)
    best = ranked[0].step(overlaps=True)
    assert said.startswith(f"{len(ranked[0].grid.trainers)} ranks train and {len(ranked[0].grid.samplers)} sample (")
    assert ("rollouts take longer" if best.rollouts > best.training else "training takes longer") in said
    assert f"ranks that train wait {best.idle_trainers:.0%}" in said
    assert f"those that sample {best.idle_samplers:.0%}" in said
    assert "the case that all 16 ranks train and sample alternately takes 1." in said
    assert "no rank waits for another kind of rank" in explain_fastest(splits.ranked(overlaps=False), overlaps=False)


def test_a_replica_across_nodes_waits_for_slower_links_and_tensorrt_llm_takes_none():
    wide = (NATIVE, "rollout.tensor_model_parallel_size=4", "rollout.num_ranks=8")
    inside, across = (resolve(load(DENSE, wide), ranks) for ranks in (16, 18))
    slow = replace(H100, inter_node_bytes_per_s=1e8)
    each = [predict_durations(run, slow, 32).decode for run in (inside, across)]
    assert across.grid.samplers.start == 10 and each[1] > 2 * each[0]
    of_trtllm = resolve(load(DENSE, ["rollout.tensor_model_parallel_size=4"]), 16)
    left = find_splits(of_trtllm, replace(H100, gpus_per_node=6)).left_out
    assert left["a replica would lie across nodes, which TensorRT-LLM does not take"] > 0


def test_few_that_send_to_many_take_longer_than_one_receives():
    run = resolve(load(DENSE, [NATIVE, "rollout.num_ranks=12"]), 16)
    found = predict_refit(run.config, run.arch, run.grid, H100)
    sent = found.traffic.total.inter_node / 4 / H100.inter_node_bytes_per_s
    assert found.seconds >= sent > found.received_bytes / H100.inter_node_bytes_per_s


@pytest.mark.parametrize(
    ("file", "more"),
    [(DENSE, ("parallel={tensor_model_parallel_size: 1, sequence_parallel: false}",)), (MIXTURE, ())],
    ids=["dense", "experts"],
)
def test_256_ranks_take_seconds(file, more):
    run = resolve(load(file, [NATIVE, "train={batch_size: 1024, minibatch_size: 512}", *more]), 256)
    began = time.process_time()
    splits = find_splits(run, H100)
    text = list(splits_text(splits, run.grid, overlaps=True))
    assert time.process_time() - began < SECONDS
    assert text[-1].startswith("  best: ") and sum(line.startswith(" *") for line in text) == 1


def test_the_command_shows_memory_and_times_of_each_kind_and_the_splits(capsys):
    assert main(["plan", str(DENSE), NATIVE, "rollout.num_ranks=4"]) == 0
    printed = capsys.readouterr().out
    assert "roles     ranks 0-3 train, ranks 4-7 only sample (rollout.num_ranks=4)" in printed
    trainers, samplers = printed.split("  a rank that samples ")
    assert "gradients" in trainers and "KV cache" not in trainers
    assert "KV cache" in samplers and "optimizer" not in samplers
    assert "ranks that train wait " in printed and "  this config" in printed and "  best: " in printed


@pytest.mark.parametrize(
    ("settings", "overlaps"),
    [((), False), (("train.mode=async",), True), (("train.mode=async", "train.max_off_policy_steps=0"), False)],
    ids=["sync", "one step ahead", "none ahead"],
)
def test_ranks_of_both_kinds_work_at_the_same_time_where_sampling_is_ahead(settings, overlaps, capsys):
    assert main(["plan", str(DENSE), NATIVE, "rollout.num_ranks=4", *settings]) == 0
    printed = capsys.readouterr().out
    parts = ("refit", "rollout, prompts", "rollout, responses", "score", "update", "total")
    times = printed.partition("\na step, s")[2]
    refit, prompts, responses, score, update, step = (
        float(re.search(rf"\n  {part} +([\d.]+)", times)[1]) for part in parts
    )
    sides = prompts + responses, score + update
    assert math.isclose(step, refit + (max(sides) if overlaps else sum(sides)), abs_tol=1e-3)
    assert ("both at the same time" in printed) == overlaps
    assert ("best with train.mode=async: " in printed) == (not overlaps)


def test_the_page_shows_what_the_command_says(capsys):
    page = (ROOT / "mrl" / "docs" / "cluster.md").read_text()
    (shown,) = (block for block in page.split("```") if block.startswith("\nsplits of "))
    assert main(["plan", str(ROOT / "configs" / "grpo_qwen3-8b_2x8_tp2_vllm_roles.yaml")]) == 0
    assert shown.strip() in capsys.readouterr().out


def test_a_run_that_does_not_fit_is_told_of_a_split_that_does(capsys):
    resident = [f"~actor.{part}_offload" for part in ("param", "grad", "optimizer")]
    words_of = ["plan", str(DENSE), "rollout.name=vllm", "--world-size", "16", *resident]
    assert main(words_of) == 2
    refused = capsys.readouterr().err
    split = refused.rpartition("ranks train and ")[2].partition(": ")[2].split()
    assert split and split[0].startswith("rollout.num_ranks=")
    assert main([*words_of, *split]) == 0


def test_a_sampler_keeps_its_engine_and_holds_no_actor():
    run = resolve(load(DENSE, [NATIVE, "rollout.num_ranks=8"]), 16)
    trainer, sampler = memory_by_stage(run, device_of(H100, run.grid))
    assert (trainer.stage, sampler.stage, sampler.rank) == (0, None, 8)
    assert "rollout" not in trainer.phases and set(sampler.phases) == {"refit", "rollout"}
    kept = {"engine's weights", "KV cache", "refit staging", "context and communicators"}
    assert kept <= set(sampler.phases["refit"]) and kept <= set(sampler.phases["rollout"])
    assert math.isclose(sampler.phases["rollout"]["engine's weights"], 8.19e9 * 2, rel_tol=0.01)
