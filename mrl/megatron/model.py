"""The GPTModel chunks of an actor or critic on this rank.

Contains the translation of `ArchSpec` to Megatron (transformer config, layer spec, rotary frequencies) and an output
stage that returns log-probabilities or values instead of logits. Weights are not initialised here: parameters are NaN
until `mrl/resharding` has written them, so that a missing load cannot go unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from mrl.algorithms.functional.importance import at_least_fp32
from mrl.algorithms.functional.logprobs import OPERATORS, Distribution, RowKernels, VocabShard, linear_logprobs
from mrl.config.config import ActorConfig, MegatronConfig, ParallelConfig
from mrl.config.megatron_fields.defaults import transformer_defaults
from mrl.config.megatron_fields.fp8 import FIELDS as FP8_FIELDS
from mrl.config.megatron_fields.fp8 import fp8_training
from mrl.megatron.attention import CoreAttention, GatedSelfAttention, PackedSequences, RotatingAttention
from mrl.megatron.config_passthrough import check_te, explain_errors, megatron_values
from mrl.megatron.context_parallel import ContextTargets
from mrl.megatron.cpu.fp8_emulation import check_emulation, emulate_fp8
from mrl.megatron.cpu.layers import CompiledNorm, adds_gradient, compiled_layer, compiles
from mrl.megatron.distillation_targets import DistillationTargets
from mrl.megatron.latent_attention import latent_fields, with_latent_attention
from mrl.megatron.linear_attention import GatedDeltaNet, check_linear_attention
from mrl.megatron.moe import count_grouped_biases, load_balance, moe_config, with_router
from mrl.megatron.norm import PostNorm, RMSNorm
from mrl.megatron.on_policy_layers import BatchInvariantHead, Tables, batch_invariant_layer, engine_rotary_tables
from mrl.megatron.router import BIAS, LoadBalance
from mrl.megatron.te_attention import with_shared_tokens
from mrl.models._positions import attention_factor
from mrl.models.base import ArchSpec, MoeSpec, rotary_kinds
from mrl.models.kernels.bindings import check_alike
from mrl.models.kernels.rope_frequencies import rotary_frequencies
from mrl.models.kernels.training import Angles, training_kernels
from mrl.models.transformer_engine import lacks_attention, missing_fusions
from mrl.resharding.megatron import padded_vocab
from mrl.types import SamplingMask


@dataclass(frozen=True)
class Targets:
    """The tokens that a chunk scores; passed as its `labels`.

    Attributes:
        rows_R: Packed position whose distribution is scored: the one before the token.
        tokens_R: Token id scored there.
        distribution: Temperature and chunk size; None: final hidden states are returned instead of scores.
        support: Tokens that the engine kept at each position; None: all.
        context: Gathers the scores of other context-parallel ranks, if rows and tokens are only this rank's; else None.
        distillation: Teachers with whose distributions these are compared; None: no comparison.
    """

    rows_R: Tensor
    tokens_R: Tensor
    distribution: Distribution | None
    support: SamplingMask | None = None
    context: ContextTargets | None = None
    distillation: DistillationTargets | None = None


class ValueHead(torch.nn.Linear):
    """Linear layer from hidden states [n, 1, H] to values [n], in fp32, or in fp64 if the model is.

    Under sequence parallelism a rank has the states of its own positions: values are gathered, and Megatron sums the
    gradient of the replicated weight over ranks (attribute `sequence_parallel`).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype)
        self._gathers = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Collective over tensor-parallel under sequence parallelism: computes the values."""
        values = F.linear(at_least_fp32(hidden), at_least_fp32(self.weight))
        if self._gathers:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values.flatten()


class ScoringModel(GPTModel):  # type: ignore[misc]  # megatron.core has no types
    """A GPTModel that scores tokens: with `Targets` as labels the last stage returns (logprobs_R, entropy_R).

    If distributions are compared, `Compared.scores` follow. Without a distribution it returns the hidden states, H
    tensors [R]. A critic returns (values_R,), the values of the states before the tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        arch: ArchSpec,
        *,
        te: bool,
        vp_stage: int | None,
        balance: LoadBalance | None = None,
        tables: tuple[Tables, Tables] | None = None,
        compiled: bool = False,
    ) -> None:
        stage = {"ignore_virtual": False, "vp_stage": vp_stage}
        # with fusion the output layer would require Apex's kernel; it is not called as a module anyway
        outer_config = (
            replace(config, gradient_accumulation_fusion=False) if config.gradient_accumulation_fusion else config
        )
        super().__init__(
            outer_config,
            _block_spec(config, arch, te=te, vp_stage=vp_stage, balance=balance, tables=tables, compiled=compiled),
            vocab_size=padded_vocab(arch, config.tensor_model_parallel_size),
            max_sequence_length=arch.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=arch.tie_word_embeddings,
            position_embedding_type="none" if tables else "rope",  # "none": BatchInvariantAttention applies RoPE
            rotary_base=arch.rope_theta,
            vp_stage=vp_stage,
        )
        self.arch, self._is_exact, self.compiled = arch, tables is not None, compiled
        self._of_rows: RowKernels = training_kernels(config.params_dtype) if compiled or self._is_exact else OPERATORS
        if arch.value_head and self.post_process:
            self.output_layer = ValueHead(config)
        self._latent_frequencies: Tensor | None = None
        if not self._is_exact:
            self._set_angles()
        self._forget_weights()

    def _set_angles(self) -> None:
        everywhere, windowed = rotary_kinds(self.arch)
        inv_freq, self._attention_factor = rotary_frequencies(everywhere)
        self._local_frequencies = None if windowed is everywhere else rotary_frequencies(windowed)[0]
        self._latent_frequencies = None if self.arch.mla is None else inv_freq
        if self.arch.mla is not None:
            return  # Megatron's model has no angles, only its layers
        self.rotary_pos_emb.inv_freq = inv_freq.to(self.rotary_pos_emb.inv_freq.device)
        self.rotary_pos_emb.cp_group = None  # angles are indexed by position, so they must not be split over ranks

    @torch.no_grad()
    def _forget_weights(self) -> None:
        for _, tensor in self.named_weights():
            tensor.fill_(torch.nan)
        for weight in self._vocabulary_weights():
            weight[self._shard(weight).size :] = 0  # padding rows are never loaded

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Returns the name and tensor of each weight: the parameters, and the routers' biases, which are buffers."""
        biases = [(name, buffer) for name, buffer in self.named_buffers() if name.endswith(f".router.{BIAS}")]
        return [*self.named_parameters(), *biases]

    def _vocabulary_weights(self) -> list[Tensor]:
        weights = [self.embedding.word_embeddings.weight] if self.pre_process else []
        if self.post_process and not self.arch.value_head and self.output_layer.weight is not None:
            weights.append(self.output_layer.weight)
        return weights

    def _shard(self, weight: Tensor) -> VocabShard:
        start = self.pg_collection.tp.rank() * weight.size(0)
        size = min(max(self.arch.vocab_size - start, 0), weight.size(0))
        return VocabShard(start, size, self.pg_collection.tp)

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._preprocess(*args, **kwargs)
        if self.pre_process and self.arch.embedding_scale is not None:
            scale = torch.tensor(self.arch.embedding_scale, dtype=self.config.params_dtype)  # rounded as transformers'
            prepared = (prepared[0] * float(scale), *prepared[1:])
        if self.pre_process and torch.is_grad_enabled() and not prepared[0].requires_grad:
            # the embedding is frozen: recomputed layers have a backward only if their input needs a gradient
            prepared[0].requires_grad_()
        packed = kwargs.get("packed_seq_params")
        if isinstance(packed, PackedSequences) and self._latent_frequencies is not None:
            positions = kwargs["position_ids"].view(-1)
            packed.angles = self._angles_at(positions, self._latent_frequencies, self._attention_factor)
            return prepared
        if isinstance(packed, PackedSequences) and packed.qkv_format == "sbhd" and not self._is_exact:
            # one row of angles per packed token; Megatron would slice them per sequence in every layer
            hidden, angles, *rest = prepared
            positions = kwargs["position_ids"].view(-1)
            if self._local_frequencies is not None:
                packed.local_angles = self._angles_at(positions, self._local_frequencies, 1.0)
            if self.compiled or self._local_frequencies is not None:
                halves = angles.view(angles.size(0), -1)[:, : angles.size(-1) // 2]  # the first half is there twice
                packed.angles = self._cos_and_sin(halves.index_select(0, positions), self._attention_factor)
                return (hidden, None, *rest)
            return (hidden, angles.index_select(0, positions), *rest)
        return prepared

    def _angles_at(self, positions: Tensor, frequencies: Tensor, factor: float) -> Angles:
        return self._cos_and_sin(torch.outer(positions.float(), frequencies.to(positions.device)), factor)

    def _cos_and_sin(self, angles: Tensor, factor: float) -> Angles:
        cos, sin = ((part * factor).to(self.config.params_dtype) for part in (angles.cos(), angles.sin()))
        return cos, sin

    def _postprocess(self, hidden_states: Tensor, *, labels: Targets | None = None, **kwargs: Any) -> Any:
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states, labels=labels, **kwargs)
        scores = self._values(hidden_states, labels) if self.arch.value_head else self._logprobs(hidden_states, labels)
        return scores if labels.context is None else labels.context.gather(scores)

    def _values(self, hidden_states: Tensor, labels: Targets) -> tuple[Tensor, ...]:
        return (self.output_layer(hidden_states)[labels.rows_R],)

    def _logprobs(self, hidden_states: Tensor, labels: Targets) -> tuple[Tensor, ...]:
        # the weight is used without calling its module, so the hooks that wait for its all-gather are called here
        for arrived in self.output_layer._forward_pre_hooks.values():
            arrived(self.output_layer, ())
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        # each rank scores with its vocabulary shard, so the gradient of the hidden states is summed over the ranks
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states)
        if labels.distribution is None:
            return tuple(hidden.squeeze(1).index_select(0, labels.rows_R).T.unbind())
        shard = self._shard(weight)
        only_use = self.compiled and labels.distillation is None and not self.share_embeddings_and_output_weights
        scores: tuple[Tensor, ...] = linear_logprobs(
            hidden.squeeze(1),
            weight,
            labels.rows_R,
            labels.tokens_R,
            shard=shard,
            distribution=labels.distribution,
            kept_tokens=labels.support,
            head=BatchInvariantHead(weight, self.arch.vocab_size, self.pg_collection.tp) if self._is_exact else None,
            of_rows=self._of_rows,
            # into Megatron's buffer, if nothing else contributes to this weight's gradient
            adds_gradient=adds_gradient(weight) if only_use else None,
        )
        if labels.distillation is not None:
            scores += labels.distillation.scores(hidden.squeeze(1), weight, labels.rows_R, shard)
        return scores


