"""The prediction of memory is what real actors hold, and adds up over phases."""

import math
from dataclasses import replace

import pytest
import torch

from mrl.commands.plan.memory import memory_by_stage, not_counted, num_parameters, replayed_bytes, stage_memory
from mrl.config.config import Config, LoraConfig, TeacherConfig, load
from mrl.engines._memory_plan import Device
from mrl.models.base import critic_of
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.lora import adapted_matrices
from mrl.resharding.lora import num_parameters as lora_parameters
from mrl.resharding.megatron import megatron_layouts
from mrl.resharding.native import native_layouts
from mrl.resharding.random_init import init_adapters
from mrl.trainer.run_plan import resolve
from mrl.types import RolloutBatch
from tests.megatron.actors import ARCHS, EXPERT_LAYOUTS, LAYOUTS, MIXTURES, config_for, make_policy, train
from tests.ranks import run_ranks
from tests.reward_models import write_reward_model
from tests.source import ROOT

RELATIVE = 0.02  # buffers are filled up so that data-parallel ranks own equal parts; Adam's step counters


def held(name, grid, options):
    """Bytes of weights, gradients and optimizer of this rank after an update."""
    policy = make_policy({**ARCHS, **MIXTURES}[name], grid, **options)
    if policy.adapters is not None:
        init_adapters(policy._arch, options["actor"]["lora"], policy.adapters.layout(), policy.trained_tensors(), 0)
    train(policy, 1)
    adapters = {} if policy.adapters is None else policy.trained_tensors()
    held = [*policy.named_tensors().values(), *adapters.values()]
    weights = sum(tensor.nbytes for tensor in held)
    gradients = sum(buffer.grad_data.nbytes for wrapped in policy._data_parallel.chunks for buffer in wrapped.buffers)
    parts = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    optimizer = 0
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    own |= {
        buffer.param_data.untyped_storage().data_ptr()
        for w in policy._data_parallel.chunks
        for buffer in w.buffers
        if buffer.param_data is not None
    }
    for part in parts:
        for parameter, state in part.optimizer.state.items():
            optimizer += sum(value.nbytes for value in state.values() if torch.is_tensor(value))
            if parameter.untyped_storage().data_ptr() not in own:
                optimizer += parameter.nbytes
    return weights, gradients, optimizer


@pytest.mark.parametrize(
    ("layout", "name", "options"),
    [
        ("single", "qwen2", {}),
        ("dp2", "qwen2", {"dtype": "bfloat16"}),
        ("dp2", "qwen2", {"dtype": "bfloat16", "megatron": {"ddp": {"grad_reduce_in_fp32": False}}}),
        ("dp2", "qwen2", {"actor": {"use_distributed_optimizer": False}}),
        ("tp2_pp2", "qwen3", {}),
        ("dp2", "qwen2", {"dtype": "bfloat16", "actor": {"lora": LoraConfig(rank=8, dtype="float32")}}),
        ("dp2", "qwen2", {"dtype": "bfloat16", "actor": {"lora": LoraConfig(rank=8, target_modules=["o_proj"])}}),
        ("tp2_pp2", "qwen3", {"actor": {"lora": LoraConfig(rank=8, exclude_modules=["layers.0.mlp.up_proj"])}}),
        ("tp2_pp2", "qwen3_moe", {"actor": {"lora": LoraConfig(rank=8)}}),
    ],
)
def test_memory_is_what_a_rank_holds(layout, name, options):
    grid: ParallelLayout = LAYOUTS[layout]
    config: Config = config_for(grid, **options)
    stages = stage_memory(config, {**ARCHS, **MIXTURES}[name], grid)
    for rank, found in enumerate(run_ranks(grid.world_size, held, name, grid, options)):
        estimate = stages[grid.coords(rank).pp]
        expected = (estimate.weights, estimate.gradients, estimate.optimizer)
        for ours, theirs in zip(expected, found, strict=True):
            assert math.isclose(ours, theirs, rel_tol=RELATIVE), (expected, found)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, grid) for name in ("qwen2", "qwen2_untied") for grid in LAYOUTS.values()),
        *(("qwen2_moe", grid) for grid in EXPERT_LAYOUTS.values()),
        ("qwen3", ParallelLayout(4, pp=4, first_stage_layers=1, rollout_tp=2)),
        ("qwen3_moe", ParallelLayout(4, rollout_tp=4, rollout_ep=2)),
    ],
    ids=str,
)
def test_weights_are_those_of_every_ranks_layout(name, grid):
    arch = {**ARCHS, **MIXTURES}[name]
    actors, engines = (
        {rank: sum(math.prod(stored.shape) for stored in layout.values()) for rank, layout in layouts.items()}
        for layouts in (
            megatron_layouts(arch, grid, dtype="float32", te=True),
            native_layouts(arch, grid, "float32"),
        )
    )
    stages = stage_memory(config_for(grid), arch, grid)
    for rank in range(grid.world_size):
        found = stages[grid.coords(rank).pp]
        assert (found.weights, found.engine) == (4 * actors[rank], 4 * engines[rank])


