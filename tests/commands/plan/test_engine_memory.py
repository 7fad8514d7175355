"""TensorRT-LLM's engines and vLLM in the prediction of memory: by shapes, in the phases in which a term is there."""

import json
import math

import pytest

from mrl.checkpoint.formats.trtllm_config import TrtllmConfig, to_json
from mrl.commands.plan.durations import predict_durations
from mrl.commands.plan.fit import device_of
from mrl.commands.plan.memory import memory_by_stage
from mrl.commands.plan.plan import describe, predict
from mrl.commands.plan.weight_sync_cost import predict_refit
from mrl.config.config import RolloutConfig, load
from mrl.engines._capabilities import memory_plan
from mrl.engines._memory_plan import Device, token_elements
from mrl.engines.vllm.kv_cache import kv_cache
from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.observability.hardware import HARDWARE
from mrl.resharding.hf import hf_layout
from mrl.resharding.native import native_layout
from mrl.resharding.trtllm import TrtllmMapping, trtllm_layout
from mrl.resharding.vllm import vllm_layout
from mrl.trainer.run_plan import resolve

RUN = """
model: {preset: qwen3_tiny, tokenizer: "char:0123456789<>+#", dtype: bfloat16}
rollout: {n: 4, prompt_length: 64, response_length: 64, checkpoint_engine: {update_weights_bucket_megabytes: 1}}
data: {task: addition}
reward: {functions: [{name: exact_match}]}
"""
OFFLOAD = ("actor.param_offload=true", "actor.grad_offload=true", "actor.optimizer_offload=true")
GPU = Device(te=True, capacity=9 * 10**8, total=10**9, allowance=10**6, engine_allowance=3 * 10**6)
BUILT = ("rollout.name=trtllm_engine", "rollout.enable_prefix_caching=false", "rollout.enforce_eager=true")


@pytest.mark.parametrize(("preset", "kilobytes"), [("deepseek_v3_671b_a37b", 70.272), ("qwen2.5_72b", 327.680)])
def test_a_token_has_as_many_bytes_in_the_cache_as_was_published(preset, kilobytes):
    """Source: Insights into DeepSeek-V3 (arXiv 2505.09343), table 1, in bfloat16."""
    arch = arch_from_preset(preset, {}, None)
    assert 2 * token_elements(arch, 1) == 1000 * kilobytes
    assert token_elements(arch, 8) == token_elements(arch, 1) // (1 if arch.mla else 8)


@pytest.fixture
def resolved(tmp_path):
    def run(*overrides, ranks=1):
        path = tmp_path / "run.yaml"
        path.write_text(RUN)
        return resolve(load(path, overrides), ranks)

    return run


def phases(found, device=GPU):
    return memory_by_stage(found, device)[0]


def bytes_of(layout, dtype_bytes=2):
    sizes = {"float32": 4, "bfloat16": dtype_bytes}
    return sum(math.prod(stored.shape) * sizes[stored.dtype] for stored in layout.values())


def test_the_native_cache_is_for_all_that_may_be_in_flight_where_sampling_may_stop(resolved):
    def cache(*overrides):
        return phases(resolved("train.batch_size=8", *overrides, ranks=2)).phases["rollout"]["KV cache"]

    one = cache() / 16  # 4 prompts of each replica, 4 samples each
    assert cache("rollout.over_sample_rate=0.5") == (8 + 4) * 4 * one
    assert cache("rollout.over_sample_rate=0.5", "rollout.max_num_seqs=40") == 40 * one
    ahead = ("train.mode=async", "algorithm.rollout_correction.preset=decoupled_token_is")
    assert cache(*ahead, "train.max_off_policy_steps=1") == 16 * one
    assert cache(*ahead, "train.max_off_policy_steps=3") == (8 + 3 * 8) * 4 * one


def test_a_layer_with_a_window_caches_the_window_and_one_forward(resolved):
    def cache(*overrides):
        lengths = ("rollout.prompt_length=400", "rollout.response_length=80")
        found = resolved("model.preset=qwen3_tiny", *lengths, *overrides)
        return phases(found).phases["rollout"]["KV cache"]

    half = (
        "model.overrides={use_sliding_window: true, sliding_window: 16, "
        "layer_types: [full_attention, sliding_attention, full_attention, sliding_attention]}"
    )
    assert cache(half) == cache() * (480 + 320) // (2 * 480)  # the window and RING_SPARE, in multiples of 64


