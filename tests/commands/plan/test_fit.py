"""What does not fit is refused with its term, and what is proposed does fit, by the smallest change."""

import pytest

from mrl.commands.plan.fit import check_fits, device_of, format_overrides, shortage, smallest_change
from mrl.commands.plan.memory import memory_by_stage
from mrl.config.config import load
from mrl.errors import UserError
from mrl.observability.hardware import HARDWARE
from mrl.trainer.run_plan import resolve
from tests.source import ROOT

H100 = HARDWARE["h100"]
NAMES = {
    "0.5b": ("grpo_qwen2.5-0.5b_1x1", 1),
    "8b": ("grpo_qwen3-8b_1x8_tp2", 8),
    "30b": ("dapo_qwen3-30b-a3b_4x8_tp2ep8", 32),
    "70b": ("grpo_llama3.1-70b_8x8_tp8pp4", 64),
    "235b": ("dapo_qwen3-235b-a22b_32x8_tp4pp8ep8", 256),
}


RESIDENT = (
    "rollout.name=native", "~rollout.gpu_memory_utilization", "~actor.param_offload", "~actor.grad_offload",
    "~actor.optimizer_offload",
)  # fmt: skip
"""The native engine beside an actor that stays on the device, as a config has it that says nothing of either."""
LARGE_REPLICA = ("rollout.tensor_model_parallel_size=32", "rollout.expert_parallel_size=32")


def run(name: str, *overrides: str, ranks: int | None = None):
    file, size = NAMES[name]
    given = [*RESIDENT, *(LARGE_REPLICA if name == "235b" else ()), *overrides]
    return resolve(load(ROOT / "configs" / f"{file}.yaml", given), ranks or size)


def check(found):
    check_fits(found, H100, memory_by_stage(found, device_of(H100, found.grid)))


def refusal(found) -> str:
    with pytest.raises(UserError) as caught:
        check(found)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "where", "change"),
    [
        ("8b", ["actor.recompute=none"], "in update every rank needs", {"actor.recompute": "full"}),
        (
            "30b",
            ["rollout.checkpoint_engine.update_weights_bucket_megabytes=2048"],
            "in rollout every rank needs",
            {"rollout.checkpoint_engine.update_weights_bucket_megabytes": 512},
        ),
        (
            "70b",
            ["rollout.gpu_memory_utilization=0.9"],
            "in rollout stage 3 (rank 48 and others) needs",
            {"rollout.gpu_memory_utilization": 0.6},
        ),
        (
            "235b",
            ["rollout.tensor_model_parallel_size=8", "rollout.expert_parallel_size=8"],
            "stage 1 (rank 32 and others) has no room for one sequence in its KV cache",
            {"actor.grad_offload": True, "actor.optimizer_offload": True},
        ),
        (
            "70b",
            ["parallel.tensor_model_parallel_size=4", "parallel.pipeline_model_parallel_size=2"],
            "the largest term is gradients",
            {"actor.grad_offload": True},
        ),
    ],
)
def test_the_term_is_named_and_one_setting_mends_it(name, overrides, where, change):
    found = run(name, *overrides)
    message = refusal(found)
    assert where in message
    assert message.endswith(f"This fits: {format_overrides(change)}")
    check(run(name, *overrides, *format_overrides(change).split()))


def test_several_settings_change_where_one_is_not_enough():
    broken = ["rollout.tensor_model_parallel_size=8", "rollout.expert_parallel_size=8", "actor.recompute=none"]
    found = run("235b", *broken)
    change = smallest_change(found, H100)
    assert change is not None and len(change) >= 2
    check(run("235b", *broken, *format_overrides(change).split()))


def test_more_ranks_are_named_where_no_layout_of_these_fits():
    message = refusal(run("70b", "parallel.pipeline_model_parallel_size=1", ranks=8))
    assert "No layout of 8 ranks that was tried fits" in message and "this does: --world-size" in message
    ranks, *overrides = message.partition("--world-size ")[2].split()
    check(run("70b", "parallel.pipeline_model_parallel_size=1", *overrides, ranks=int(ranks)))


def test_a_cache_without_room_for_a_sequence_is_a_shortage():
    found = run("0.5b", "rollout.gpu_memory_utilization=0.0001")
    assert "every rank has no room for one sequence in its KV cache" in refusal(found)


def test_what_fits_is_not_short_of_anything():
    found = run("8b")
    device = device_of(H100, found.grid)
    assert shortage(memory_by_stage(found, device), device.capacity) is None
    assert smallest_change(found, H100) == {}
