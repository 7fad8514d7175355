"""Lengths and sampling settings that do not go together are refused."""

from dataclasses import replace

import pytest

from mrl.engines._capabilities import engine_capabilities
from mrl.models.base import RopeScaling
from mrl.models.presets import arch_from_preset
from mrl.trainer.validation.validate import check, check_config
from tests.trainer.validation.runs import ARCH, VAL, changed, make, refusal

BUILT = ("rollout.enable_prefix_caching=false", "rollout.enforce_eager=true")
"""Settings without which a built engine is refused before the model is looked at."""
UNCORRECTED = ("algorithm.rollout_correction.bypass_mode=false",)
RULES = [
    # overrides, ranks, what the message says
    (["rollout.name=sglang"], 1, "rollout.name=sglang is unknown"),
    (["rollout.max_model_len=20"], 1, "rollout.max_model_len=20 is below"),
    (["rollout.max_model_len=600"], 1, "exceed the model's max_position_embeddings=512"),
    (["rollout.response_length=500"], 1, "Sequences of 516 tokens"),
    (["actor.max_tokens_per_microbatch=23"], 1, "actor.max_tokens_per_microbatch=23 is below the longest sequence"),
    (["rollout.max_num_batched_tokens=8", "rollout.enable_chunked_prefill=false"], 1, "so long prompts cannot"),
    (["rollout.speculative.num_speculative_tokens=3"], 1, "no effect without rollout.speculative.method=ngram"),
    (
        [f"rollout.speculative.{said}" for said in ("method=ngram", "prompt_lookup_min=4", "prompt_lookup_max=3")],
        1,
        "prompt_lookup_min=4 is above rollout.speculative.prompt_lookup_max=3",
    ),
    (["rollout.do_sample=false"], 1, "gives rollout.n=8 equal samples"),
    (["rollout.val_kwargs.n=4"], 1, "rollout.val_kwargs.n=4 with do_sample=false"),
    ([f"{VAL}.n=4", f"{VAL}.do_sample=true", f"{VAL}.temperature=0"], 1, "with temperature=0 scores the same answer"),
    (["rollout.stop=['']"], 1, "rollout.stop contains an empty string"),
    (["rollout.quantization=fp8", *UNCORRECTED], 1, "as if the actor had sampled them"),
    (["rollout.quantization=fp8_per_tensor", "rollout.name=trtllm"], 1, "needs activation scales from a calibration"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)


SOME = replace(ARCH, sliding_window=20, windowed_layers=(1, 3))
EVERY = replace(SOME, windowed_layers=(0, 1, 2, 3))


@pytest.mark.parametrize(
    ("engine", "arch"),
    [("vllm", SOME), ("trtllm", SOME), ("trtllm", EVERY), ("trtllm_engine", EVERY)],
)
def test_an_engine_without_the_models_windows_is_refused_where_they_hide_tokens(engine, arch):
    given = make(f"rollout.name={engine}", "rollout.enforce_eager=true")
    errors = engine_capabilities(engine).model_errors
    assert "sliding window of 20 tokens" in next(errors(given, arch))
    short = [*errors(changed(given, "rollout.response_length", 4), arch)]
    assert not [each for each in short if "sliding window" in each]


def test_vllm_and_the_native_engine_have_the_windows_of_all_layers():
    gemma = replace(SOME, family="gemma3_text")  # of which vLLM's model reads which layers have a window
    for engine, arch in (("vllm", EVERY), ("vllm", gemma), ("native", EVERY), ("native", SOME)):
        assert not [*engine_capabilities(engine).model_errors(make(f"rollout.name={engine}"), arch)]


@pytest.mark.parametrize("engine", ["trtllm", "trtllm_engine"])
def test_norms_after_attention_are_refused_by_name(engine):
    given = make(f"rollout.name={engine}", "rollout.enforce_eager=true")
    errors = [*engine_capabilities(engine).model_errors(given, replace(ARCH, family="gemma3_text", post_norms=True))]
    assert "norms after attention and MLP" in errors[0]


SINKS = arch_from_preset("gpt_oss_tiny", {}, None)


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        ({"rms_norm_eps": 1e-6}, [], "rms_norm_eps"),
        ({"rope_scaling": None}, [], "yarn"),
        ({"rope_scaling": RopeScaling("yarn", 8.0, 64)}, [], "beta_fast"),
        ({"windowed_layers": (1, 3)}, [], "sliding window"),
        ({}, ["rollout.quantization=fp8"], "rollout.quantization=fp8"),
        ({}, ["actor.lora.rank=4", "actor.lora.merge=false"], "actor.lora.merge=false"),
        ({}, ["rollout.enable_rollout_routing_replay=true"], "enable_rollout_routing_replay"),
    ],
    ids=str,
)
def test_what_vllms_class_of_a_model_with_sinks_lacks_is_refused(changes, overrides, said):
    errors = engine_capabilities("vllm").model_errors
    assert not [*errors(make("rollout.name=vllm"), SINKS)]
    assert any(said in each for each in errors(make("rollout.name=vllm", *overrides), replace(SINKS, **changes)))


