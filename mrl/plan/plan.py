"""What a run would cost on a cluster of any size, without running it: `mrl plan CONFIG --world-size N`.

Owns the prediction of a refit and the text. Memory comes from `memory.py` and is refused by `fit.py`, times come from
`durations.py`, all of it from shapes (`weights/traffic.py`) and stated figures (`observe/hardware.py`): nothing is
measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mrl.config import Config
from mrl.distributed.scripts import start_words
from mrl.engines.trtllm.fields import needs_mpi
from mrl.grid import Grid
from mrl.models.base import ArchSpec, Place
from mrl.observe.hardware import Hardware
from mrl.observe.words import counted
from mrl.plan.durations import predict_durations
from mrl.plan.engine_weights import engine_layouts, weight_bytes
from mrl.plan.fit import check_fits, device_of
from mrl.plan.memory import StageMemory, memory_by_stage, not_counted, num_parameters, staging_bytes
from mrl.preflight.megatron import forced
from mrl.preflight.roles import refuse_roles
from mrl.run.prepare import Resolved, check_run
from mrl.weights.megatron import chunk_layers, megatron_layouts
from mrl.weights.shards import parts_of, table
from mrl.weights.traffic import Bytes, Traffic, traffic

GB = 1e9


@dataclass(frozen=True)
class RefitPrediction:
    """A refit on a cluster.

    Attributes:
        traffic: Its bytes.
        seconds: Of the rank that takes longest, its local copies and its links one after the other.
        bound_s: The same with everything at once: what no refit of these layouts beats.
        full_gather_s: A refit that gathers every full tensor on every rank.
        received_bytes: Most that one rank is sent.
        staging_bytes: Most that a rank holds in buffers of the transport.
    """

    traffic: Traffic
    seconds: float
    bound_s: float
    full_gather_s: float
    received_bytes: int
    staging_bytes: int


def describe(config: Config, world_size: int, hardware: Hardware) -> str:
    """Memory of a rank of each stage, seconds of each phase, and the refit's bytes by link.

    Args:
        config: What was asked for.
        world_size: Ranks to plan for.
        hardware: Figures of the cluster.

    Raises:
        UserError: The run would be refused, or would run out of memory; the message says what would fit.
    """
    refuse_roles(
        config,
        "`mrl plan` counts ranks that train and sample in turns, not yet ranks of each kind",
        "Plan with rollout.num_ranks=0 and rollout.nnodes=0; `mrl train --dry-run` shows the rank map and the refit.",
    )
    notes: list[str] = []
    found = check_run(config, world_size, tell=notes.append)
    device = device_of(hardware, found.grid)
    refit = predict_refit(found.config, found.arch, found.grid, hardware)
    # a rank may send more than it gets: without knowing who sends, the bound is all of an engine's weights
    stages = memory_by_stage(found, device, moved_bytes=None if refit.staging_bytes else 0)
    check_fits(found, hardware, stages)
    return "\n".join(
        [
            *_layout(found, hardware),
            "",
            *_memory(found, stages, device.capacity or 0, hardware),
            "",
            *_times(found, hardware, refit, min(stage.kv_rows for stage in stages)),
            "",
            *(_refit(refit) if found.needs_engine else ["no engine: nothing is sampled"]),
            *(f"\nnote: {note}" for note in [*notes, *_passed(found)]),
        ]
    )


def _layout(found: Resolved, hardware: Hardware) -> Iterator[str]:
    arch, grid = found.arch, found.grid
    nodes = -(-grid.world_size // hardware.gpus_per_node)
    yield f"{counted(grid.world_size, 'rank')} on {counted(nodes, 'node')} of {hardware.gpus_per_node}"
    yield f"start     {start_words(grid.world_size, mpi=needs_mpi(found.config.rollout))}"
    yield f"model     {num_parameters(arch) / GB:.2f} x 10^9 parameters, {found.config.model.dtype}"
    if found.critic is not None:
        yield f"critic    {num_parameters(found.critic) / GB:.2f} x 10^9 parameters, in the actor's layout"
    for teacher in found.teachers:
        own = "the student's layers" if teacher == arch else "layers of its own"
        yield f"teacher   {num_parameters(teacher) / GB:.2f} x 10^9 parameters, {own}, in the actor's layout"
    if found.reward is not None:
        yield f"reward    model of {num_parameters(found.reward) / GB:.2f} x 10^9 parameters, in the actor's layout"
    yield f"actor     tp {grid.tp} x cp {grid.cp} x dp {grid.dp} x pp {grid.pp}" + (
        f", experts ep {grid.ep} x etp {grid.expert_tp}" if arch.moe else ""
    )
    stages = f" x pp {grid.rollout_pp}" if grid.rollout_pp > 1 else ""
    if not found.needs_engine:
        return
    yield f"rollout   {grid.num_replicas} replica(s) of tp {grid.rollout_tp}{stages}" + (
        f", experts ep {grid.rollout_ep} x tp {grid.rollout_moe_tp}" if arch.moe else ""
    )


def _memory(found: Resolved, stages: list[StageMemory], capacity: int, hardware: Hardware) -> Iterator[str]:
    """The fullest stage term by term, the others by their peak."""
    fullest = max(stages, key=lambda stage: stage.total(stage.peak))
    yield (
        f"memory of a rank, GB, if every response has its full length; {capacity / GB:.1f} of "
        f"{hardware.memory_bytes / GB:.0f} GB can be filled"
    )
    phases = list(fullest.phases)
    yield f"  {f'stage {fullest.stage}':<26}" + "".join(f"{phase:>10}" for phase in phases)
    for term in dict.fromkeys(term for phase in phases for term in fullest.phases[phase]):
        sizes = (fullest.phases[phase].get(term) for phase in phases)
        yield f"  {term:<26}" + "".join(f"{'-' if size is None else f'{size / GB:.2f}':>10}" for size in sizes)
    for stage in stages:
        name = f"all of it, stage {stage.stage}" if len(stages) > 1 else "all of it"
        yield f"  {name:<26}" + "".join(f"{stage.total(phase) / GB:>10.2f}" for phase in phases)
    if fullest.host:
        yield f"  host memory: {fullest.host / GB:.2f} GB, what waits there of models and engine"
        if found.needs_engine and found.config.rollout.name == "trtllm" and found.config.rollout.free_cache_engine:
            less = weight_bytes(found.config, found.arch, found.grid)
            yield f"  of it {less / GB:.2f} GB the engine's weights asleep, which TensorRT-LLM 1.3 discards instead"
        if fullest.replayed:
            yield f"  of it {fullest.replayed / GB:.2f} GB the experts to replay"
    if "KV cache" in fullest.phases.get("rollout", {}):
        yield f"  the KV cache has room for {fullest.kv_rows} sequence(s) of {_longest(found)} tokens in each replica"


def _passed(found: Resolved) -> Iterator[str]:
    """What Megatron's own fields change that the figures above do not know."""
    yield from forced(found.config, found.arch, found.grid)
    if names := not_counted(found.config):
        yield f"not counted: {', '.join(names)}"


