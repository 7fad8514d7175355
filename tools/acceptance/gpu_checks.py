"""Checks of a GPU in a started job: the actor compared with transformers and Megatron-Core, memory, links between GPUs.

Comparisons of engine and actor are those of TensorRT-LLM in `checks.py`; checks that run commands are in
`gpu_commands.py`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from bench.measure import best_time, matrix_rate, memory_bandwidth, seconds, synchronize
from bench.megatron_baseline import PlainMegatron, fitting_rows
from torch import Tensor

from acceptance import checks, gpu_commands
from acceptance import fixture as of_engine
from acceptance.checks import GIB
from acceptance.fixture import Bench
from acceptance.gpu_table import CHECKS, COMMANDS
from acceptance.result import CheckError, Facts, NotHereError, Spec
from mrl.algorithms.base import build, required
from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.commands.plan.memory import stage_memory
from mrl.config.config import AlgorithmConfig, load
from mrl.distributed import launch
from mrl.megatron.offload import PARTS
from mrl.models import transformer_engine
from mrl.observability.hardware import HARDWARE
from mrl.observability.metrics import forward_flops, mfu_metrics
from mrl.resharding.checksum import bit_sum
from mrl.resharding.dtypes import DTYPES
from mrl.trainer import weight_sync_check
from mrl.trainer.learning_rate import learning_rate
from mrl.types import RolloutBatch

EXACT = 1e-4
"""Tolerance in nats, and relative for loss and gradient: fp32 sums in another order."""

OF_PEER = 2.0
"""Tolerance in bfloat16, as a multiple of the distance of transformers' own bfloat16 from fp32, because the actor's
kernels round at other places.
"""

GRADIENT = 0.02
"""Additional relative tolerance of the gradient norm in bfloat16: 8 bits in each factor, averaged over the norm."""

CYCLES = 5
LOST = 0.02
"""Fraction of the memory reserved after the second cycle that may be lost by the last one; allocators round."""

FREED = 0.98
"""Fraction of the actor's bytes, computed from shapes, that offloading must free."""

HOST_MORE = 1.1
"""Allowed host memory of offloading, relative to the bytes that it stores."""

SLOWEST = 0.8
"""Minimum speed relative to plain Megatron-Core."""

LINK_BYTES = 256 << 20
NUM_SEQUENCES = 12
SAMPLES = 4
"""Samples per prompt."""


@contextmanager
def opened(spec: Spec) -> Iterator[Bench | gpu_commands.Commands]:
    """Creates the fixture of a session's checks: a job (collective), or a runner of commands."""
    if all(CHECKS[name].session == COMMANDS for name in spec.checks):
        yield gpu_commands.Commands(spec)
    else:
        experts = any(CHECKS[name].model == "experts" for name in spec.checks)
        with of_engine.opened(for_this_machine(spec) if experts else spec) as bench:
            yield bench


def for_this_machine(spec: Spec) -> Spec:
    """Selects Megatron's local layers for a MoE session without TransformerEngine, unless the user chose layers."""
    config = load(spec.config, spec.overrides)
    unusable = transformer_engine.why_unusable(launch.choose_device(config.run.device))
    if config.actor.transformer_impl != "auto" or unusable is None:
        return spec
    return replace(spec, overrides=[*spec.overrides, "actor.transformer_impl=local"])


# the actor


def parity(bench: Bench) -> Facts:
    """Compares log-probabilities, loss and gradient norm with transformers in fp32.

    In bfloat16 the actor may be about as far from fp32 as transformers' own bfloat16 is.
    """
    trainer = bench.trainer
    return _against_transformers(
        bench, random_batch(trainer.arch.vocab_size, NUM_SEQUENCES, trainer.config.rollout.max_sequence_length)
    )


def parity_local(bench: Bench) -> Facts:
    """Compares Megatron's local layers with transformers, if `parity` used TransformerEngine's."""
    if (why := transformer_engine.why_unusable(bench.trainer.device.type)) is not None:
        raise NotHereError(f"'parity' already uses Megatron's local layers: {why}")
    return parity(bench)