@dataclass
class ScaledRotaryConfig(TransformerConfig):  # type: ignore[misc]
    """Config of a model with an attention factor, which Megatron's attention reads from these fields.

    Attributes:
        yarn_rotary_scaling_factor: Number whose logarithm is 1.
        yarn_mscale: Weight of the logarithm.
        yarn_mscale_all_dim: Weight of the logarithm in the denominator, which becomes 1.
    """

    yarn_rotary_scaling_factor: float = math.e
    yarn_mscale: float = 0.0
    yarn_mscale_all_dim: float = 0.0


def build_chunks(
    arch: ArchSpec,
    parallel: ParallelConfig,
    actor: ActorConfig,
    *,
    dtype: torch.dtype,
    te: bool,
    balance: LoadBalance | None = None,
    megatron: MegatronConfig | None = None,
    exact_positions: int = 0,
    device: torch.device | None = None,
) -> list[ScoringModel]:
    """Collective over the job: builds this rank's chunks, one per virtual stage, with parameters NaN.

    Args:
        arch: Architecture of the model.
        parallel: Parallel sizes, the same as for `mrl.megatron.parallel_state.initialize`.
        actor: Section with activation recompute and routing settings.
        dtype: Dtype of parameters and activations.
        te: True if the layers are TransformerEngine's instead of Megatron's local ones.
        balance: Load balancing that an MoE model's routers report to; None: a new one.
        megatron: Section with fields that are passed to Megatron.
        exact_positions: Maximum sequence length for computing with the native engine's functions
            (`on_policy_layers.py`); 0: with PyTorch's.
        device: Device of the chunks; on a CPU, local layers use compiled kernels if available. None: no compiled
            kernels.

    Raises:
        UserError: Megatron rejects the passed fields, kernels cannot be compiled on this rank, or FP8 is neither
            TransformerEngine's nor emulated.
    """
    given = megatron.transformer if megatron else {}
    check_te("transformer", given, te=te)
    fp8 = None if te else fp8_training(given)
    if fp8 is not None:
        check_emulation(arch, device)
        # Megatron imports TransformerEngine for these
        given = {name: value for name, value in given.items() if name not in FP8_FIELDS}
    config = transformer_config(arch, parallel, actor, dtype=dtype, te=te, given=given)
    check_linear_attention(arch, parallel, exact=exact_positions > 0)
    balance = balance or load_balance(arch, actor)
    stages = parallel.virtual_pipeline_model_parallel_size or 1
    virtual = stages > 1
    tables = None
    if exact_positions:
        check_alike(dtype)
        tables = engine_rotary_tables(arch, exact_positions, dtype)
    compiled = not (te or exact_positions) and _has_kernels(arch, device) and compiles(dtype)
    options: dict[str, Any] = {"balance": balance, "tables": tables, "compiled": compiled}
    with explain_errors("transformer", given):
        chunks = [
            ScoringModel(config, arch, te=te, vp_stage=stage if virtual else None, **options) for stage in range(stages)
        ]
    for chunk in chunks:
        if te:
            count_grouped_biases(chunk)
        if fp8 is not None:
            emulate_fp8(chunk, fp8)
    return chunks


