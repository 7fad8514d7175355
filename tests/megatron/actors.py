"""Actors on real ranks for the tests of this folder: small models, ragged batches, updates; runs inside `run_ranks`."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algorithms.base import build
from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.config.config import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    MegatronConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
)
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.actor import Actor
from mrl.megatron.critic import Critic
from mrl.megatron.trainable_model import TrainableModel
from mrl.models.base import ArchSpec, critic_of
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.layout import Layout
from mrl.resharding.lora import first_expert
from mrl.resharding.random_init import random_init
from mrl.types import RolloutBatch
from tests.layouts import groups_of
from tests.ranks import bytes_of, tensor_of

AnyModel = TypeVar("AnyModel", bound=TrainableModel)
VOCAB = 101  # prime: tensor parallelism pads it
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
ARCHS = {
    "qwen2": arch_from_preset("qwen2_tiny", {}, VOCAB),
    "llama": arch_from_preset("llama_tiny", {}, VOCAB),
    "qwen3": arch_from_preset("qwen3_tiny", {}, VOCAB),
    "qwen3_windows": arch_from_preset("qwen3_tiny", WINDOWS, VOCAB),
    "gemma3_text": arch_from_preset("gemma3_text_tiny", {"sliding_window": 9}, VOCAB),
    "qwen2_untied": arch_from_preset("qwen2_tiny", {"tie_word_embeddings": False, "num_key_value_heads": 1}, VOCAB),
}
MIXTURES = {
    "qwen3_moe": arch_from_preset("qwen3_moe_tiny", {}, VOCAB),
    "qwen2_moe": arch_from_preset("qwen2_moe_tiny", {}, VOCAB),
    "mixtral": arch_from_preset("mixtral_tiny", {}, VOCAB),
    "gpt_oss": arch_from_preset("gpt_oss_tiny", {}, VOCAB),
    "deepseek_v3": arch_from_preset("deepseek_v3_tiny", {}, VOCAB),
    "deepseek_v2": arch_from_preset("deepseek_v2_tiny", {}, VOCAB),
    "glm4_moe": arch_from_preset("glm4_moe_tiny", {"use_qk_norm": True, "n_group": 2, "topk_group": 2}, VOCAB),
}
SHALLOW_MIXTURE = replace(MIXTURES["qwen2_moe"], num_layers=2)
BIASED_MIXTURE = MIXTURES["glm4_moe"]
"""Dense in the first layer, and with a bias where experts are selected."""
SINKS_MIXTURE = replace(MIXTURES["gpt_oss"], num_layers=2, windowed_layers=(0,))
"""With attention sinks, and biases of router and experts."""
LINEAR = arch_from_preset("qwen3_5_text_tiny", {"num_hidden_layers": 2}, VOCAB)
"""Linear attention in the first of two layers."""
HALF_DENSE_MIXTURE = arch_from_preset("glm4_moe_tiny", {"first_k_dense_replace": 2}, VOCAB)
"""The first of two pipeline stages has no experts."""
LAYOUTS = {
    "single": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp=2),
    "pp2": ParallelLayout(2, pp=2),
    "pp2_vpp2": ParallelLayout(2, pp=2, vpp=2),
    "dp2": ParallelLayout(2),
    "tp2_pp2": ParallelLayout(4, tp=2, pp=2),
}
CONTEXT_LAYOUTS = {
    "cp2": ParallelLayout(2, cp=2),
    "cp4": ParallelLayout(4, cp=4),
    "cp2_tp2": ParallelLayout(4, tp=2, cp=2),
    "cp2_pp2": ParallelLayout(4, pp=2, cp=2),
    "cp2_dp2": ParallelLayout(4, cp=2),
}
EXPERT_LAYOUTS = {
    "ep2": ParallelLayout(2, ep=2),
    "tp2": ParallelLayout(2, tp=2),
    "tp2_ep2": ParallelLayout(2, tp=2, ep=2, etp=1),
    "ep4": ParallelLayout(4, ep=4),
    "ep2_dp2": ParallelLayout(4, ep=2),
    "tp2_ep2_etp2": ParallelLayout(4, tp=2, ep=2),
    "ep2_pp2": ParallelLayout(4, pp=2, ep=2),
    "tp2_ep2_pp2": ParallelLayout(4, tp=2, pp=2, ep=2, etp=1),
    "ep2_pp2_vpp2": ParallelLayout(4, pp=2, vpp=2, ep=2),
    "cp2_ep2": ParallelLayout(2, cp=2, ep=2),
}
SEED = 11
PEAK = 1e-3
CONSTANT = LearningRate(PEAK, 0.0, "constant", 0, 100)


def config_for(
    grid: ParallelLayout,
    *,
    parallel: dict | None = None,
    actor: dict | None = None,
    rollout: dict | None = None,
    megatron: dict | None = None,
    dtype: str = "float32",
) -> Config:
    return Config(
        megatron=MegatronConfig(**(megatron or {})),
        model=ModelConfig(dtype=dtype),
        parallel=replace(_parallel(grid), **(parallel or {})),
        actor=ActorConfig(**{"max_tokens_per_microbatch": 64, "logprob_chunk_tokens": 16, **(actor or {})}),
        rollout=RolloutConfig(**(rollout or {})),
    )


def _parallel(grid: ParallelLayout) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp if grid.vpp > 1 else None,
        sequence_parallel=grid.tp > 1,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
        num_layers_in_first_pipeline_stage=grid.first_stage_layers,
        num_layers_in_last_pipeline_stage=grid.last_stage_layers,
    )


def make_policy(
    arch: ArchSpec, grid: ParallelLayout, *, seed: int | None = SEED, groups: ProcessGroups | None = None, **options
) -> Actor:
    """Collective over the job: an actor with random weights, norms and biases too; seed None leaves them NaN.

    Groups are those of any actor before at this layout; give `groups` to have two actors at a time.
    """
    groups = groups or groups_of(grid)
    return _filled(Actor(config_for(grid, **options), arch, groups, torch.device("cpu")), seed)


def _filled(policy: AnyModel, seed: int | None) -> AnyModel:
    if seed is not None:
        tensors = policy.named_tensors()
        random_init(policy.chunks[0].arch, policy.layout(), tensors, seed)
        for name, tensor in tensors.items():
            if "norm" in name:  # constants would hide a norm that is not applied, or not trained
                tensor.add_(torch.linspace(-0.3, 0.3, tensor.numel()))
            elif tensor.dim() == 2:
                tensor.mul_(5)  # far from uniform
    return policy


def make_critic(
    arch: ArchSpec, grid: ParallelLayout, *, seed: int | None = SEED, groups: ProcessGroups | None = None, **options
) -> Critic:
    """Collective over the job: as `make_policy`, a critic with the layers of a model."""
    groups = groups or groups_of(grid)
    return _filled(Critic(config_for(grid, **options), critic_of(arch), groups, torch.device("cpu")), seed)


def make_batch(num: int = 14, *, seed: int = 3, vocab: int = VOCAB, longest: int = 9) -> RolloutBatch:
    """Ragged sequences, two of each prompt, the weights of their tokens as of a mean over all of them."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, longest, (num,), generator=generator)
    prompts[1::2] = prompts[: num - num % 2 : 2]
    responses = torch.randint(1, longest, (num,), generator=generator)
    total = int(responses.sum())
    mask = torch.rand(total, generator=generator) > 0.1
    weights = mask.float() / mask.sum()
    tokens = torch.randint(0, vocab, (int((prompts + responses).sum()),), generator=generator)
    starts = (prompts + responses).cumsum(0) - prompts - responses
    for row in range(1, num, 2):
        first, second, length = int(starts[row - 1]), int(starts[row]), int(prompts[row])
        tokens[second : second + length] = tokens[first : first + length]
    return RolloutBatch(
        tokens_P=tokens,
        prompt_lens_B=prompts,
        response_lens_B=responses,
        response_mask_R=mask,
        rollout_logprobs_R=-4 - torch.rand(total, generator=generator),
        group_id_B=torch.arange(num) // 2,
        rewards_B=torch.zeros(num),
        advantages_R=torch.randn(total, generator=generator),
        weights_R=weights,
        metric_weights_R=weights.clone(),
    )


