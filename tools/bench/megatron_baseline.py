"""Megatron-Core's own GPT model, wrapper and optimizer without mrl code, as a baseline for benchmarks.

It follows Megatron's examples: batches [B, T] of sequences of equal length, mean cross-entropy over all tokens, one
process.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import mrl.megatron  # noqa: F401  # isort: skip -- corrects Megatron-Core for this machine before its first import
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mrl.models.base import ArchSpec

ROOM = 0.8
"""Fraction of the free memory that a microbatch may use, by estimate."""


class PlainMegatron:
    """Dense model with random weights, of the same shape as an actor."""

    def __init__(self, arch: ArchSpec, *, dtype: torch.dtype, device: torch.device, te: bool) -> None:
        """Collective over a job of one rank: builds the model; Megatron's process groups must exist.

        Args:
            arch: Architecture of the model.
            dtype: Dtype of parameters and activations.
            device: Device of the model.
            te: True for TransformerEngine's layers, False for Megatron's local ones.
        """
        config = TransformerConfig(
            num_layers=arch.num_layers,
            hidden_size=arch.hidden_size,
            ffn_hidden_size=arch.intermediate_size,
            num_attention_heads=arch.num_heads,
            num_query_groups=arch.num_kv_heads,
            kv_channels=arch.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=arch.rms_norm_eps,
            qk_layernorm=arch.qk_norm,
            add_qkv_bias=arch.qkv_bias,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=F.silu,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            bias_activation_fusion=te,
            apply_rope_fusion=te,
            use_cpu_initialization=device.type == "cpu",
        )
        make = get_gpt_layer_with_transformer_engine_spec if te else get_gpt_layer_local_spec
        own = {} if te else {"normalization": "RMSNorm"}
        model = GPTModel(
            config,
            make(qk_layernorm=arch.qk_norm, **own),
            vocab_size=arch.vocab_size,
            max_sequence_length=arch.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=int(arch.rope_theta),
            share_embeddings_and_output_weights=arch.tie_word_embeddings,
        ).to(device=device, dtype=dtype)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self._model = DistributedDataParallel(config, settings, model)
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=config.bf16, params_dtype=dtype, use_distributed_optimizer=True
        )
        self._optimizer = get_megatron_optimizer(adam, [self._model])
        self._device = device
        self._te = te

    def update(self, tokens_BT: Tensor, rows: int) -> None:
        """Runs one optimizer step.

        Args:
            tokens_BT: Token ids of the batch.
            rows: Sequences per microbatch.
        """
        tokens_BT = tokens_BT.to(self._device)
        batch, length = tokens_BT.shape
        positions_T = torch.arange(length, device=self._device)
        later = None if self._te else torch.ones(length, length, device=self._device).triu(1).bool()[None, None]
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        for first in range(0, batch, rows):
            part = tokens_BT[first : first + rows]
            positions = positions_T.expand_as(part)
            losses = self._model(part, positions, later, labels=part.roll(-1, 1))
            (losses.float().sum() / (batch * length)).backward()
        self._model.finish_grad_sync()
        self._optimizer.step()


def fitting_rows(arch: ArchSpec, length: int, wanted: int, free_bytes: int, *, te: bool) -> int:
    """Returns the number of sequences that fit in a microbatch.

    Local layers keep the attention scores of all layers, in the model's dtype and in fp32 (6 bytes each). The rest
    follows Korthikanti et al., 2022 (arXiv:2205.05198), section 4.1, for a gated MLP, and three copies of the logits.

    Args:
        arch: Architecture of the model.
        length: Tokens per sequence.
        wanted: Maximum number of sequences.
        free_bytes: Free memory of the device, with model and optimizer loaded.
        te: True for TransformerEngine's layers, which do not keep scores.
    """
    scores = 0 if te else 6 * arch.num_heads * length
    layer = 17 * arch.hidden_size + 8 * arch.intermediate_size + scores
    row_bytes = length * (arch.num_layers * layer + 12 * arch.vocab_size)
    return max(1, min(wanted, int(ROOM * free_bytes) // row_bytes))