def _has_kernels(arch: ArchSpec, device: torch.device | None) -> bool:
    """Returns whether the compiled CPU kernels compute a model: they have no sinks, no latent or linear attention."""
    on_cpu = device is not None and device.type == "cpu"
    return on_cpu and not arch.attention_sinks and arch.mla is None and arch.linear_attention is None


def transformer_config(
    arch: ArchSpec,
    parallel: ParallelConfig,
    actor: ActorConfig,
    *,
    dtype: torch.dtype,
    te: bool = False,
    given: Mapping[str, Any] | None = None,
) -> TransformerConfig:
    """Returns Megatron's config of the model and its layout, including the fields of `megatron.transformer`.

    Args:
        arch: Architecture of the model.
        parallel: Parallel sizes.
        actor: Section with activation recompute and routing settings.
        dtype: Dtype of parameters and activations.
        te: True if the layers are TransformerEngine's.
        given: Fields of `megatron.transformer`.

    Raises:
        UserError: Megatron rejects the given fields.
    """
    fields = _own_fields(arch, parallel, actor, dtype=dtype, te=te)
    factor, kind = attention_factor(arch), TransformerConfig
    fields |= transformer_defaults(given or {}, te=te, moe=arch.moe is not None, without=missing_fusions(arch))
    fields |= megatron_values("transformer", given or {})
    if arch.mla is not None:
        kind = MLATransformerConfig
    elif factor != 1.0:
        kind = ScaledRotaryConfig
        fields["yarn_mscale"] = 10 * (factor - 1)  # Megatron's factor is 0.1 * mscale * log(scaling factor) + 1
    with explain_errors("transformer", given or ()):
        return kind(**fields)


