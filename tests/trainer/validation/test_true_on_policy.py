"""True on-policy mode is refused where engine and actor could not have the same bits, with the field and the reason."""

from dataclasses import replace

import pytest

from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.trainer.validation.true_on_policy import check_device
from mrl.trainer.validation.validate import check, check_config
from tests.trainer.validation.runs import PP, ROLLOUT_TP, TP, make, refusal

ON = "rollout.true_on_policy=true"

RULES = [
    # overrides, ranks, what the message says
    (["rollout.name=vllm"], 1, "`VLLM_BATCH_INVARIANT`, on GPUs, only makes them batch-invariant"),
    (
        ["rollout.name=trtllm"],
        1,
        "is refused with rollout.name=trtllm: its kernels differ from the actor's",
    ),
    (
        ["rollout.name=my.engines:Engine"],
        1,
        "rollout.name=my.engines:Engine: this engine does not compute",
    ),
    (["rollout.dtype=bfloat16"], 1, "rollout.dtype=bfloat16 and model.dtype=float32: rounded weights"),
    (["rollout.quantization=fp8"], 1, "rollout.quantization=fp8: quantized weights give other"),
    (["megatron.transformer={fp8: e4m3, fp8_recipe: blockwise}"], 1, "{fp8, fp8_recipe}: these settings do not reach"),
    (["rollout.enforce_eager=true"], 1, "rollout.enforce_eager=true: the order of additions in PyTorch's operators"),
    (["rollout.over_sample_rate=0.5"], 1, "rollout.over_sample_rate=0.5: tokens are sampled by older weights"),
    (["train.mode=async"], 1, "train.mode=async: tokens are sampled by older weights"),
    (["run.device=cuda"], 1, "run.device=cuda: engine and actor share batch-invariant kernels for CPUs only"),
    (
        ["actor.transformer_impl=te", "model.dtype=bfloat16"],
        1,
        "actor.transformer_impl=te: TransformerEngine's layers do not use",
    ),
    ([f"{TP}=2"], 2, "rollout.tensor_model_parallel_size=1 and parallel.tensor_model_parallel_size=2: both must add"),
    ([f"{ROLLOUT_TP}=2"], 2, "rollout.tensor_model_parallel_size=2 and parallel.tensor_model_parallel_size=1"),
    (
        ["parallel.context_parallel_size=2"],
        2,
        "parallel.context_parallel_size=2: context-parallel attention does not use",
    ),
    (
        ["megatron.transformer={rotary_interleaved: false}"],
        1,
        "megatron.transformer={rotary_interleaved}: these settings do not reach",
    ),
]


@pytest.mark.parametrize(("overrides", "ranks", "said"), RULES, ids=[rule[2][:40] for rule in RULES])
def test_a_broken_rule_is_named(overrides, ranks, said):
    found = make("model.dtype=float32", ON, *overrides)
    with pytest.raises(UserError) as error:
        check_config(found, ranks)
    assert said in str(error.value)
    check_config(replace(found, rollout=replace(found.rollout, true_on_policy=False, quantization=None)), ranks)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [([], 1), ([], 4), ([f"{TP}=2", f"{ROLLOUT_TP}=2"], 2), ([f"{PP}=2"], 4), (["model.dtype=bfloat16"], 1),
     (["train.mode=async", "train.max_off_policy_steps=0"], 1)],
)  # fmt: skip
def test_what_can_be_is_let_pass(overrides, ranks):
    check_config(make(ON, *overrides), ranks)


def test_experts_are_refused():
    moe = arch_from_preset("qwen3_moe_tiny", {}, None)
    with pytest.raises(UserError, match=r"an MoE model \(qwen3_moe\): Megatron's dispatcher adds"):
        check(make(ON), moe, 1, moe.vocab_size)


@pytest.mark.parametrize(("algorithm", "learns_from"), [("sft", "answers"), ("dpo", "pairs")])
def test_what_samples_nothing_needs_no_equal_bits(algorithm, learns_from):
    said = refusal(make(ON, f"algorithm.name={algorithm}"), learns_from=learns_from)
    assert f"{ON} would have no effect because algorithm.name={algorithm} does not sample" in said


def test_a_gpu_that_was_found_is_refused_too():
    check_device(make(ON), "cpu")
    check_device(make(), "cuda")
    with pytest.raises(UserError, match=r"rollout.true_on_policy=true on cuda: .* Set run.device=cpu"):
        check_device(make(ON), "cuda")