def test_tensorrt_llm_is_refused_for_a_model_with_sinks():
    arch = replace(SINKS, sliding_window=None, windowed_layers=())
    assert any(
        "gpt_oss" in each for each in engine_capabilities("trtllm").model_errors(make("rollout.name=trtllm"), arch)
    )


@pytest.mark.parametrize("preset", ["deepseek_v2_tiny", "deepseek_v3_tiny"])
def test_engines_and_settings_without_latent_attention_are_refused_by_name(preset):
    arch, family = arch_from_preset(preset, {}, None), preset.removesuffix("_tiny")
    for engine in ("trtllm", "trtllm_engine"):
        (error,) = engine_capabilities(engine).model_errors(make(f"rollout.name={engine}"), arch)
        assert f"rollout.name={engine}: '{family}'" in error and "TensorRT-LLM" in error
    for engine in ("native", "vllm"):
        assert not [*engine_capabilities(engine).model_errors(make(f"rollout.name={engine}"), arch)]
    check(make("rollout.tensor_model_parallel_size=1"), arch, 1, 12)
    for settings, why in (
        (["rollout.quantization=fp8"], f"'{family}' has multi-head latent attention"),
        (["rollout.quantization=fp8_per_tensor"], f"'{family}' has multi-head latent attention"),
        (["actor.lora.rank=4"], f"actor.lora.rank: '{family}' has multi-head latent attention"),
        (["rollout.true_on_policy=true", "run.device=cpu"], family),
        (["megatron.transformer={fp8: hybrid, fp8_recipe: blockwise}", "run.device=cpu"], "dense models only"),
        (["megatron.transformer={fp8: hybrid, fp8_recipe: blockwise}", "run.device=cuda"], "multiples of 16"),
    ):
        assert why in refusal(make(*settings), arch=arch), settings


YARN = RopeScaling("yarn", 4.0, 64, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize(
    ("changes", "settings", "why"),
    [
        ({"rms_norm_eps": 1e-5}, (), "rms_norm_eps"),
        ({"rope_scaling": replace(YARN, mscale_all_dim=None)}, (), "mscale_all_dim"),
        ({"rope_scaling": replace(YARN, attention_factor=1.0)}, (), "attention_factor"),
        ({"rope_scaling": replace(YARN, truncate=False)}, (), "truncate"),
        ({}, ("rollout.quantization=fp8",), "rollout.quantization"),
    ],
)
def test_what_vllm_computes_otherwise_in_latent_attention_is_refused(changes, settings, why):
    arch = replace(arch_from_preset("deepseek_v3_tiny", {}, None), **changes)
    assert any(
        why in each for each in engine_capabilities("vllm").model_errors(make("rollout.name=vllm", *settings), arch)
    )


def test_context_parallelism_of_latent_attention_is_allowed():
    arch = arch_from_preset("deepseek_v3_tiny", {}, None)
    check(make("parallel.context_parallel_size=2"), arch, 2, 12)


SCALED = {
    "linear": RopeScaling("linear", 2.0),
    "yarn": RopeScaling("yarn", 4.0, 256),
    "dynamic": RopeScaling("dynamic", 2.0),
    "llama3": RopeScaling("llama3", 2.0, 256, 1.0, 4.0),
}


@pytest.mark.parametrize("name", SCALED)
def test_sequences_may_be_as_long_as_the_scaled_positions_reach(name):
    arch = replace(ARCH, rope_scaling=SCALED[name])
    config = make("rollout.max_model_len=1024")
    if name in ("linear", "yarn"):
        check(config, arch, 1, 12)
        assert "has positions for 1024 tokens" in refusal(make("rollout.max_model_len=1025"), arch=arch)
    else:
        said = refusal(config, arch=arch)
        assert "max_position_embeddings=512" in said and ("'yarn'" in said) == (name == "dynamic")


@pytest.mark.parametrize(
    ("overrides", "scaling", "said"),
    [
        (
            ["rollout.name=trtllm_engine", "rollout.max_model_len=600", *BUILT],
            SCALED["yarn"],
            "max_position_embeddings=512",
        ),
        (["rollout.name=trtllm"], replace(SCALED["yarn"], attention_factor=0.7), "attention_factor"),
        (["rollout.name=trtllm"], replace(SCALED["yarn"], truncate=False), "truncate"),
        (["rollout.name=trtllm_engine", *BUILT], SCALED["dynamic"], "'dynamic'"),
    ],
)
def test_positions_that_tensorrt_llm_lacks_are_named(overrides, scaling, said):
    assert said in refusal(make(*overrides), arch=replace(ARCH, rope_scaling=scaling))


def test_greedy_evaluations_are_verls_default():
    check_config(make(f"{VAL}.temperature=0"), world_size=1)
    check_config(make(f"{VAL}.temperature=0", f"{VAL}.do_sample=true"), world_size=1)


def test_weights_that_correct_quantised_rollouts_are_enough():
    check_config(
        make("rollout.quantization=fp8", "algorithm.rollout_correction.preset=decoupled_token_is"), world_size=1
    )
    check_config(make(*UNCORRECTED), world_size=1)
