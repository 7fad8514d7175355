"""Checks of an engine in a started job; each returns its facts or raises CheckError.

They are collective over the job's ranks, and do not depend on the engine except through `engines/trtllm/inspection.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import Tensor

from acceptance import behaviour, comparisons, fp8
from acceptance.fixture import Bench, opened
from acceptance.result import CheckError, Facts, NotHereError
from mrl.checkpoint.formats.hf import HfSource
from mrl.distributed import launch
from mrl.engines._capabilities import memory_plan
from mrl.engines.trtllm import inspection
from mrl.errors import UserError
from mrl.resharding.checksum import bit_sum
from mrl.resharding.dtypes import DTYPES
from mrl.resharding.native import native_layout
from mrl.resharding.regions import slices
from mrl.trainer import weight_sync_check
from mrl.types import Rollout

__all__ = ["FUNCTIONS", "opened"]
GIB = 1 << 30
FREED = 0.9
"""Fraction of the weights' bytes that sleeping must free; allocators round."""

ALLOWED = 0.9
"""Fraction of the free memory that the trainer must be able to allocate while the engine sleeps."""


def device(bench: Bench) -> Facts:
    """Checks the device of the engine and the current device of this process."""
    trainer = bench.trainer
    facts: Facts = {"rank's device": str(trainer.device), "process": os.getpid()}
    if trainer.device.type == "cuda":
        current = torch.cuda.current_device()
        mine = str(torch.cuda.get_device_properties(trainer.device).uuid)
        uuids = [""] * dist.get_world_size()
        dist.all_gather_object(uuids, mine)
        facts |= {"name": launch.device_name(trainer.device), "current": current, "uuids of ranks": uuids}
        if current != trainer.device.index:
            raise CheckError(
                f"the engine's start left cuda:{current} as the current device instead of {trainer.device}"
            )
        if len(set(uuids)) != len(uuids):
            raise CheckError(f"ranks share a GPU: {uuids}")
    if inspection.is_llm(trainer.rollout_worker.engine):
        facts["features"] = inspection.features(trainer.rollout_worker.engine)
        facts["parameters on"] = found = inspection.devices(trainer.rollout_worker.engine)
        if found and found != [str(trainer.device)]:
            raise CheckError(f"the engine's parameters are on {found} instead of {trainer.device}")
    return facts


def refit(bench: Bench) -> Facts:
    """Syncs the same weights, others, and the first again."""
    first, facts = comparisons.check_weight_syncs(bench)
    _keep(bench, first)
    return facts


def qkv(bench: Bench) -> Facts:
    """Compares the first and the last layer's fused matrix with the model's files."""
    trainer = bench.trainer
    if not inspection.is_llm(trainer.rollout_worker.engine):
        raise NotHereError("only the LLM API's model can be inspected; 'refit' and 'logprobs' cover it")
    bench.refit()
    rollout, grid = trainer.config.rollout, trainer.groups.grid
    dtype = rollout.dtype or trainer.config.model.dtype
    layout = native_layout(trainer.arch, grid.rollout_tp, grid.rollout_tp_rank(trainer.groups.rank), dtype)
    facts: Facts = {}
    with HfSource(trainer.config.model.path or "") as source:
        for layer in (0, trainer.arch.num_layers - 1):
            stored = layout[f"layers.{layer}.qkv"]
            expected = torch.zeros(stored.shape, dtype=DTYPES[dtype])
            for piece in stored.pieces:
                expected[slices(piece.dst)] = source.read(piece.hf_name, piece.src).to(expected.dtype)
            facts |= _same(f"layer {layer}", inspection.fused_qkv(trainer.rollout_worker.engine, layer), expected)
    return facts


def _same(what: str, found: Tensor | None, expected: Tensor) -> Facts:
    if found is None:
        raise CheckError(f"{what}: the model has no parameter 'self_attn.qkv_proj.weight'; was it renamed?")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise CheckError(f"{what}: {list(found.shape)} {found.dtype}, expected {list(expected.shape)} {expected.dtype}")
    found = found.cpu()
    sums = f"checksum {bit_sum(found):016x}, of the files {bit_sum(expected):016x}"
    if bit_sum(found) != bit_sum(expected):
        wrong = int((found != expected).sum())
        raise CheckError(f"{what}: {sums}; {wrong} of {expected.numel()} elements differ")
    if not torch.equal(found, expected):
        raise CheckError(f"{what}: {sums}, but the rows are in another order")
    return {what: sums}