def _own_fields(
    arch: ArchSpec, parallel: ParallelConfig, actor: ActorConfig, *, dtype: torch.dtype, te: bool
) -> dict[str, Any]:
    """Returns the fields that mrl sets from the model and its layout."""
    stages = parallel.virtual_pipeline_model_parallel_size or 1
    interleaved = stages > 1
    recompute: dict[str, Any] = {}
    if actor.recompute == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif actor.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return dict(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.intermediate_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        qk_layernorm=arch.qk_norm or arch.mla is not None,
        add_qkv_bias=arch.qkv_bias,
        add_bias_linear=arch.output_bias,
        gated_linear_unit=True,
        softmax_scale=arch.attention_scale if arch.mla is None else None,
        layernorm_zero_centered_gamma=arch.zero_centered_norms,
        attention_output_gate=arch.output_gate,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=stages if interleaved else None,
        num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        init_method=_keep_uninitialised,
        output_layer_init_method=_keep_uninitialised,
        embedding_init_method=_keep_uninitialised,
        variable_seq_lengths=parallel.pipeline_model_parallel_size > 1,  # a packed microbatch has its own length
        # with two stages and batched sends an interleaved schedule swaps two messages without an error
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        batch_p2p_sync=False,  # torch orders the sends: no device synchronisation is needed
        deallocate_pipeline_outputs=True,
        # otherwise the schedule divides the loss, in place, by the number of microbatches
        calculate_per_token_loss=True,
        **_window(arch),
        **latent_fields(arch),
        **_linear_attention(arch),
        **_activation(arch),
        **({"softmax_type": "learnable"} if arch.attention_sinks else {}),
        **recompute,
        **moe_config(arch, parallel, actor, te=te),
    )