def _longest(found: Resolved) -> int:
    return found.config.rollout.prompt_length + found.config.rollout.response_length


def _times(found: Resolved, hardware: Hardware, refit: RefitPrediction, kv_rows: int) -> Iterator[str]:
    times = predict_durations(found, hardware, kv_rows)
    yield "a step, s, if every response has its full length, at assumed parts of the peak rates (--hardware)"
    rows = [] if found.algorithm.supervised else [("refit", refit.seconds, "links and memory at their peak")]
    if times.decode_steps:
        part = f"{hardware.decode_frac:.0%} of memory and FLOP rate"
        note = f"{times.decode_steps:,} passes, bound by {times.bound_by}; {part}"
        rows += [("rollout, prompts", times.prefill, f"{hardware.prefill_flops_frac:.0%} of {_rate(hardware)}")]
        rows += [("rollout, responses", times.decode, note)]
    if times.score:
        rows += [("score", times.score, f"{hardware.train_flops_frac:.0%} of {_rate(hardware)}")]
    bubble = f", {times.bubble_frac:.0%} pipeline bubble" if times.bubble_frac else ""
    rows += [("update", times.update, f"{hardware.train_flops_frac:.0%} of {_rate(hardware)}{bubble}")]
    rows += [("all of it", sum(seconds for _, seconds, _ in rows), "")]
    for name, seconds, note in rows:
        yield f"  {name:<24} {seconds:12.4f}  {note}".rstrip()