@pytest.mark.parametrize("layout", ["single", "tp2_pp2", "pp2_vpp2"])
def test_weights_of_a_critic_are_those_of_every_ranks_layout(layout):
    grid, arch = LAYOUTS[layout], critic_of(ARCHS["qwen2"])
    stages = stage_memory(config_for(grid), arch, grid)
    for rank, tensors in megatron_layouts(arch, grid, dtype="float32", te=True).items():
        found = stages[grid.coords(rank).pp]
        assert found.weights == 4 * sum(math.prod(stored.shape) for stored in tensors.values())
        assert found.engine == 0


def test_public_models_have_their_number_of_parameters():
    # from the models' pages, in units of 10^9
    for preset, size in (("qwen2.5_0.5b", 0.49), ("qwen3_8b", 8.2), ("llama3.1_70b", 70.6), ("qwen3_235b_a22b", 235)):
        assert math.isclose(num_parameters(arch_from_preset(preset, {}, None)) / 1e9, size, rel_tol=0.01)


RUN = """
model: {preset: qwen3_tiny, tokenizer: "char:0123456789+=#", dtype: bfloat16}
rollout: {n: 4, prompt_length: 64, response_length: 64}
data: {task: addition}
reward: {functions: [{name: exact_match}]}
"""
GPU = Device(te=True, capacity=10**9, allowance=10**6)


