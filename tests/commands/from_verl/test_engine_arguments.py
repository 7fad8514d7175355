"""What a verl run tells vLLM becomes keys of `rollout`, or arguments that vLLM gets, or is told why it does not."""

import pytest
import yaml

from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.engine_arguments import NEEDLESS
from mrl.commands.from_verl.translate import translate
from mrl.config.verl_keys.translated_keys import ENGINE_ARGUMENTS, MEGATRON, ROLLOUT
from mrl.engines.vllm.engine_fields import DERIVED, KEYS
from tests.commands.from_verl.test_translate import VLLM_LINES, resolved

VLLM = ENGINE_ARGUMENTS["vllm"]
BASE = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}name": "vllm"}


def rollout_of(given):
    found = translate({**BASE, **given})
    return yaml.safe_load(found.text)["rollout"], "\n".join(found.missing), "\n".join(found.moot)


EXPECTED = {
    "router_replay_qwen3_30b_a3b_megatron": (
        {"tensor_model_parallel_size": 4, "max_num_batched_tokens": 1024, "engine_kwargs": {}},
        "",
    ),
    "qwen3_30b_veomni": (
        {
            "max_num_seqs": 128,
            "expert_parallel_size": 1,
            "engine_kwargs": {
                "vllm": {
                    "compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 32, 40, 48, 64, 96, 128, 256]},
                }
            },
        },
        "rollout.expert_parallel_size=8: a replica's 1 rank(s) have all experts: 1 is used",
    ),
    "qwen3_5_397b_megatron": (
        {
            "expert_parallel_size": 8,
            "engine_kwargs": {
                "vllm": {
                    "compilation_config": {
                        "cudagraph_mode": "FULL_DECODE_ONLY",
                        "cudagraph_capture_sizes": [4, 12, 24, 48, 64],
                    }
                }
            },
        },
        "rollout.expert_parallel_size=128: a replica's 8 rank(s) have all experts: 8 is used",
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_that_tells_vllm_more_resolves(name, tmp_path):
    found = translate(read_settings(VLLM_LINES[name]))
    config = resolved(found, tmp_path, *(["model.overrides.num_experts=512"] if "megatron" in name else []))
    values, told = EXPECTED[name]
    assert {key: getattr(config.rollout, key) for key in values} == values and config.rollout.name == "vllm"
    assert told in "\n".join(found.missing)
    assert config.actor.router_replay == ("rollout" if "router_replay" in name else "none")


def test_each_argument_goes_where_mrl_has_it():
    rollout, missing, moot = rollout_of(
        {
            f"{VLLM}kv_cache_dtype": "fp8",
            f"{VLLM}compilation_config": '{"cudagraph_mode": "PIECEWISE"}',
            f"{ROLLOUT}cudagraph_capture_sizes": [1, 2],
            f"{VLLM}max_model_len": 2000,
            f"{VLLM}enable_expert_parallel": True,
            f"{VLLM}hf_overrides.max_position_embeddings": 9,
            f"{VLLM}quantization": None,
            f"{VLLM}cpu_offload_gb": 0,
            f"{VLLM}enable_lora": True,
            f"{VLLM}load_format": "safetensors",
            f"{VLLM}enable_sleep_mode": False,
            f"{VLLM}tool_call_parser": "hermes",
        }
    )
    compiled = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2]}
    assert rollout["engine_kwargs"] == {"vllm": {"kv_cache_dtype": "fp8", "compilation_config": compiled}}
    assert (rollout["max_model_len"], rollout["expert_parallel_size"]) == (2000, 2)  # of two ranks, verl's default
    assert f"{VLLM}hf_overrides.max_position_embeddings=9: {DERIVED['hf_overrides']}" in missing
    assert f"{VLLM}tool_call_parser=hermes: vLLM 0.32 has no such argument" in missing
    assert missing.count(VLLM) == 2
    for name in ("enable_lora", "quantization", "cpu_offload_gb", "load_format", "enable_sleep_mode"):
        assert f"{VLLM}{name}: " in moot


@pytest.mark.parametrize(
    ("given", "left", "why"),
    [
        ({f"{ROLLOUT}temperature": 0.001}, "temperature", "vLLM would sample at 0.01"),
        ({f"{ROLLOUT}pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size", "only built TensorRT-LLM"),
        ({f"{ROLLOUT}moe_tensor_parallel_size": 4}, "moe_tensor_parallel_size", "it follows from"),
    ],
    ids=str,
)
def test_what_vllm_refuses_of_rollout_is_left_out_and_told(given, left, why):
    rollout, missing, _ = rollout_of(given)
    assert (
        left not in rollout and f"{ROLLOUT}{left}=" in missing and f"refused with rollout.name=vllm: {why}" in missing
    )
    other, missing, _ = rollout_of({**given, f"{ROLLOUT}name": "sglang"})
    assert left in other and "name" not in other and "rollout.name=vllm" not in missing


@pytest.mark.parametrize("name", ["sglang", "hf", "vllm", "trtllm", None])
def test_an_engine_that_mrl_lacks_is_told_and_nothing_is_lost(name):
    found = translate({"algorithm.adv_estimator": "grpo"} | ({} if name is None else {f"{ROLLOUT}name": name}))
    told = [line for line in found.differs if line.startswith(f"{ROLLOUT}name=")]
    assert len(told) == (name in ("sglang", "hf"))
    assert not any(f"{ROLLOUT}name" in line for line in [*found.lost, *found.missing])
    told = [line for line in found.differs if line.startswith(f"{ROLLOUT}name is not given")]
    assert len(told) == (name is None) and all("native engine samples" in line for line in told)


@pytest.mark.parametrize("what", [3, "3", '{"mode": '])
def test_sizes_of_graphs_beside_a_compilation_that_is_no_mapping_are_taken_alone(what):
    rollout, missing, _ = rollout_of({f"{VLLM}compilation_config": what, f"{ROLLOUT}cudagraph_capture_sizes": [1, 2]})
    assert rollout["engine_kwargs"] == {"vllm": {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}}
    assert f"{VLLM}compilation_config={what}: left out: it is not a mapping" in missing


@pytest.mark.parametrize("key", [f"{ROLLOUT}dtype", f"{MEGATRON}dtype"])
def test_a_dtype_that_mrl_does_not_have_is_told(key):
    _, missing, _ = rollout_of({key: "float16"})
    assert f"{key}=float16: mrl has float32, fp32, bfloat16, bf16; bfloat16 is used" in missing
    assert "dtype" not in rollout_of({key: "bfloat16"})[1]


def test_arguments_of_an_engine_that_is_not_the_runs_are_needless():
    rollout, missing, moot = rollout_of({f"{VLLM}kv_cache_dtype": "fp8", f"{ROLLOUT}name": "sglang"})
    assert "engine_kwargs" not in rollout and VLLM not in missing and f"{VLLM}kv_cache_dtype: " in moot


def test_greedy_sampling_while_training_is_hfs_alone():
    rollout, _, moot = rollout_of({f"{ROLLOUT}do_sample": False})
    assert "do_sample" not in rollout and f"{ROLLOUT}do_sample: verl's engines ignore it" in moot
    assert not rollout_of({f"{ROLLOUT}do_sample": False, f"{ROLLOUT}name": "hf"})[0]["do_sample"]


def test_the_needless_ones_are_arguments_that_mrl_decides():
    assert set(DERIVED) > NEEDLESS and not NEEDLESS & KEYS.keys()