def _activation(arch: ArchSpec) -> dict[str, Any]:
    """Returns the fields of the MLPs' activation."""
    if arch.moe is None or arch.moe.activation_limit is None:
        return {"activation_func": F.silu if arch.activation == "silu" else _gelu_tanh}
    return {
        "activation_func": quick_gelu,
        "activation_func_clamp_value": arch.moe.activation_limit,
        "glu_linear_offset": 1.0,
    }


def _window(arch: ArchSpec) -> dict[str, Any]:
    """Returns the fields of a sliding window; Megatron counts the keys before a query's own."""
    if arch.sliding_window is None:
        return {}
    windowed = [int(layer in arch.windowed_layers) for layer in range(arch.num_layers)]
    return {"window_size": (arch.sliding_window - 1, 0), "window_attn_skip_freq": windowed}


def _linear_attention(arch: ArchSpec) -> dict[str, Any]:
    """Returns the field that makes Megatron write each layer of a checkpoint under a key of its own."""
    if arch.linear_attention is None:
        return {}
    return {"linear_attention_freq": [int(layer in arch.linear_layers) for layer in range(arch.num_layers)]}


def named_tensors(chunks: list[ScoringModel]) -> dict[str, Tensor]:
    """Returns every parameter and router bias of this rank: "chunk{v}.{name inside GPTModel}" -> the live tensor."""
    return {
        f"chunk{index}.{name}": tensor.data
        for index, chunk in enumerate(chunks)
        for name, tensor in chunk.named_weights()
    }


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _keep_uninitialised(tensor: Tensor) -> Tensor:
    return tensor


