"""Rules of layouts and settings for MoE models, and of MoE settings for dense models. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from mrl.config.config import ActorConfig, Config, ParallelConfig
from mrl.errors import UserError
from mrl.models.base import ArchSpec, MoeSpec
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import expert_shard
from mrl.resharding.native import expert_shard as rollout_expert_shard
from mrl.resharding.shards import check_experts_divide
from mrl.trainer.validation.megatron import te_possible


def expert_rules(config: Config, arch: ArchSpec, grid: ParallelLayout, *, supervised: bool = False) -> Iterator[str]:
    """Yields a message for each broken rule, with the keys and what to do."""
    if arch.moe is None:
        yield from _idle(config)
    else:
        yield from _experts(config, arch.moe, grid)
        yield from _rollout(config, arch.moe, grid)
        yield from _replay(config, supervised)


def experts_divide(config: Config, moe: MoeSpec, grid: ParallelLayout) -> bool:
    """Returns whether the sizes of actor and engine divide the experts."""
    try:
        check_experts_divide(moe, expert_shard(grid, 0))
    except UserError:
        return False
    return not any(True for _ in _rollout(config, moe, grid))


def _idle(config: Config) -> Iterator[str]:
    """Yields a message for each MoE setting of a dense model."""
    default = Config()
    settings = (
        *(("parallel", item.name) for item in fields(ParallelConfig) if item.name.startswith("expert_")),
        ("rollout", "expert_parallel_size"),
        ("rollout", "moe_tensor_parallel_size"),
        ("rollout", "enable_rollout_routing_replay"),
        *(("actor", item.name) for item in fields(ActorConfig) if item.name.startswith(("moe_", "router_"))),
    )
    for section, name in settings:
        value = getattr(getattr(config, section), name)
        if value != getattr(getattr(default, section), name):
            why = "would have no effect because the model has no experts"
            yield f"{section}.{name}={value} is set, but {why}. Remove it."


def _experts(config: Config, moe: MoeSpec, grid: ParallelLayout) -> Iterator[str]:
    actor = config.actor
    if actor.moe_router_bias_update_rate and not moe.score_bias:
        yield (
            f"actor.moe_router_bias_update_rate={actor.moe_router_bias_update_rate}: this model selects its experts "
            "without a bias. Remove it."
        )
    if actor.moe_router_bias_update_rate and actor.lora.rank:
        yield (
            f"actor.moe_router_bias_update_rate={actor.moe_router_bias_update_rate} with actor.lora.rank="
            f"{actor.lora.rank}: with adapters the model's own tensors stay as they are. Remove one of them."
        )
    if grid.tp > 1 and not config.parallel.sequence_parallel:
        yield (
            f"parallel.tensor_model_parallel_size={grid.tp} with an MoE model needs parallel.sequence_parallel=true: "
            "without it Megatron routes every token on each tensor-parallel rank and does not train. Set it to true."
        )
    if grid.ep == 1 and grid.expert_tp != grid.tp:
        yield (
            f"parallel.expert_tensor_parallel_size={grid.expert_tp} differs from "
            f"parallel.tensor_model_parallel_size={grid.tp}, which needs parallel.expert_model_parallel_size above 1: "
            "otherwise Megatron reduces the experts' gradients over the ranks of the dense parameters. Set both tensor "
            "sizes to one number, or raise parallel.expert_model_parallel_size."
        )
    if moe.biases and grid.expert_tp > 1:
        yield (
            f"parallel.expert_tensor_parallel_size={grid.expert_tp}: this model's experts have biases, which Megatron "
            "adds on each rank that has a part of an expert. Set it to 1, and with "
            "parallel.tensor_model_parallel_size above 1 also parallel.expert_model_parallel_size."
        )
    try:
        check_experts_divide(moe, expert_shard(grid, 0))
    except UserError as error:
        yield str(error)
    if actor.moe_token_dispatcher_type == "allgather":
        if grid.pp > 1:
            yield (
                f"actor.moe_token_dispatcher_type=allgather is not supported with parallel.pipeline_model_parallel_size"
                f"={grid.pp}: Megatron cannot send microbatches of different lengths between stages. Use alltoall."
            )
        if grid.cp > 1:
            yield (
                f"actor.moe_token_dispatcher_type=allgather is not supported with parallel.context_parallel_size="
                f"{grid.cp}: mrl does not pad sequences that are split over ranks to equal lengths. Use alltoall."
            )
    if actor.moe_token_dispatcher_type == "flex":
        yield from _flex(config, grid)
    if (actor.moe_router_load_balancing_type == "aux_loss") != (actor.moe_aux_loss_coeff > 0):
        yield (
            f"actor.moe_router_load_balancing_type={actor.moe_router_load_balancing_type} with "
            f"actor.moe_aux_loss_coeff={actor.moe_aux_loss_coeff} has no effect. Set aux_loss and a coefficient above "
            "0, or none and 0."
        )


def _flex(config: Config, grid: ParallelLayout) -> Iterator[str]:
    if not te_possible(config):
        yield "actor.moe_token_dispatcher_type=flex needs GPUs and DeepEP or HybridEP. Use alltoall."
    if grid.ep * grid.expert_tp == 1:
        yield (
            "actor.moe_token_dispatcher_type=flex needs parallel.expert_model_parallel_size above 1: with 1 no tokens "
            "are sent. Use alltoall."
        )
    if config.actor.moe_router_dtype != "fp32":
        yield (
            "actor.moe_token_dispatcher_type=flex needs actor.moe_router_dtype=fp32, because DeepEP sends float32. "
            "Set it to fp32."
        )


def _rollout(config: Config, moe: MoeSpec, grid: ParallelLayout) -> Iterator[str]:
    rollout = config.rollout
    tp, ep, moe_tp = grid.rollout_tp, grid.rollout_ep, rollout.moe_tensor_parallel_size
    if tp % ep or (moe_tp is not None and ep * moe_tp != tp):
        given = f" x rollout.moe_tensor_parallel_size={moe_tp}" if moe_tp is not None else ""
        yield (
            f"rollout.expert_parallel_size={ep}{given} does not make up rollout.tensor_model_parallel_size={tp}: "
            "expert parallelism x expert tensor parallelism must equal the ranks of a replica. Choose two factors of "
            "it, or remove rollout.moe_tensor_parallel_size."
        )
    else:
        try:
            check_experts_divide(moe, rollout_expert_shard(tp, 0, ep))
        except UserError as error:
            yield str(error)


def _replay(config: Config, supervised: bool) -> Iterator[str]:
    replay, records = config.actor.router_replay, config.rollout.enable_rollout_routing_replay
    if replay != "none" and supervised:
        yield (
            f"actor.router_replay={replay} would have no effect because algorithm.name={config.algorithm.name} does "
            "not sample, so no routing exists before the update. Remove it, or change that."
        )
    elif replay == "recompute" and config.algorithm.rollout_correction.resolved.bypass_mode:
        yield (
            "actor.router_replay=recompute replays the routing of the forward pass for proximal log-probabilities, "
            "which algorithm.rollout_correction.bypass_mode=true skips. Set bypass_mode to false, or use "
            "actor.router_replay=rollout to replay the engine's routing."
        )
    if replay == "rollout" and not records:
        yield (
            "actor.router_replay=rollout needs rollout.enable_rollout_routing_replay=true. If the engine cannot record "
            "its routing, use actor.router_replay=recompute with algorithm.rollout_correction.bypass_mode=false, which "
            "replays the actor's."
        )
    if records and replay != "rollout":
        yield (
            "rollout.enable_rollout_routing_replay=true is set, but would have no effect because actor.router_replay "
            f"is {replay}. Set it to rollout."
        )