def shared(bench: Bench) -> Facts:
    """Compares samples with shared prompts computed once with transformers, and with separately computed prompts."""
    trainer = bench.trainer
    if not trainer.actor.share_prefixes:
        raise NotHereError("TransformerEngine's attention does not support shared tokens here")
    longest = trainer.config.rollout.max_sequence_length
    batch = samples_of_prompts(trainer.arch.vocab_size, NUM_SEQUENCES, prompt=4 * longest // 5, answer=longest // 5)
    facts = _against_transformers(bench, batch)
    once, _ = trainer.actor.score(batch)
    once_s = best_time(lambda: trainer.actor.score(batch), trainer.device, 3)
    trainer.actor.share_prefixes = False
    alone, _ = trainer.actor.score(batch)
    alone_s = best_time(lambda: trainer.actor.score(batch), trainer.device, 3)
    trainer.actor.share_prefixes = True
    facts |= {"time of each alone, over that of all": alone_s / once_s, "apart, nats": _mean_difference(once, alone)}
    own = facts.get(f"transformers' {trainer.config.model.dtype}, log-probabilities")
    bound = OF_PEER * (own if isinstance(own, float) else 0.0) + EXACT
    if _mean_difference(once, alone) > bound:
        raise CheckError(
            f"scores with shared and separate prompts differ by {_mean_difference(once, alone):.3g}; "
            f"at most {bound:.3g} allowed",
            facts,
        )
    return facts


def _against_transformers(bench: Bench, batch: RolloutBatch) -> Facts:
    """Compares the actor with transformers on these sequences; see `parity`."""
    trainer = bench.trainer
    own = batch if trainer.groups.coords.dp == 0 else batch.select([])
    scored, _ = trainer.actor.score(own)
    trainer.actor.start_optimizer(learning_rate(trainer.config))
    algorithm = build(AlgorithmConfig(name="sft"), trainer.config.rollout)
    metrics = trainer.actor.update(own, algorithm)
    folder, low = trainer.config.model.path or "", DTYPES[trainer.config.model.dtype]
    exact, loss, norm = by_transformers(folder, torch.float32, batch, trainer.device)
    facts: Facts = {"layers": _layers(bench), "dtype": trainer.config.model.dtype, "tokens": exact.numel()}
    facts |= {"loss": loss, "gradient norm": norm}
    bounds = {"log-probabilities": EXACT, "loss": EXACT, "gradient": EXACT}
    if low != torch.float32:
        near, near_loss, near_norm = by_transformers(folder, low, batch, trainer.device)
        peer = _mean_difference(near, exact), abs(near_loss / loss - 1), abs(near_norm / norm - 1)
        facts |= {
            f"transformers' {trainer.config.model.dtype}, {name}": each for name, each in zip(bounds, peer, strict=True)
        }
        bounds = {
            "log-probabilities": OF_PEER * peer[0] + EXACT,
            "loss": OF_PEER * peer[1] + peer[0] / abs(loss) + EXACT,
            "gradient": OF_PEER * peer[2] + GRADIENT,
        }
    found = {
        "log-probabilities": _mean_difference(scored, exact) if own is batch else 0.0,
        "loss": abs(metrics["actor/nll"] / loss - 1),
        "gradient": abs(metrics["actor/grad_norm"] / norm - 1),
    }
    facts |= {f"actor, {name}": each for name, each in found.items()}
    for name, each in found.items():
        if not each <= bounds[name]:
            raise CheckError(
                f"{name}: {each:.3g} from transformers in fp32, expected at most {bounds[name]:.3g}", facts
            )
    return facts


def _layers(bench: Bench) -> str:
    return "TransformerEngine's" if bench.trainer.actor.uses_te else "Megatron's local ones"


def _mean_difference(found: Tensor, expected: Tensor) -> float:
    """Returns the mean absolute difference, nats."""
    return float((found - expected).abs().mean())


def random_batch(vocabulary: int, num: int, longest: int, *, ragged: bool = True) -> RolloutBatch:
    """Returns sequences of random tokens, all trained with the same weight."""
    generator = torch.Generator().manual_seed(0)
    lens = torch.full((num,), longest)
    if ragged:
        lens = torch.randint(4, longest + 1, (num,), generator=generator)
    prompts = lens // 3 if ragged else torch.ones_like(lens)
    count = int((lens - prompts).sum())
    weights = torch.full((count,), 1 / count)
    return RolloutBatch(
        tokens_P=torch.randint(0, vocabulary, (int(lens.sum()),), generator=generator),
        prompt_lens_B=prompts,
        response_lens_B=lens - prompts,
        response_mask_R=torch.ones(count, dtype=torch.bool),
        rollout_logprobs_R=torch.zeros(count),
        group_id_B=torch.arange(num),
        rewards_B=torch.zeros(num),
        advantages_R=torch.ones(count),
        weights_R=weights,
        metric_weights_R=weights.clone(),
    )


def samples_of_prompts(vocabulary: int, num: int, *, prompt: int, answer: int) -> RolloutBatch:
    """Returns random sequences of which each `SAMPLES` share a prompt; each response token has the same weight."""
    batch = random_batch(vocabulary, num, prompt + answer, ragged=False)
    tokens_BT = batch.tokens_P.view(num, -1)
    tokens_BT[:, :prompt] = tokens_BT[::SAMPLES, :prompt].repeat_interleave(SAMPLES, 0)[:num]
    weights = torch.full((num * answer,), 1 / (num * answer))
    return replace(
        batch,
        prompt_lens_B=torch.full((num,), prompt),
        response_lens_B=torch.full((num,), answer),
        response_mask_R=torch.ones(num * answer, dtype=torch.bool),
        rollout_logprobs_R=torch.zeros(num * answer),
        group_id_B=torch.arange(num) // SAMPLES,
        advantages_R=torch.ones(num * answer),
        weights_R=weights,
        metric_weights_R=weights.clone(),
    )


def by_transformers(
    folder: str, dtype: torch.dtype, batch: RolloutBatch, device: torch.device
) -> tuple[Tensor, float, float]:
    """Computes log-probabilities [R] on the CPU, loss and gradient norm by transformers, sequence by sequence."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    rows, loss = [], 0.0
    weights_R = required(batch.weights_R, "weights_R")
    lens = zip(batch.prompt_lens_B.tolist(), batch.response_lens_B.tolist(), strict=True)
    start, answered = 0, 0
    for prompt_len, response_len in lens:
        end, until = start + prompt_len + response_len, answered + response_len
        ids, weights = batch.tokens_P[start:end].to(device), weights_R[answered:until].to(device)
        start, answered = end, until
        logits = model(ids[None]).logits[0, prompt_len - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(1, ids[prompt_len:, None]).squeeze(1)
        part = -(logprobs * weights).sum()
        part.backward()
        loss += float(part.detach())
        rows.append(logprobs.detach().cpu())
    squares = (float(each.grad.float().square().sum()) for each in model.parameters() if each.grad is not None)
    norm = math.sqrt(sum(squares))
    del model
    gc.collect()
    return torch.cat(rows), loss, norm


def update(bench: Bench) -> Facts:
    """Compares tokens per second with plain Megatron-Core on the same batch; records MFU."""
    trainer, config = bench.trainer, bench.trainer.config
    num, length = config.train.batch_size, config.rollout.max_sequence_length
    batch = random_batch(trainer.arch.vocab_size, num, length, ragged=False)
    algorithm = build(AlgorithmConfig(name="sft"), config.rollout)
    trainer.actor.start_optimizer(learning_rate(config))
    own_s = best_time(lambda: trainer.actor.update(batch, algorithm), trainer.device, 3)
    trainer.actor.offload()
    te, dtype = trainer.actor.uses_te, DTYPES[config.model.dtype]
    plain = PlainMegatron(trainer.arch, dtype=dtype, device=trainer.device, te=te)
    tokens_BT, rows = batch.tokens_P.view(num, length), max(1, config.actor.max_tokens_per_microbatch // length)
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
        rows = fitting_rows(trainer.arch, length, rows, torch.cuda.mem_get_info(trainer.device)[0], te=te)
    plain_s = best_time(lambda: plain.update(tokens_BT, rows), trainer.device, 3)
    lens = [length] * num
    rate = 3 * forward_flops(trainer.arch, lens) / own_s
    facts: Facts = {
        "layers": _layers(bench),
        "tokens of a microbatch": config.actor.max_tokens_per_microbatch,
        "tokens of a microbatch of plain Megatron-Core": rows * length,
        "tokens/s": num * length / own_s,
        "tokens/s of plain Megatron-Core": num * length / plain_s,
        "ratio": plain_s / own_s,
        "of the product's rate measured here": rate / matrix_rate(dtype, trainer.device),
    }
    name = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else ""
    facts |= mfu_metrics(trainer.arch, lens, update_s=own_s, num_passes=1, world_size=1, device_name=name)
    if plain_s / own_s < SLOWEST:
        raise CheckError(f"an update reaches {plain_s / own_s:.2f} of plain Megatron-Core's tokens per second", facts)
    return facts


# memory


def offload(bench: Bench) -> Facts:
    """Measures device and host memory over two offloads, and checks that the weights are the same afterwards."""
    trainer, policy = bench.trainer, bench.trainer.actor
    policy.start_optimizer(learning_rate(trainer.config))
    batch = random_batch(trainer.arch.vocab_size, 2, trainer.config.rollout.max_sequence_length)
    policy.update(batch, build(AlgorithmConfig(name="sft"), trainer.config.rollout))
    expected = stage_memory(trainer.config, trainer.arch, trainer.groups.grid)[0]
    before, sums = _allocated(trainer.device), _sum(bench)
    host = psutil.Process().memory_info().rss
    began = time.perf_counter()
    policy.offload()
    synchronize(trainer.device)
    away_s = time.perf_counter() - began
    freed, grown = before - _allocated(trainer.device), psutil.Process().memory_info().rss - host
    back_s = seconds(lambda: policy.onload(*PARTS), trainer.device)
    again = _sum(bench)
    policy.offload()
    twice = psutil.Process().memory_info().rss - host
    held, kept = expected.weights + expected.gradients + expected.optimizer, expected.weights + expected.optimizer
    facts: Facts = {
        "GiB of the actor, by shape": held / GIB,
        "GiB to keep": kept / GIB,
        "away, s": away_s,
        "back, s": back_s,
    }
    if sums != again:
        raise CheckError(f"the restored weights have checksum {again:016x}, the offloaded ones {sums:016x}", facts)
    if trainer.device.type == "cpu":
        return facts | {"memory": "a CPU: nothing to measure"}
    facts |= {"GiB freed": freed / GIB, "GiB of the host": grown / GIB, "GiB of the host, the second time": twice / GIB}
    if freed < FREED * held:
        raise CheckError(f"offloading freed {freed / GIB:.3f} GiB of {held / GIB:.3f}", facts)
    if max(grown, twice) > HOST_MORE * kept:
        raise CheckError(
            f"offloading {kept / GIB:.3f} GiB used {max(grown, twice) / GIB:.3f} GiB of host memory", facts
        )
    return facts


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_allocated(device))


def _sum(bench: Bench) -> int:
    return sum(bit_sum(tensor) for tensor in bench.trainer.actor.named_tensors().values())


def cycles(bench: Bench) -> Facts:
    """Checks memory and responses over cycles of weight sync, sampling, sleep and an update with learning rate 0."""
    trainer, engine = bench.trainer, bench.trainer.rollout_worker.engine
    batch = random_batch(trainer.arch.vocab_size, NUM_SEQUENCES, trainer.config.rollout.max_sequence_length)
    algorithm = build(AlgorithmConfig(name="sft"), trainer.config.rollout)
    trainer.actor.start_optimizer(LearningRate(0.0, 0.0, "constant", 0, CYCLES))  # the weights do not change
    first: list[Any] = []
    asleep, awake, caches, captured = [], [], [], []
    for _ in range(CYCLES):
        bench.refit()
        trainer.actor.offload()
        engine.wake()
        found = weight_sync_check.sample_responses(engine.generate, trainer.arch, trainer.config.rollout)
        first = first or found
        awake.append(bench.used())
        caches.append(engine.stats()["kv_cache_bytes"])
        captured.append(int(engine.stats().get("captured_graphs", 0)))
        engine.sleep()
        trainer.rollout_worker.release_engine()
        trainer.actor.update(batch, algorithm)  # its allocations must not stay in the memory of the cache
        asleep.append(bench.used())
        moved = weight_sync_check.compare(first, found)
        if not moved.within(bench.tolerance):
            raise CheckError(f"the engine's responses changed although the actor's weights did not: {moved}")
    facts: Facts = {"answers": str(moved), "GiB of the cache": max(caches) / GIB, "graphs captured": captured}
    if any(captured[1:]):
        raise CheckError(f"CUDA graphs were captured again after the engine slept: {captured}", facts)
    if trainer.device.type == "cpu":
        return facts | {"memory": "a CPU: nothing to measure"}
    facts |= {
        "GiB in use awake": [round(each / GIB, 3) for each in awake],
        "GiB in use asleep": [round(each / GIB, 3) for each in asleep],
    }
    if asleep[-1] > asleep[1] * (1 + LOST):
        raise CheckError(f"asleep {asleep[-1] / GIB:.3f} GiB are in use, after two cycles {asleep[1] / GIB:.3f}", facts)
    if awake[-1] > awake[1] * (1 + LOST):
        raise CheckError(f"awake {awake[-1] / GIB:.3f} GiB are in use, after two cycles {awake[1] / GIB:.3f}", facts)
    return facts


# between GPUs


def links(device: torch.device) -> Facts:
    """Collective over the job: checks a sum and a message of known values over the device's backend; times them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = torch.full((LINK_BYTES // 4,), float(rank + 1), device=device)
    dist.all_reduce(ones)
    expected = size * (size + 1) / 2
    if not bool((ones == expected).all()):
        raise CheckError(f"the sum over ranks is {float(ones[0])}, expected {expected}")
    sent, got = torch.full_like(ones, float(rank)), torch.empty_like(ones)
    after, before = (rank + 1) % size, (rank - 1) % size

    def around() -> None:
        messages = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    message_s = best_time(around, device)
    if not bool((got == float(before)).all()):
        raise CheckError(f"rank {before} sent {float(before)}, but {float(got[0])} was received")
    reduce_s = best_time(lambda: dist.all_reduce(ones), device)
    facts: Facts = {
        "GB/s of a message, each way": LINK_BYTES / message_s / 1e9,
        "GB/s of a sum": 2 * (size - 1) / size * LINK_BYTES / reduce_s / 1e9,
        "GB/s of a copy within the device": memory_bandwidth(device) / 1e9,
    }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [each for each in HARDWARE.values() if name in each.device_names]
    if known:
        facts["message, of the vendor's figure"] = LINK_BYTES / message_s / known[0].intra_node_bytes_per_s
    return facts


def _experts(bench: Bench) -> Facts:
    """Compares a MoE model with transformers; uses TransformerEngine's grouped GEMMs."""
    if bench.trainer.arch.moe is None:
        raise NotHereError("the given model has no experts")
    return parity(bench)


FUNCTIONS: dict[str, Callable[[Any], Facts]] = {
    **gpu_commands.FUNCTIONS,
    "parity": parity,
    "parity_local": parity_local,
    "shared": shared,
    "experts": _experts,
    "refit": checks.refit,
    "logprobs": checks.logprobs,
    "experts_logprobs": checks.logprobs,
    "contract": checks.contract,
    "graphs": checks.graphs,
    "graphs_asleep": checks.graphs_asleep,
    "cycles": cycles,
    "offload": offload,
    "update": update,
    "links": lambda bench: links(bench.trainer.device),
    "parity_tp2": parity,
    "parity_pp2": parity,
    "parity_ep2": _experts,
    "shared_cp2": shared,
    "logprobs_tp2": checks.logprobs,
}