def _accumulating(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Returns the layer spec, its layers built with `gradient_accumulation_fusion` if the config has it."""
    if not config.gradient_accumulation_fusion:
        return layer
    kind: Any = layer.module

    class Accumulating(kind):  # type: ignore[misc]
        def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(replace(config, gradient_accumulation_fusion=True), *args, **kwargs)

    layer.module = Accumulating
    return layer


def _block_spec(
    config: TransformerConfig,
    arch: ArchSpec,
    *,
    te: bool,
    vp_stage: int | None,
    balance: LoadBalance | None,
    tables: tuple[Tables, Tables] | None,
    compiled: bool,
) -> Any:
    """Returns the block spec of a pipeline chunk: TransformerEngine's or Megatron's local spec, with mrl's modules.

    Args:
        config: Megatron's transformer config.
        arch: Architecture of the model.
        te: Use TransformerEngine's layers, with attention that supports shared prefixes.
        vp_stage: Virtual-pipeline stage of the chunk; None without virtual pipeline parallelism.
        balance: Load-balancing settings of the router; None: no balancing.
        tables: RoPE tables; if given, the layers are the batch-invariant ones of `rollout.true_on_policy`.
        compiled: Use the compiled CPU kernels for attention, norms and the dense MLP.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds = [(layer in arch.moe_layers, layer in arch.linear_layers) for layer in numbers]
    built = {
        kind: (_te_layer if te else _local_layer)(
            *(config, arch, arch.moe if kind[0] else None, balance), linear=kind[1], tables=tables, compiled=compiled
        )
        for kind in sorted(set(kinds))
    }
    specs = [built[kind] for kind in kinds]
    norm = LayerNormImpl if te else CompiledNorm if compiled or tables is not None else RMSNorm
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _experts(config: TransformerConfig, moe: MoeSpec | None) -> dict[str, Any]:
    """Returns the arguments of Megatron's layer specs for experts."""
    if moe is None:
        return {"num_experts": None, "moe_grouped_gemm": False}
    return {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm}


def _te_layer(
    config: TransformerConfig, arch: ArchSpec, moe: MoeSpec | None, balance: LoadBalance | None, **unused: Any
) -> ModuleSpec:
    """Returns the spec of a layer of TransformerEngine's."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm, multi_latent_attention=arch.mla is not None, **_experts(config, moe)
    )
    attention = layer.submodules.self_attention.submodules
    if lacks_attention(arch):
        attention.core_attention = _core_attention(arch)
    else:
        attention.core_attention = with_shared_tokens(attention.core_attention)
    if arch.post_norms:
        _add_post_norms(layer, config, RMSNorm)
    if arch.mla is not None:
        layer = with_latent_attention(layer, arch.mla)
    return _accumulating(with_router(layer, moe, balance, te=True), config)


def _core_attention(arch: ArchSpec) -> type[CoreAttention]:
    return CoreAttention if arch.local_rope_theta is None else RotatingAttention


def _add_post_norms(layer: ModuleSpec, config: TransformerConfig, norm: type[RMSNorm]) -> None:
    post_norm = ModuleSpec(module=PostNorm, params={"config": config, "norm": norm})
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = post_norm


def _local_layer(
    config: TransformerConfig,
    arch: ArchSpec,
    moe: MoeSpec | None,
    balance: LoadBalance | None,
    *,
    linear: bool,
    tables: tuple[Tables, Tables] | None,
    compiled: bool,
) -> ModuleSpec:
    """Returns the spec of a local layer of Megatron's, with linear attention or not; arguments as for `_block_spec`."""
    layer: ModuleSpec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
        multi_latent_attention=arch.mla is not None,
        **_experts(config, moe),
    )
    layer = with_router(layer, moe, balance)
    if arch.output_gate:
        layer.submodules.self_attention.module = GatedSelfAttention
    if arch.post_norms:
        _add_post_norms(layer, config, CompiledNorm if compiled or tables is not None else RMSNorm)
    if tables is not None:
        return batch_invariant_layer(layer, tables, qk_norm=config.qk_layernorm)
    if compiled:
        return compiled_layer(layer, qk_norm=config.qk_layernorm, moe=moe is not None)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if linear:
        parts.self_attention = ModuleSpec(module=GatedDeltaNet, params={"linear": arch.linear_attention})
        return layer
    attention = parts.self_attention.submodules
    attention.core_attention = _core_attention(arch)
    if arch.mla is not None:
        return with_latent_attention(layer, arch.mla, norm=RMSNorm)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