def own_part(batch: RolloutBatch, policy: Actor) -> RolloutBatch:
    """The sequences of this data-parallel rank, dealt unevenly; the weights stay those of the whole batch."""
    coords, size = policy._groups.coords, policy._groups.grid.dp
    if size == 1:
        return batch
    cuts = [0, batch.num_sequences // 4]
    for left in range(size - 1, 0, -1):
        cuts.append(cuts[-1] + -(-(batch.num_sequences - cuts[-1]) // left))
    return batch.select(list(range(cuts[coords.dp], cuts[coords.dp + 1])))


def algorithm():
    """GRPO with every term of the loss that depends on the model: ratio, entropy."""
    return build(AlgorithmConfig(name="grpo", entropy_coef=0.01), RolloutConfig(n=2))


def train(policy: Actor, steps: int, *, first: int = 0, rate: LearningRate = CONSTANT) -> list[dict[str, float]]:
    """Collective over the job: `steps` updates on batches `first`, `first` + 1, ..."""
    if policy.optimizer is None:
        policy.start_optimizer(rate)
    return [
        policy.update(own_part(make_batch(seed=100 + step), policy), algorithm())
        for step in range(first, first + steps)
    ]


def adam_steps(policy: Actor) -> list[Any]:
    """How often Adam has stepped: torch's holds it for each parameter, TransformerEngine's for each group of them."""
    adams = [part.optimizer for part in policy.optimizer.chained_optimizers]
    adams = [adam for each in adams for adam in getattr(each, "sub_optimizers", [each])]  # Megatron's hybrid has many
    return [
        holder["step"]
        for adam in adams
        for holder in (adam.state.values() if isinstance(adam, torch.optim.Adam) else adam.param_groups)
    ]


def scores(policy: Actor, batch: RolloutBatch) -> Tensor:
    """Collective over the job: log-probabilities and entropy [2, R] of a batch that every rank has whole."""
    return torch.stack(policy.score(batch))


def full_weights(policy: Actor) -> dict[str, Tensor]:
    """Collective over the job: the model in Hugging Face coordinates; replicas must agree bit for bit."""
    return _whole(policy.layout(), policy.named_tensors())


def full_gradients(policy: Actor) -> dict[str, Tensor]:
    """Collective over the job: what the last backward left, as `full_weights`; not with the distributed optimizer."""
    parameters = ((index, *item) for index, chunk in enumerate(policy.chunks) for item in chunk.named_parameters())
    gradients = {f"chunk{index}.{name}": parameter.main_grad for index, name, parameter in parameters}
    return _whole({name: stored for name, stored in policy.layout().items() if name in gradients}, gradients)


def full_adapters(policy: Actor, *, gradients: bool = False) -> dict[str, Tensor]:
    """Collective over the job: the low-rank adapters, or their gradients, by PEFT's names; replicas must agree."""
    parameters = policy.adapters.named_parameters()
    tensors = {name: each.main_grad if gradients else each.detach() for name, each in parameters.items()}
    return _whole(policy.adapters.layout(), tensors)


def fill_adapters(policy: Actor, size: float = 0.1) -> None:
    """Random adapters, the same ones at each layout; large, so that their absence cannot go unnoticed."""
    tensors = policy.trained_tensors()
    for name, stored in policy.adapters.layout().items():
        tensors[name].zero_()
        for piece in stored.pieces:
            extents = [max(stop, 300) for _, stop in piece.src]  # more than any matrix has
            named = first_expert(piece.hf_name) if policy.adapters.lora.share_expert_adapters else piece.hf_name
            drawn = torch.randn(extents, generator=torch.Generator().manual_seed(zlib.crc32(named.encode())))
            part = drawn[tuple(slice(*bounds) for bounds in piece.src)]
            tensors[name][tuple(slice(*bounds) for bounds in piece.dst)] = size * part
    policy.weights_changed()


def _whole(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    pieces = []
    for name, stored in layout.items():
        for piece in stored.pieces:
            part = tensors[name][tuple(slice(*bounds) for bounds in piece.dst)]
            pieces.append((piece.hf_name, piece.src, str(part.dtype).removeprefix("torch."), bytes_of(part)))
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, pieces)  # bytes: pickled tensors would take most of the time
    whole: dict[str, Tensor] = {}
    for hf_name, src, dtype, data in (item for rank in found for item in rank):
        shape = [stop for _, stop in src]
        part = tensor_of(data, getattr(torch, dtype), [stop - start for start, stop in src])
        old = whole.get(hf_name, torch.empty([0] * len(shape)))
        size = [max(a, b) for a, b in zip(old.shape, shape, strict=True)]
        new = torch.full(size, torch.nan, dtype=torch.promote_types(torch.float32, part.dtype))
        new[tuple(slice(0, n) for n in old.shape)] = old
        there = new[tuple(slice(*bounds) for bounds in src)]
        same = torch.isnan(there) | (there == part)
        if not bool(same.all()):
            raise AssertionError(f"replicas of {hf_name} differ")
        new[tuple(slice(*bounds) for bounds in src)] = part
        whole[hf_name] = new
    return whole
