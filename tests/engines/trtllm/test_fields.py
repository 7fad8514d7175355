"""Each field of `rollout` reaches the LLM API as the documentation says, or is refused."""

from functools import partial

import pytest
import torch

from mrl.config.config import CheckpointEngineConfig
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm.features import find
from mrl.engines.trtllm.fields import FIELDS, check_launcher
from mrl.engines.trtllm.llm_runtime import arguments as start_arguments
from mrl.engines.trtllm.sampling import arguments
from mrl.errors import UserError
from tests.engines.trtllm import tiny
from tests.resharding.archs import small


def args(**settings):
    """What `LLM` was started with."""

    def of(folder, arch=tiny.ARCH):
        with tiny.engine(folder, arch, **settings) as engine:
            return engine._runtime.llm.args

    return of


def asked(features, **settings):
    """What `SamplingParams` is given for one sample."""
    sampling = SamplingConfig(**{"n": 1, "max_tokens": 8, "stop_token_ids": (13,), **settings})
    return arguments(sampling, -1, features, with_logits=False)


START = {
    "prompt_length": ({"prompt_length": 7}, lambda a: a.max_input_len == a.max_seq_len == 15),
    "response_length": ({"response_length": 9}, lambda a: a.max_seq_len == 17),
    "max_model_len": ({"max_model_len": 40}, lambda a: a.max_seq_len == 40),
    "max_num_seqs": ({"max_num_seqs": 5}, lambda a: a.max_batch_size == 5),
    "max_num_batched_tokens": ({"max_num_batched_tokens": 64}, lambda a: a.max_num_tokens == 64),
    "enable_chunked_prefill": ({"enable_chunked_prefill": False}, lambda a: a.enable_chunked_prefill is False),
    "enable_prefix_caching": (
        {"enable_prefix_caching": False},
        lambda a: a.kv_cache_config.enable_block_reuse is False,
    ),
    "gpu_memory_utilization": (
        {"gpu_memory_utilization": 0.3},
        lambda a: a.kv_cache_config.free_gpu_memory_fraction == 0.3,
    ),
    "dtype": ({}, lambda a: a.dtype == "float32"),
}


@pytest.mark.parametrize("field", START)
def test_a_field_of_the_start_reaches_the_arguments_of_llm(standin, tmp_path, field):
    settings, holds = START[field]
    assert holds(args(**settings)(tmp_path))


def test_what_every_start_says(standin, tmp_path):
    found = args()(tmp_path)
    assert found.load_format == "dummy" and found.skip_tokenizer_init and found.allreduce_strategy == "NCCL"
    assert found.scheduler_config.capacity_scheduler_policy == "MAX_UTILIZATION"
    assert found.model == str(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_ranks_and_experts_are_spread_as_the_config_says(standin):
    arch, config = small("qwen3_moe_tiny"), partial(tiny.rollout, tensor_model_parallel_size=4, expert_parallel_size=2)
    for given in (config(), config(moe_tensor_parallel_size=2)):
        found = start_arguments(given, arch, torch.float32, find(), trains_on_logprobs=True)
        names = ("tensor_parallel_size", "moe_expert_parallel_size", "moe_tensor_parallel_size")
        assert [found[name] for name in names] == [4, 2, 2]
    found = start_arguments(config(), tiny.ARCH, torch.float32, find(), trains_on_logprobs=True)
    assert "moe_expert_parallel_size" not in found


def test_graphs_are_left_out_where_they_are_not_known_to_survive_sleep(flavour, tmp_path):
    assert args(enforce_eager=True)(tmp_path).cuda_graph_config is None
    awake = args(free_cache_engine=False)(tmp_path)
    assert awake.cuda_graph_config.enable_padding and awake.cuda_graph_config.max_batch_size == 16
    assert (args()(tmp_path).cuda_graph_config is None) == (flavour == "1.2")
    with tiny.engine(tmp_path) as engine:
        assert [note.split(":")[0] for note in engine.notes] == ["no CUDA graphs"] * (flavour == "1.2")
    with tiny.engine(tmp_path, enforce_eager=True) as engine:
        assert engine.notes == ()


def test_no_word_about_the_job_leaves_it(flavour, tmp_path):
    args()(tmp_path)
    from tensorrt_llm import usage

    assert usage.reported == []


def test_free_cache_engine_asks_for_sleep_in_the_words_of_each_line(flavour, tmp_path):
    asleep, awake = args()(tmp_path), args(free_cache_engine=False)(tmp_path)
    if flavour == "1.2":
        assert asleep.enable_sleep and not awake.enable_sleep
    else:
        modes = {tag.name: mode for tag, mode in asleep.sleep_config.restore_modes.items()}
        assert modes == dict.fromkeys(("KV_CACHE", "MODEL_WEIGHTS_MAIN", "MODEL_WEIGHTS_DRAFT"), "NONE")
        assert awake.sleep_config is None


def test_without_free_cache_engine_nothing_sleeps(standin, tmp_path):
    with tiny.engine(tmp_path, free_cache_engine=False) as engine:
        tiny.refit(engine, tiny.weights())
        engine.sleep()  # the stand-in would refuse to release anything
        assert len(engine.generate(tiny.PROMPTS, tiny.SAMPLING)) == 9


SAMPLE = {
    "temperature": ({"temperature": 0.5}, {"temperature": 0.5}),
    "top_k": ({"top_k": 7}, {"top_k": 7}),
    "top_p": ({"top_p": 0.9}, {"top_p": 0.9}),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.1}),
    "do_sample": ({"greedy": True}, {"top_k": 1, "temperature": 1.0}),
    "ignore_eos": ({"ignore_eos": True}, {"stop_token_ids": None}),
    "stop": ({"stop": ("x",)}, {"detokenize": False, "stop_token_ids": [13]}),  # responses are cut: test_engine.py
    "val_kwargs": ({"temperature": 0.5, "greedy": True}, {"temperature": 0.5, "top_k": 1}),
}