def test_the_llm_api_sleeps_while_the_actor_trains(resolved):
    found = resolved("rollout.name=trtllm", *OFFLOAD)
    memory, weights = phases(found), bytes_of(native_layout(found.arch, 1, 0, "bfloat16"))
    there = {phase: "engine's weights" in terms for phase, terms in memory.phases.items()}
    assert there == {"refit": True, "rollout": True, "update": False}
    assert memory.phases["refit"]["engine's weights"] == weights
    assert all(terms["TensorRT-LLM's own"] == GPU.engine_allowance for terms in memory.phases.values())
    assert {phase for phase, terms in memory.phases.items() if "KV cache" in terms} == {"rollout"}
    assert "whole tensors of a refit" in memory.phases["refit"] and "weights" not in memory.phases["rollout"]
    actor = memory.phases["update"]
    assert memory.host == actor["weights"] + actor["optimizer"] + weights
    awake = phases(resolved("rollout.name=trtllm", "rollout.free_cache_engine=false", *OFFLOAD))
    assert {"engine's weights", "KV cache"} <= awake.phases["update"].keys()
    assert awake.host == memory.host - weights


def test_its_cache_is_a_part_of_all_that_was_free_when_it_was_made(resolved):
    def cache(*overrides):
        found = phases(resolved("rollout.name=trtllm", *overrides))
        return found.phases["rollout"]["KV cache"], found.phases

    taken, terms = cache(*OFFLOAD)
    engine = terms["refit"]["engine's weights"]
    free = GPU.total - GPU.allowance - GPU.engine_allowance - engine  # what is filled counts, not what can be
    assert taken == int(free * 0.5)
    assert cache(*OFFLOAD, "rollout.gpu_memory_utilization=0.9")[0] == int(free * 0.9)
    resident, terms = cache()  # the optimizer comes later
    held = terms["update"]["weights"] + terms["update"]["gradients"]
    assert resident == int((free - held) * 0.5)
    few = phases(resolved("rollout.name=trtllm", "rollout.max_num_seqs=3"))
    assert few.kv_rows == 3 and few.phases["rollout"]["KV cache"] == resident  # used or not
    (none,) = {phases(resolved("rollout.name=trtllm"), Device(te=True, capacity=10**6)).kv_rows}
    assert none == 0


KV = "rollout.engine_kwargs.trtllm.kv_cache_config"


@pytest.mark.parametrize(("dtype", "item_bytes"), [("auto", 2), ("fp8", 1), ("nvfp4", 9 / 16)])
def test_its_cache_has_more_tokens_where_their_dtype_is_smaller(resolved, dtype, item_bytes):
    found = resolved("rollout.name=trtllm", f"{KV}.dtype={dtype}", "rollout.max_num_seqs=100000", *OFFLOAD)
    memory, arch = phases(found), found.arch
    row = 128 * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * item_bytes
    assert memory.kv_rows == memory.phases["rollout"]["KV cache"] // row
    decode = predict_durations(found, HARDWARE["h100"], 64).decode
    plain = predict_durations(resolved("rollout.name=trtllm", *OFFLOAD), HARDWARE["h100"], 64).decode
    assert (decode < plain) == (item_bytes < 2)


def test_its_cache_is_bounded_as_its_own_arguments_say(resolved):
    def cache(**asked):
        """Bytes, tokens and sequences of 128 tokens."""
        found = resolved("rollout.name=trtllm", *OFFLOAD, *(f"{KV}.{name}={value}" for name, value in asked.items()))
        memory, arch = phases(found), found.arch
        taken = memory.phases["rollout"]["KV cache"]
        return taken, taken / (2 * arch.num_layers * arch.num_kv_heads * arch.head_dim * 2), memory.kv_rows

    assert cache(max_tokens=1000)[1:] == (1024, 8)  # whole blocks of 32
    assert cache(max_tokens=1025, tokens_per_block=128)[1:] == (1152, 9)
    assert cache(max_gpu_total_bytes=2**20)[0] == 2**20
    assert cache(max_gpu_total_bytes=0) == cache()  # 0: not bounded
    assert cache()[0] > 2**20


def test_whole_tensors_wait_for_their_bucket(resolved):
    small = resolved("rollout.name=trtllm")
    whole = bytes_of(hf_layout(small.arch, "bfloat16"))
    assert phases(small).phases["refit"]["whole tensors of a refit"] == whole  # smaller than two buckets
    wide = "{hidden_size: 512, intermediate_size: 2048, num_hidden_layers: 8}"
    large = resolved("rollout.name=trtllm", f"model.overrides={wide}")
    bound = 2 * (2**20 + 2048 * 512 * 2)
    assert bound < bytes_of(hf_layout(large.arch, "bfloat16"))
    assert phases(large).phases["refit"]["whole tensors of a refit"] == bound