def from_text(tmp_path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return load(path, overrides)


def phases(tmp_path, *overrides: str, device: Device = GPU, ranks: int = 1):
    return memory_by_stage(resolve(from_text(tmp_path, *overrides), ranks), device)


def test_terms_that_are_not_there_are_not_counted(tmp_path):
    (plain,) = phases(tmp_path)
    assert set(plain.phases) == {"refit", "rollout", "update"} and plain.host == 0
    (with_reference,) = phases(tmp_path, "algorithm.kl_in=loss")
    assert with_reference.phases.keys() - plain.phases.keys() == {"score"}
    assert with_reference.host == 2 * with_reference.phases["refit"]["weights"]
    assert "refit staging" not in plain.phases["refit"]
    assert "refit staging" in phases(tmp_path, ranks=2)[0].phases["refit"]
    assert "KV cache" not in plain.phases["update"]
    assert "KV cache" in phases(tmp_path, "rollout.free_cache_engine=false")[0].phases["update"]
    assert "engine's weights" not in plain.phases["update"]
    assert "engine's weights" in phases(tmp_path, "rollout.free_cache_engine=false")[0].phases["update"]
    (on_host,) = phases(tmp_path, "algorithm.kl_in=loss", device=Device(te=False, engine_copies=4, is_host=True))
    assert on_host.phases["rollout"]["engine's packed copies"] > on_host.phases["rollout"]["engine's weights"]
    assert on_host.phases["update"]["reference"] == on_host.phases["update"]["weights"] and on_host.host == 0


def test_a_host_without_a_compiler_keeps_the_activations_of_the_plain_layers(tmp_path):
    def activations(*given, compiles):
        device = Device(te=False, engine_copies=4, is_host=True, compiles=compiles)
        found = phases(tmp_path, "algorithm.name=ppo", *given, device=device)[0].phases
        return found["update"]["activations"], found["critic"]["activations"]

    plain, compiled = activations(compiles=False), activations(compiles=True)
    assert plain[0] > compiled[0] and plain[1] > compiled[1]
    true_on_policy = [activations("rollout.true_on_policy=true", compiles=compiles)[0] for compiles in (False, True)]
    assert true_on_policy == [plain[0], plain[0]]


def test_a_critic_is_in_every_phase_unless_it_leaves_between_its_own(tmp_path):
    (staying,) = phases(tmp_path, "algorithm.name=ppo")
    terms = {"critic's weights", "critic's gradients", "critic's optimizer"}
    assert staying.phases.keys() == {"refit", "rollout", "critic", "update"}
    assert all(terms <= phase.keys() for phase in staying.phases.values())
    offloads = [f"critic.{part}_offload=true" for part in ("param", "grad", "optimizer")]
    (leaving,) = phases(tmp_path, "algorithm.name=ppo", *offloads)
    assert [name for name, phase in leaving.phases.items() if terms & phase.keys()] == ["critic"]
    assert leaving.phases["critic"] == staying.phases["critic"]
    away = sum(leaving.phases["critic"][term] for term in ("critic's weights", "critic's optimizer"))
    assert leaving.host == away and staying.host == 0


def test_local_layers_are_counted_where_the_config_has_them(tmp_path):
    """Their attention has the queries of every sequence, TransformerEngine's those of distinct tokens."""
    te, local, neither = (
        phases(tmp_path, f"actor.transformer_impl={impl}", device=replace(GPU, te=there))[0].phases["update"]
        for impl, there in (("auto", True), ("local", True), ("auto", False))
    )
    assert te["activations"] < local["activations"] == neither["activations"]


PRECISE = "use_precision_aware_optimizer: true"
MOMENTS = "exp_avg_dtype: bf16, exp_avg_sq_dtype: bf16"
LOW = f"{PRECISE}, {MOMENTS}"
HYBRID = f"{PRECISE}, optimizer_cpu_offload: true"


@pytest.mark.parametrize(
    ("fields", "device", "host"),
    [(PRECISE, 10, 0), (LOW, 6, 0), (f"{PRECISE}, main_params_dtype: fp16", 10, 0),
     (f"{PRECISE}, store_param_remainders: false", 12, 0), (f"{LOW}, store_param_remainders: false", 8, 0),
     (HYBRID, 0, 16), (f"{HYBRID}, optimizer_offload_fraction: 0.25", 9, 4)],
)  # fmt: skip
def test_bytes_of_the_optimizer_are_those_of_its_types(fields, device, host, tmp_path):
    """12 bytes of a parameter without, 4 of them a master weight."""
    quiet = "checkpoint.async_save=false"
    (plain,) = phases(tmp_path, quiet)
    (found,) = phases(tmp_path, quiet, f"megatron.optimizer={{{fields}}}")
    each = plain.phases["update"]["optimizer"] / 12
    assert found.phases["update"].get("optimizer", 0) == device * each and found.host == host * each
    assert not_counted(load({}, [f"megatron.optimizer={{{fields}}}"])) == []


def test_states_of_two_bytes_are_made_wide_for_a_step(tmp_path):
    wide = "model.overrides={hidden_size: 1024, intermediate_size: 4096}"
    (found,) = phases(tmp_path, wide, f"megatron.optimizer={{{LOW}}}", "actor.max_tokens_per_microbatch=128")
    assert found.phases["update"]["step of the optimizer"] == found.phases["update"]["optimizer"] / 6 * 8
    (large,) = phases(tmp_path, wide, f"megatron.optimizer={{{LOW}}}", "actor.max_tokens_per_microbatch=65536")
    assert "step of the optimizer" not in large.phases["update"]


def test_what_is_offloaded_is_counted_where_it_is_needed(tmp_path):
    (plain,) = phases(tmp_path, "algorithm.kl_in=loss")
    away = (
        "algorithm.kl_in=loss",
        "actor.param_offload=true",
        "actor.grad_offload=true",
        "actor.optimizer_offload=true",
    )
    (found,) = phases(tmp_path, *away)
    held = {phase: {"weights", "gradients", "optimizer"} & terms.keys() for phase, terms in found.phases.items()}
    everything = {"weights", "gradients", "optimizer"}
    assert held == {"refit": {"weights"}, "rollout": set(), "score": {"weights"}, "update": everything}
    assert found.phases["update"] == plain.phases["update"]
    before = plain.phases["update"]
    assert found.host == plain.host + before["weights"] + before["optimizer"]
    # a refit begins with all that the update needed, but its activations
    assert found.total("refit") == sum(before[part] for part in everything) + GPU.allowance
    assert "actor, before offload" not in found.phases["rollout"]  # the cache is larger
    (on_host,) = phases(tmp_path, *away, device=Device(te=False, engine_copies=4, is_host=True))
    assert on_host.phases["rollout"]["offload buffers"] == before["weights"] + before["optimizer"]


def test_the_cache_takes_its_part_of_what_was_free_at_start(tmp_path):
    (roomy,) = phases(tmp_path)
    assert roomy.kv_rows == 128  # 32 prompts x 4 samples
    small = Device(te=True, capacity=12 * 10**6, allowance=10**6)
    (tight,) = phases(tmp_path, device=small)
    assert 0 < tight.kv_rows < 128
    free = small.capacity - sum(
        size for term, size in tight.phases["refit"].items() if term != "optimizer"
    )  # made after the cache was measured
    assert tight.phases["rollout"]["KV cache"] <= free / 2 < tight.phases["rollout"]["KV cache"] * 1.1
    (wider,) = phases(tmp_path, "actor.param_offload=true", "actor.grad_offload=true", device=small)
    gained = tight.phases["refit"]["weights"] + tight.phases["refit"]["gradients"]
    row = tight.phases["rollout"]["KV cache"] // tight.kv_rows
    assert wider.kv_rows == min(128, int((free + gained) / 2) // row) > tight.kv_rows
    (none,) = phases(tmp_path, device=Device(te=True, capacity=10**6))
    assert none.kv_rows == 0 and none.phases["rollout"]["KV cache"] > 0


def test_later_stages_hold_fewer_microbatches(tmp_path):
    stages = phases(tmp_path, "parallel.pipeline_model_parallel_size=4", "actor.max_tokens_per_microbatch=512", ranks=4)
    activations = [stage.phases["update"]["activations"] for stage in stages[:-1]]  # the last has its final norm too
    assert activations == sorted(activations, reverse=True) and activations[0] > activations[-1]
    assert ["logits" in stage.phases["update"] for stage in stages[:-1]] == [False] * 3


def test_copies_for_a_checkpoint_are_counted(tmp_path):
    """Of fp32 weights also the master weights, which are in the checkpoint under their own names."""
    for dtype, masters in (("bfloat16", 0), ("float32", 1)):
        given = (f"model.dtype={dtype}",)
        (plain,) = phases(tmp_path, *given)
        (copies,) = phases(tmp_path, *given, "checkpoint.async_save=true")
        held = plain.phases["update"]
        assert copies.host - plain.host == held["optimizer"] + (1 + masters) * held["weights"]
        host = Device(te=False, engine_copies=4, is_host=True)
        (on_host,) = phases(tmp_path, *given, "checkpoint.async_save=true", device=host)
        assert on_host.phases["rollout"]["copies for a checkpoint"] == copies.host - plain.host


def kept_experts(grid, config):
    """Bytes of the experts that an actor keeps of a step whose responses all have full length."""
    policy = make_policy(MIXTURES["qwen3_moe"], grid, actor={"router_replay": "recompute"})
    count = config.train.batch_size * config.rollout.n // grid.dp
    prompts, responses = config.rollout.prompt_length, config.rollout.response_length
    total = count * responses
    batch = RolloutBatch(
        tokens_P=torch.randint(0, 9, (count * config.rollout.max_sequence_length,)),
        prompt_lens_B=torch.full((count,), prompts),
        response_lens_B=torch.full((count,), responses),
        response_mask_R=torch.ones(total, dtype=torch.bool),
        rollout_logprobs_R=torch.zeros(total),
        group_id_B=torch.zeros(count, dtype=torch.int64),
        rewards_B=torch.zeros(count),
    )
    policy.score_proximal(batch)
    return batch.routed_experts_P.nbytes


@pytest.mark.parametrize("layout", ["ep2_pp2", "cp2_ep2"])
def test_the_experts_to_replay_are_what_an_actor_keeps(layout, tmp_path):
    grid, replay = EXPERT_LAYOUTS[layout], "actor.router_replay=recompute"
    sizes = ("rollout.prompt_length=4", "rollout.response_length=8", "train.batch_size=4", "rollout.n=2")
    config = from_text(tmp_path, replay, *sizes)
    for rank, found in enumerate(run_ranks(grid.world_size, kept_experts, grid, config)):
        stage = grid.coords(rank).pp
        assert replayed_bytes(config, MIXTURES["qwen3_moe"], grid, stage) == 3 * found  # two more of the minibatch: all
    halves = from_text(tmp_path, replay, *sizes, "train.minibatch_size=2")
    assert replayed_bytes(halves, MIXTURES["qwen3_moe"], grid, 0) == 2 * found
    told = from_text(tmp_path, "actor.router_replay=rollout", *sizes)
    whole = 4 * 2 * 12 * 4 * 2  # sequences, tokens, layers, experts of a token
    assert replayed_bytes(told, MIXTURES["qwen3_moe"], grid, 0) == 3 * found + whole // grid.num_replicas
    assert replayed_bytes(from_text(tmp_path, *sizes), MIXTURES["qwen3_moe"], grid, 0) == 0


def test_the_experts_to_replay_wait_in_host_memory(tmp_path):
    mixture = (
        "model.preset=qwen3_moe_tiny",
        "model.overrides={}",
        "algorithm.rollout_correction.preset=decoupled_token_is",
        "train.minibatch_size=1",
    )
    (without,), (kept,) = (phases(tmp_path, *mixture, *more) for more in ((), ("actor.router_replay=recompute",)))
    assert kept.host == without.host + kept.replayed and kept.replayed > 0 and kept.phases == without.phases
    on_host = phases(tmp_path, *mixture, "actor.router_replay=recompute", device=Device(te=False, is_host=True))[0]
    assert on_host.phases["update"]["experts to replay"] == kept.replayed and on_host.host == 0


SAME = ("distillation.enabled=true", "distillation.teacher_models=[{preset: qwen3_tiny}]")
WIDER = (
    "distillation.enabled=true",
    "distillation.teacher_models=[{preset: qwen3_tiny, overrides: {hidden_size: 256}}]",
)
EXACT_LOSS = "distillation.distillation_loss.loss_mode=reverse_kl"


def test_a_teachers_weights_wait_in_host_memory_and_have_a_turn_where_they_are_of_another_model(tmp_path):
    (plain,), (same,), (wider,) = (phases(tmp_path, *words) for words in ((), SAME, WIDER))
    weights = plain.phases["update"]["weights"]
    assert same.host == 2 * weights  # its own, and the student's while they are swapped
    assert same.phases.keys() - plain.phases.keys() == {"score"}
    assert wider.phases.keys() - plain.phases.keys() == {"score", "teacher"}
    assert wider.host == wider.phases["teacher"]["a teacher's weights"] > weights
    assert wider.phases["update"] == plain.phases["update"]


def test_a_teacher_that_is_the_model_under_the_adapters_has_no_weights(tmp_path):
    plan = resolve(from_text(tmp_path, *SAME, "actor.lora.rank=4"), 1)
    hosts = []
    for path in ("own", "other"):
        model = replace(plan.config.model, path="own")
        distillation = replace(plan.config.distillation, teacher_models=[TeacherConfig(model_path=path)])
        config = replace(plan.config, model=model, distillation=distillation)
        hosts.append(memory_by_stage(replace(plan, config=config), GPU)[0].host)
    own = stage_memory(plan.config, plan.arch, plan.grid)[0]
    assert hosts[0] == 0
    assert hosts[1] == own.weights - own.trained + own.weights  # its own, and the student's while they are swapped


def test_a_reward_models_weights_wait_in_host_memory_and_have_a_turn(tmp_path):
    write_reward_model(tmp_path / "reward", "qwen3_tiny", hidden_size=256)
    found = phases(tmp_path, f"reward.model.path={tmp_path}/reward", "reward.model.retokenize=true")
    (plain,), (rewarded,) = phases(tmp_path), found
    assert rewarded.phases.keys() - plain.phases.keys() == {"reward"}
    assert rewarded.host - plain.host == rewarded.phases["reward"]["the reward model's weights"] > 0
    assert rewarded.phases["update"] == plain.phases["update"]


def test_whole_distributions_need_states_on_the_last_stage_and_output_weights_in_updates(tmp_path):
    first, last = phases(tmp_path, *SAME, EXACT_LOSS, "parallel.pipeline_model_parallel_size=2", ranks=2)
    sampled, _ = phases(tmp_path, *SAME, "parallel.pipeline_model_parallel_size=2", ranks=2)
    assert "comparison with teachers" not in first.phases["update"] and first.host == sampled.host
    config = from_text(tmp_path)
    hidden = resolve(config, 1).arch.hidden_size
    assert last.phases["update"]["comparison with teachers"] > 0
    tokens = 2 * config.train.batch_size * config.rollout.n * config.rollout.response_length
    (_, plain_last) = phases(tmp_path, *SAME, "parallel.pipeline_model_parallel_size=2", ranks=2)
    assert last.host - plain_last.host == tokens * hidden * 2


def test_adapters_are_those_of_every_rank_and_a_reference_has_no_weights():
    lora = LoraConfig(rank=8)
    for name, grid in (
        *(("qwen2", grid) for grid in LAYOUTS.values()),
        *(("qwen2_moe", g) for g in EXPERT_LAYOUTS.values()),
    ):
        arch, config = {**ARCHS, **MIXTURES}[name], config_for(grid, actor={"lora": lora})
        stages = stage_memory(config, arch, grid)
        for rank in grid.trainers:
            matrices = adapted_matrices(arch, grid, rank, lora, dtype="float32", te=False)
            own = sum(math.prod(one.lora_a.shape) + math.prod(one.lora_b.shape) for one in matrices)
            assert stages[grid.coords(rank).pp].trained == 4 * own
    shared, mixture = replace(lora, share_expert_adapters=True), MIXTURES["qwen2_moe"]
    for grid in (ParallelLayout(1), EXPERT_LAYOUTS["ep2"]):  # each rank has all that the experts share
        (stage,) = stage_memory(config_for(grid, actor={"lora": shared}), mixture, grid)
        assert stage.trained == 4 * lora_parameters(mixture, shared)
    dense = ROOT / "configs" / "grpo_qwen3-8b_1x8_tp2.yaml"
    settings = ["algorithm.kl_in=loss", "algorithm.kl_coef=0.1", "reference.path=null"]
    full, adapted = (resolve(load(dense, [*settings, f"actor.lora.rank={rank}"]), 8) for rank in (0, 32))
    device = Device(te=True, capacity=76 * 10**9, allowance=10**9, total=80 * 10**9, engine_allowance=10**9)
    more, less = (memory_by_stage(plan, device)[0] for plan in (full, adapted))
    terms = {term: more.phases["update"][term] for term in ("weights", "gradients", "optimizer")}
    small = {term: less.phases["update"][term] for term in terms}
    assert small["weights"] < 1.03 * terms["weights"]
    assert all(small[term] < 0.03 * terms[term] for term in ("gradients", "optimizer"))
    assert less.host < more.host - terms["weights"]
    kept = replace(
        adapted, config=load(dense, [*settings, "rollout.name=native", "actor.lora={rank: 32, merge: false}"])
    )
    for phase, own in memory_by_stage(kept, device)[0].phases.items():
        assert own["engine's adapters"] == 2 * lora_parameters(adapted.arch, adapted.config.actor.lora), phase
        assert own["engine's weights"] > 0, phase