def sleep(bench: Bench) -> Facts:
    """Compares memory and responses: awake, after sleeping alone, and after an update with a weight sync."""
    trainer = bench.trainer
    bench.refit()
    trainer.actor.offload()
    trainer.rollout_worker.engine.wake()
    rollout = trainer.config.rollout
    first = weight_sync_check.sample_responses(trainer.rollout_worker.engine.generate, trainer.arch, rollout)
    awake = bench.used()
    trainer.rollout_worker.engine.sleep()
    trainer.rollout_worker.engine.wake()
    moved = weight_sync_check.compare(
        first, weight_sync_check.sample_responses(trainer.rollout_worker.engine.generate, trainer.arch, rollout)
    )
    trainer.rollout_worker.engine.sleep()
    trainer.rollout_worker.release_engine()
    asleep = bench.used()
    allowed = _allowed(trainer.device)
    reserved = torch.cuda.memory_reserved(trainer.device) if trainer.device.type == "cuda" else 0
    bench.refit()
    trainer.actor.offload()
    trainer.rollout_worker.engine.wake()
    rested = weight_sync_check.compare(
        first, weight_sync_check.sample_responses(trainer.rollout_worker.engine.generate, trainer.arch, rollout)
    )
    again = bench.used()
    trainer.rollout_worker.engine.sleep()
    freed = awake - asleep
    weights = memory_plan(trainer.config).weight_bytes(trainer.config, trainer.arch, trainer.groups.grid)
    facts: Facts = {"answers": str(moved), "answers after rest and refit": str(rested)}
    if trainer.device.type == "cuda":
        facts |= {
            "GiB in use awake": awake / GIB,
            "GiB freed by sleeping": freed / GIB,
            "GiB in use after waking": again / GIB,
            "GiB of the weights": weights / GIB,
            "GiB that the trainer could allocate meanwhile": allowed / GIB,
            "GiB that stay, the trainer's tensors aside": (asleep - reserved) / GIB,
        }
    else:
        facts["memory"] = "a CPU: nothing to measure"
    if not moved.within(bench.tolerance):
        raise CheckError(f"the responses changed after sleeping and waking: {moved}", facts)
    if not rested.within(bench.tolerance):
        raise CheckError(f"the responses changed after a release and a weight sync: {rested}", facts)
    if trainer.device.type == "cuda" and allowed < ALLOWED * freed:
        raise CheckError(
            f"the trainer could allocate only {allowed / GIB:.3f} GiB while the engine slept, although it freed "
            f"{freed / GIB:.3f} GiB; is torch's allocator capped?",
            facts,
        )
    if trainer.device.type == "cuda" and freed < (
        FREED * weights if inspection.is_llm(trainer.rollout_worker.engine) else 1
    ):
        raise CheckError(f"sleeping freed {freed / GIB:.3f} GiB; the weights take {weights / GIB:.3f}", facts)
    return facts


def _allowed(device: torch.device) -> int:
    """Returns the bytes that torch can allocate out of nearly all free memory; 0 if it fails, or on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    try:
        held = torch.empty(int(ALLOWED * free), dtype=torch.uint8, device=device)
    except torch.cuda.OutOfMemoryError:
        return 0
    size = held.numel()
    del held
    torch.cuda.empty_cache()
    return size


def logprobs(bench: Bench) -> Facts:
    """Scores samples under the session's settings by the actor."""
    bench.refit()
    rollouts = comparisons.sample(bench)
    apart = (comparisons.actor_logprobs(bench, rollouts) - comparisons.engine_logprobs(rollouts)).abs()
    facts, mean = comparisons.difference_facts(bench, apart), float(apart.mean())
    if not mean <= comparisons.MEAN_NATS:
        raise CheckError(
            f"engine and actor differ by {mean:.3g} nats on average over {apart.numel()} tokens (largest "
            f"{float(apart.max()):.3g}); expected a mean of at most {comparisons.MEAN_NATS:g}; "
            f"{facts.get('probe', '')}",
            facts,
        )
    return facts