@pytest.mark.parametrize("field", SAMPLE)
def test_a_field_of_sampling_reaches_the_arguments_of_sampling_params(standin, field):
    from tensorrt_llm import SamplingParams

    settings, expected = SAMPLE[field]
    found = asked(find(), **settings)
    assert {name: found[name] for name in expected} == expected
    SamplingParams(**found)


def test_what_every_request_says(standin):
    found = asked(find())
    assert found["temperature"] == 1.0 and found["top_k"] == 0  # never all None, which is greedy; never -1
    assert found["end_id"] == -1 and found["include_stop_str_in_output"]  # the end token stays
    assert found["seed"] == (1 << 64) - 1 and found["logprobs"] == 1
    assert "min_p" not in found and "n" not in found


def test_n_samples_are_n_requests_with_seeds_of_their_own(standin, tmp_path):
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, tiny.weights())
        seen = []
        ask = engine._requests.submit
        engine._requests.submit = lambda prompts, given: seen.extend(given) or ask(prompts, given)
        engine.generate(tiny.PROMPTS, tiny.SAMPLING)
        assert len(seen) == 4 + 9 and len({each["seed"] for each in seen[4:]}) == 9  # the first are the probe's


def test_the_bucket_size_cuts_what_reload_gets(standin, tmp_path):
    arch = small("qwen2_tiny", hidden_size=128, intermediate_size=512)
    tensors = tiny.weights(arch)
    counts = []
    for megabytes in (1, 64):
        bucket = CheckpointEngineConfig(update_weights_bucket_megabytes=megabytes)
        with tiny.engine(tmp_path, arch, checkpoint_engine=bucket) as engine:
            tiny.refit(engine, tensors)
            counts.append(len(engine._runtime.executor.model_engine.model.buckets))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert 1 < counts[0] <= -(-total >> 20) and counts[1] == 1


def test_replicas_of_several_ranks_need_ranks_that_mpi_started():
    two = tiny.rollout(tensor_model_parallel_size=2)
    for launcher in ("none", "torchrun"):
        with pytest.raises(UserError, match=r"with 2 ranks .*launch/mpirun.sh, or srun"):
            check_launcher(two, launcher)
    for launcher in ("mpirun", "mpi", "srun"):
        check_launcher(two, launcher)
    check_launcher(tiny.rollout(), "torchrun")


def test_every_field_that_is_passed_on_has_a_test_here():
    tested = {
        *START, *SAMPLE, "tensor_model_parallel_size", "expert_parallel_size", "moe_tensor_parallel_size",
        "enforce_eager", "free_cache_engine",
    }  # fmt: skip
    assert {key for key, use in FIELDS.items() if use.passed_as} <= tested