def engines(folder, arch, mapping):
    build = {
        "max_batch_size": 256, "max_input_len": 64, "max_seq_len": 128, "max_num_tokens": 8192, "use_refit": True,
        "kv_cache_type": "continuous",
    }  # fmt: skip
    given = {"version": "1.2.1", "pretrained_config": to_json(TrtllmConfig(arch, mapping, "bfloat16"))}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given | {"build_config": build}))
    for rank in range(mapping.world_size):
        (folder / f"rank{rank}.engine").touch()
    return f"rollout.engine_dir={folder}"


@pytest.mark.parametrize("mapping", [TrtllmMapping(2), TrtllmMapping(1, 2)], ids=["tp2", "pp2"])
def test_a_built_engine_needs_its_weights_twice_in_a_refit_and_keeps_them(resolved, tmp_path, mapping):
    arch = arch_from_preset("qwen3_tiny", {}, 14)
    folder = engines(tmp_path / "engines", arch, mapping)
    sizes = (
        f"rollout.tensor_model_parallel_size={mapping.tp_size}",
        f"rollout.pipeline_model_parallel_size={mapping.pp_size}",
    )
    found = resolved(*BUILT, folder, *sizes, *OFFLOAD, ranks=2)
    fullest = max(bytes_of(trtllm_layout(arch, mapping, rank, "bfloat16")) for rank in range(2))
    memory = phases(found)
    assert {terms["engine's weights"] for terms in memory.phases.values()} == {fullest}
    assert memory.phases["refit"]["second copy of the weights"] == fullest
    assert {phase for phase, terms in memory.phases.items() if "KV cache" in terms} == {"rollout"}
    row = memory.phases["rollout"]["KV cache"] // memory.kv_rows
    heads = max(1, arch.num_kv_heads // mapping.tp_size)
    assert row == 2 * (arch.num_layers // mapping.pp_size) * heads * arch.head_dim * 128 * 2
    cut = phases(resolved(*BUILT, folder, *sizes, *OFFLOAD, "rollout.top_p=0.9", ranks=2))
    assert cut.phases["rollout"]["KV cache"] // cut.kv_rows == row + 2 * 4 * 64 * arch.vocab_size
    assert "TensorRT's activations" in describe(predict(found.config, 2, HARDWARE["h100"]))


@pytest.mark.parametrize(
    "preset, experts",
    [("qwen3_tiny", ()), ("qwen3_moe_tiny", ("rollout.expert_parallel_size=2",))],
    ids=["dense", "moe"],
)
def test_a_rank_of_the_llm_api_is_sent_what_it_reads_and_no_more(resolved, preset, experts):
    native, llm = (
        resolved(
            f"rollout.name={name}", "rollout.tensor_model_parallel_size=2", f"model.preset={preset}", *experts, ranks=4
        )
        for name in ("native", "trtllm")
    )
    moved = [
        sum(vars(predict_refit(found.config, found.arch, found.grid, HARDWARE["h100"]).traffic.total).values())
        for found in (native, llm)
    ]
    assert moved[0] == moved[1] < 3 * bytes_of(hf_layout(llm.arch, "bfloat16"))  # of 4 for whole tensors
    layouts = memory_plan(llm.config).layouts(llm.config, llm.arch, llm.grid)
    assert layouts.keys() == set(range(4)) and len({id(layout) for layout in layouts.values()}) == 2
    assert memory_plan(llm.config).arriving_bytes(llm.config, llm.arch, llm.grid) == max(
        map(bytes_of, layouts.values())
    )


def test_experts_of_other_ranks_are_not_staged_and_a_model_without_partial_loading_is_as_a_whole(resolved):
    def staged(*overrides, what="tensors"):
        return phases(resolved("rollout.name=trtllm", *overrides, ranks=2)).phases["refit"][f"whole {what} of a refit"]

    moe = ("model.preset=qwen3_moe_tiny", "rollout.tensor_model_parallel_size=2")
    arch = resolved(*moe, ranks=2).arch
    sizes = {name: bytes_of({name: stored}) for name, stored in hf_layout(arch, "bfloat16").items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert staged(*moe) == sum(sizes.values())  # smaller than two buckets
    assert staged(*moe, "rollout.expert_parallel_size=2") == sum(sizes.values()) - experts // 2
    wide = "model.overrides={hidden_size: 512, intermediate_size: 2048, num_hidden_layers: 8}"
    phi = resolved("model.preset=phi3_tiny", wide).arch
    assert staged("model.preset=phi3_tiny", wide, what="model") == bytes_of(hf_layout(phi, "bfloat16"))


def test_the_plan_says_what_sleeps_in_host_memory(resolved):
    found = resolved("rollout.name=trtllm", *OFFLOAD)
    printed = describe(predict(found.config, 1, HARDWARE["h100"]))
    for said in ("TensorRT-LLM's own", "whole tensors of a refit", "GB for models and engine that are offloaded"):
        assert said in printed
    assert device_of(HARDWARE["h100"], found.grid).total == HARDWARE["h100"].memory_bytes


def test_vllm_sleeps_on_a_gpu_and_keeps_all_on_a_cpu(resolved):
    found = resolved("rollout.name=vllm", "rollout.max_num_seqs=8", *OFFLOAD)
    weights = bytes_of(vllm_layout(found.arch, 1, 0, "bfloat16"))
    asked = kv_cache(found.config.rollout, found.arch, 2)
    memory = phases(found)
    assert {phase for phase, terms in memory.phases.items() if "engine's weights" in terms} == {"refit", "rollout"}
    assert (
        memory.phases["refit"]["engine's weights"]
        == weights
        == memory_plan(found.config).arriving_bytes(found.config, found.arch, found.grid)
    )
    assert memory.phases["rollout"]["KV cache"] == asked.wanted_bytes == 8 * asked.sequence_bytes
    awake = phases(resolved("rollout.name=vllm", "rollout.max_num_seqs=8", "rollout.free_cache_engine=false", *OFFLOAD))
    assert memory.host - awake.host == 2 * weights  # pinned memory, rounded up
    on_cpu = phases(found, Device(te=False, is_host=True))
    assert all(terms["engine's weights"] == weights for terms in on_cpu.phases.values())
    assert all(terms["vLLM's KV cache"] == asked.wanted_bytes for terms in on_cpu.phases.values())


def test_drafts_keep_what_was_said_beside_the_cache_of_a_cpu(resolved):
    own, drafts = ("rollout.name=native", "rollout.max_num_seqs=8"), "rollout.speculative.method=ngram"
    for device, kept in ((Device(te=False, is_host=True), 8 * 128 * 4 * 4), (GPU, 0)):  # 4 sequences of int32 a row
        plain, drafting = (phases(resolved(*given), device) for given in (own, (*own, drafts)))
        more = drafting.phases["rollout"]["KV cache"] - plain.phases["rollout"]["KV cache"]
        assert more == kept


def test_vllm_keeps_the_experts_of_what_is_cached_in_host_memory(resolved):
    replay = ("actor.router_replay=rollout", "rollout.enable_rollout_routing_replay=true")
    run = ("rollout.name=vllm", "model.preset=qwen3_moe_tiny", "~model.overrides")
    found = resolved(*run, *replay)
    arch = found.arch
    cached = kv_cache(found.config.rollout, arch, 2).wanted_bytes // (
        2 * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim
    )
    replayed, plain = phases(found), phases(resolved(*run))
    assert replayed.host - plain.host - replayed.replayed == cached * arch.num_layers * arch.moe.top_k
    on_cpu = phases(found, Device(te=False, is_host=True))
    assert on_cpu.phases["rollout"]["experts of what is cached"] == cached * arch.num_layers * arch.moe.top_k


def test_the_plan_moves_to_vllm_what_its_ranks_store(resolved):
    found = resolved("rollout.name=vllm", "rollout.tensor_model_parallel_size=2", ranks=4)
    layouts = memory_plan(found.config).layouts(found.config, found.arch, found.grid)
    assert layouts == {rank: vllm_layout(found.arch, 2, rank % 2, "bfloat16") for rank in range(4)}


def test_a_sequence_takes_whole_blocks_of_the_size_that_vllm_is_told(resolved):
    sizes = {}
    for block in (16, 128, 256):
        found = resolved("rollout.name=vllm", f"rollout.engine_kwargs.vllm={{block_size: {block}}}")
        sizes[block] = kv_cache(found.config.rollout, found.arch, 2).sequence_bytes
    assert sizes[16] == sizes[128] and sizes[256] == 2 * sizes[128]  # 128 tokens, and a block of vLLM's own


def test_a_cache_in_which_no_sequence_fits_is_refused(resolved):
    found = resolved("rollout.name=vllm", "rollout.engine_kwargs.vllm={kv_cache_dtype: fp8}")
    asked, plain = kv_cache(found.config.rollout, found.arch, 2), kv_cache(RolloutConfig(), found.arch, 2)
    assert asked.sequence_bytes * 9 == plain.sequence_bytes  # half the bytes of an element, 256 tokens in place of 1152
    assert asked.within(asked.sequence_bytes, found.config.rollout) == asked.sequence_bytes
    with pytest.raises(
        UserError, match="of one sequence of 128 tokens takes .*Raise it, or lower rollout.max_model_len"
    ):
        asked.within(asked.sequence_bytes - 1, found.config.rollout)