def experts(bench: Bench) -> Facts:
    """Scores samples with the experts that the engine returned, and with those of the previous token for comparison."""
    bench.refit()
    rollouts = comparisons.sample(bench)
    reported = comparisons.engine_logprobs(rollouts)
    apart = (comparisons.actor_logprobs(bench, rollouts) - reported).abs()
    for number, each in enumerate(rollouts):
        if each.routed_experts is None:
            raise CheckError(f"the engine returned no experts for sample {number}")
        each.routed_experts[1:-1] = each.routed_experts[:-2].clone()
    elsewhere = float((comparisons.actor_logprobs(bench, rollouts) - reported).abs().mean())
    facts = comparisons.difference_facts(bench, apart) | {
        "mean difference by experts of another token, nats": elsewhere
    }
    mean = float(apart.mean())
    if not (mean <= comparisons.MEAN_NATS and mean < elsewhere):
        raise CheckError(
            f"with the returned experts engine and actor differ by {mean:.3g} nats on average, expected at most "
            f"{comparisons.MEAN_NATS:g}; with those of the previous token by {elsewhere:.3g}",
            facts,
        )
    return facts


def contract(bench: Bench) -> Facts:
    """Scores samples under temperature and truncation, where raw log-probabilities would differ."""
    rollout = bench.trainer.config.rollout
    asked: Facts = {"temperature": rollout.temperature, "top_p": rollout.top_p}
    try:
        return asked | logprobs(bench)
    except UserError as error:
        raise NotHereError(f"rejected, since exact log-probabilities are not available: {error}") from error


def graphs(bench: Bench) -> Facts:
    """Compares responses with CUDA graphs with those without, also after weight syncs."""
    if bench.trainer.device.type != "cuda" and not inspection.is_llm(bench.trainer.rollout_worker.engine):
        raise NotHereError("a CPU has no CUDA graphs")
    file = bench.folder / "answers.json"
    if not file.is_file():
        raise NotHereError("no responses without graphs to compare with: 'refit' did not run, or failed")
    bench.refit()
    first = bench.greedy_responses()
    with bench.other_weights():
        bench.refit()
        bench.greedy_responses()  # captures graphs if that has not happened yet
    bench.trainer.rollout_worker.release_engine()
    bench.refit()
    eager = [replace(one, **kept) for one, kept in zip(first, json.loads(file.read_text()), strict=True)]
    facts: Facts = {}
    for what, other in (("without graphs", eager), ("after two refits", bench.greedy_responses())):
        moved = weight_sync_check.compare(first, other)
        facts[what] = str(moved)
        if not moved.within(bench.tolerance):
            raise CheckError(f"the responses with graphs and those {what} differ: {moved}", facts)
    return facts | {"tolerance, nats": bench.tolerance}


def graphs_asleep(bench: Bench) -> Facts:
    """Does the same with a sleeping engine, if its graphs survive sleep."""
    engine = bench.trainer.rollout_worker.engine
    if (without := inspection.without_graphs(engine)) is not None:
        raise NotHereError(without)
    return graphs(bench)


FUNCTIONS: dict[str, Callable[[Bench], Facts]] = {
    "device": device,
    "refit": refit,
    "qkv": qkv,
    "sleep": sleep,
    "pause": behaviour.pause,
    "ends": behaviour.ends,
    "seeds": behaviour.seeds,
    "logprobs": logprobs,
    "contract": contract,
    "experts": experts,
    "graphs": graphs,
    "fp8": fp8.fp8,
    "graphs_asleep": graphs_asleep,
}


def _keep(bench: Bench, rollouts: Sequence[Rollout]) -> None:
    """Saves the responses of rank 0's replica for another session."""
    if bench.trainer.groups.rank == 0:
        kept = [{key: asdict(each)[key] for key in ("response_ids", "rollout_logprobs")} for each in rollouts]
        (bench.folder / "answers.json").write_text(json.dumps(kept))