def _rate(hardware: Hardware) -> str:
    return f"{hardware.bf16_flops / 1e12:.0f} TFLOP/s"


def _refit(refit: RefitPrediction) -> Iterator[str]:
    total = refit.traffic.total
    moved = total.intra_node + total.inter_node
    yield "refit, each time the weights change (bytes over all ranks)"
    yield f"  copied inside ranks      {total.local / GB:12.3f} GB"
    yield f"  sent inside nodes        {total.intra_node / GB:12.3f} GB"
    yield f"  sent between nodes       {total.inter_node / GB:12.3f} GB"
    yield f"  a gather of full tensors {refit.traffic.full_gather_bytes / GB:12.3f} GB" + (
        f", {refit.traffic.full_gather_bytes / moved:.1f} times what is sent" if moved else ""
    )
    yield f"  sent to a rank           {refit.received_bytes / GB:12.3f} GB at most"
    yield f"  staging of a rank        {refit.staging_bytes / GB:12.3f} GB at most"
    yield (
        f"  predicted time           {refit.seconds:12.4f} s from peak figures; bound {refit.bound_s:.4f} s, "
        f"full gather {refit.full_gather_s:.4f} s"
    )


def predict_refit(config: Config, arch: ArchSpec, grid: Grid, hardware: Hardware) -> RefitPrediction:
    """The bytes and seconds of a refit."""
    few, places, times = one_layer_of_each(arch, grid) if grid.rollout_pp == 1 else (arch, grid, {})
    sources = megatron_layouts(few, places, dtype=config.model.dtype, te=True)
    found = traffic(sources, engine_layouts(config, few, places), hardware.gpus_per_node, times=times)
    each = found.full_gather_bytes / grid.world_size
    gather_rate = (
        hardware.inter_node_bytes_per_s if grid.world_size > hardware.gpus_per_node else hardware.intra_node_bytes_per_s
    )
    received = max(share.intra_node + share.inter_node for share in found.shares)
    return RefitPrediction(
        traffic=found,
        seconds=max(sum(_seconds(share, hardware)) for share in found.shares),
        bound_s=max(max(_seconds(share, hardware)) for share in found.shares),
        full_gather_s=each / gather_rate,
        received_bytes=received,
        staging_bytes=staging_bytes(config, grid, received),
    )


def one_layer_of_each(arch: ArchSpec, grid: Grid) -> tuple[ArchSpec, Grid, dict[str, int]]:
    """A model with one layer in each chunk of each stage, its grid, and how many layers each of its tensors stands for.

    The layers of a chunk are cut and placed alike, so that thousands of ranks take seconds.
    """
    few = replace(arch, num_layers=grid.pp * grid.vpp)
    places = replace(grid, first_stage_layers=None, last_stage_layers=None)
    whole, times = chunk_layers(arch, grid), {}
    for place, layers in chunk_layers(few, places).items():
        for layer in layers:
            for spec in table(arch):
                if spec.place is Place.LAYER:
                    experts = range(arch.moe.num_experts) if arch.moe and spec.kind.is_expert else range(1)
                    for part in parts_of(spec, arch):
                        for expert in experts:
                            times[part.name.format(layer=layer, expert=expert)] = len(whole[place])
    return few, places, times


def _seconds(share: Bytes, hardware: Hardware) -> tuple[float, float, float]:
    """Local copies (read and written), links of the node, links between nodes."""
    return (
        2 * share.local / hardware.memory_bytes_per_s,
        share.intra_node / hardware.intra_node_bytes_per_s,
        share.inter_node / hardware.inter_node_bytes_per_s,
    )
