"""Decides whether the actor uses TransformerEngine's layers or Megatron's local ones, and gives the reason.

The layers themselves are built in `mrl/megatron/model.py`. Importing this module imports neither torch nor
TransformerEngine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib import metadata
from typing import Literal, get_args

from mrl.config.config import Config
from mrl.config.megatron_fields.fp8 import fp8_training
from mrl.errors import UserError, first_line
from mrl.models._positions import attention_factor
from mrl.models.base import ArchSpec

NAME = "transformer_engine"
DEVICES = {"cuda"}
"""Devices that TransformerEngine's kernels support."""
DTYPES = {"bfloat16"}
"""Dtypes for which TransformerEngine has an attention for packed sequences: flash-attn and cuDNN lack float32."""
LENGTH_UNIT = 64
"""Tokens; maximum lengths are rounded up to a multiple, as cuDNN before 9.7 requires with more keys than queries."""
BATCH = 2
"""Sequences of the batch for which TransformerEngine is asked what it supports."""
FLASH_ATTN = "pip install --no-build-isolation flash-attn"

Attention = Literal["flash", "fused", "unfused"]


@cache
def why_unusable(device: str) -> str | None:
    """Returns why this process cannot use TransformerEngine, or None if it can. Imports TransformerEngine to find out.

    Args:
        device: "cpu" or "cuda".
    """
    if device not in DEVICES:
        return "the run is on a CPU"
    if importlib.util.find_spec(NAME) is None:
        return "it is not installed"
    try:
        importlib.import_module(f"{NAME}.pytorch")
    except Exception as error:  # noqa: BLE001 -- a wrong build fails in any way
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]  # no other module may use a partially imported package
        return f"it is installed but does not import: {type(error).__name__}: {first_line(error)}"
    return None


def asked_for(config: Config, arch: ArchSpec) -> bool:
    """Returns whether the actor uses TransformerEngine's layers if the machine supports them."""
    asked = config.actor.transformer_impl != "local" and config.model.dtype in DTYPES
    return asked and _missing_layers(arch) is None


def lacks_attention(arch: ArchSpec) -> bool:
    """Returns whether TransformerEngine has no attention for packed sequences of a model, only the other layers.

    It has none with sinks, nor rotary angles that differ between layers; attention is then that of the local layers.
    """
    return arch.attention_sinks or arch.local_rope_theta is not None


def missing_fusions(arch: ArchSpec) -> set[str]:
    """Returns Megatron's fields of the fusions that a model cannot have.

    The fused rotary embedding has no factor of cosines and sines and does not fit latent attention; the fused
    activation has no GELU in its approximation with tanh.
    """
    missing = set()
    if attention_factor(arch) != 1.0 or arch.mla is not None:
        missing.add("apply_rope_fusion")
    if arch.activation == "gelu_tanh":
        missing.add("bias_activation_fusion")
    return missing


def _missing_layers(arch: ArchSpec) -> str | None:
    """Returns why a model cannot be built of TransformerEngine's layers; None: it can."""
    if arch.output_gate or arch.linear_attention is not None:
        return f"mrl has no {arch.family} layers of TransformerEngine's, with linear attention and output gates"
    return None


def why_local(config: Config, arch: ArchSpec, device: str) -> str | None:
    """Returns why the actor uses Megatron's local layers, or None if it uses TransformerEngine's.

    Args:
        config: Run config; the sections model, parallel and actor are read.
        arch: Structure of the model.
        device: "cpu" or "cuda", the device of this process.
    """
    if config.actor.transformer_impl == "local":
        return "actor.transformer_impl=local"
    if (missing := _missing_layers(arch)) is not None:
        return missing
    if (unusable := why_unusable(device)) is not None:
        return unusable
    if config.model.dtype not in DTYPES:
        return f"its attention for packed sequences has no {config.model.dtype} (model.dtype)"
    if lacks_attention(arch):
        return None
    return None if attention(config, arch) else f"it has no attention for packed sequences on this device: {FLASH_ATTN}"


def attention(config: Config, arch: ArchSpec) -> Attention | None:
    """Returns the attention backend that TransformerEngine selects on this device for the actor; None: it has none.

    Args:
        config: Run config; in addition to `why_local`, `megatron.transformer.attention_backend` is read.
        arch: Structure of the model.
    """
    return _attention(config, arch, shared=supports_prefix_sharing(config, arch))


def supports_prefix_sharing(config: Config, arch: ArchSpec) -> bool:
    """Returns whether attention runs with shared prompt prefixes (`actor.use_prefix_grouper`).

    Prefix sharing needs more keys than queries. It is turned off if only TransformerEngine's unfused attention supports
    that. Arguments as for `attention`.
    """
    if not config.actor.use_prefix_grouper or lacks_attention(arch):
        return config.actor.use_prefix_grouper
    shared, alone = (_attention(config, arch, shared=each) for each in (True, False))
    return shared in ("flash", "fused") or (shared is not None and alone in (None, shared))


def _attention(config: Config, arch: ArchSpec, *, shared: bool) -> Attention | None:
    wanted = config.megatron.transformer.get("attention_backend") or "auto"
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    value_dim = arch.head_dim if arch.mla is None else arch.mla.v_head_dim
    shape = arch.num_heads // tp, max(1, arch.num_kv_heads // tp), arch.head_dim, value_dim
    # its exchange of keys has no sliding window, so such a model gathers them as for shared prefixes
    shared |= parallel.context_parallel_size > 1 and arch.sliding_window is not None
    ring = 1 if shared else parallel.context_parallel_size
    exchange = config.megatron.transformer.get("cp_comm_type") or "p2p"
    run = (config.rollout.max_sequence_length, config.model.dtype, ring, exchange, shared)
    windows = {arch.window_of(layer) for layer in range(arch.num_layers)}
    first, *others = (_attentions(shape, window, *run) for window in windows)
    found = [kind for kind in first if wanted in ("auto", kind) and all(kind in other for other in others)]
    return found[0] if found else None


@cache
def _attentions(
    shape: tuple[int, int, int, int],
    window: int | None,
    longest: int,
    dtype: str,
    ring: int,
    exchange: str,
    shared: bool,
) -> list[Attention]:
    """Returns the supported backends, TransformerEngine's own choice first.

    Args:
        shape: (query heads, KV heads, head_dim, size of a head's value) of one tensor-parallel rank.
        window: Sliding window of a layer; None: it has none.
        longest: Longest sequence, tokens.
        dtype: Dtype of queries, keys and values.
        ring: Context-parallel ranks that share a sequence; 1: each has all keys.
        exchange: Megatron's cp_comm_type: how these ranks exchange keys.
        shared: True if a sequence has more keys than queries (a shared prefix).
    """
    import torch

    choice = importlib.import_module(f"{NAME}.pytorch.attention.dot_product_attention.utils")
    heads, groups, head_dim, value_dim = shape
    longest = -(-longest // LENGTH_UNIT) * LENGTH_UNIT
    longest_kv = longest + (LENGTH_UNIT if shared else 0)
    newer = {
        "bottom_right_diagonal": shared,  # from 2.12; it is True by default
        "cp_comm_type": exchange,
        "cp_size": ring,  # from 2.15
        # from 2.20, which asks cuDNN about the very graph: tokens of this rank
        "num_tokens_q": BATCH * longest // ring,
        "num_tokens_kv": BATCH * longest_kv // ring,
    }
    wanted = choice.AttentionParams(
        qkv_type=torch.Tensor,
        qkv_dtype=getattr(torch, dtype),
        qkv_layout="thd_thd_thd",
        batch_size=BATCH,
        num_heads=heads,
        num_gqa_groups=groups,
        max_seqlen_q=longest,
        max_seqlen_kv=longest_kv,
        head_dim_qk=head_dim,
        head_dim_v=value_dim,
        attn_mask_type="padding_causal_bottom_right" if shared else "padding_causal",
        window_size=(-1 if window is None else window - 1, 0),
        context_parallel=ring > 1,
        **{name: value for name, value in newer.items() if name in choice.AttentionParams.__dataclass_fields__},
    )
    flash, _, fused, _, unfused, possible = choice.get_attention_backend(wanted)
    kinds = get_args(Attention)
    return [kind for is_so in ((flash, fused, unfused), possible) for kind, so in zip(kinds, is_so, strict=True) if so]


def check(config: Config, arch: ArchSpec, device: str) -> None:
    """Raises an error if the machine lacks TransformerEngine and the run requires it.

    Args:
        config: Run config.
        arch: Structure of the model.
        device: "cpu" or "cuda", the device of this process.

    Raises:
        UserError: `actor.transformer_impl=te`, or an MoE model on a GPU, and TransformerEngine is unusable.
    """
    why = why_local(config, arch, device)
    if why is None or config.actor.transformer_impl == "local":
        return
    advice = "Fix that, or set actor.transformer_impl=local"
    if config.actor.transformer_impl == "te":
        raise UserError(f"actor.transformer_impl=te, but TransformerEngine cannot be used: {why}. {advice}.")
    if device == "cuda" and arch.moe is not None and asked_for(config, arch):
        raise UserError(
            f"the model has {arch.moe.num_experts} experts per layer, and TransformerEngine, which computes them as "
            f"one grouped GEMM, cannot be used: {why}. {advice}, which computes one expert at a time and is many "
            "times slower."
        )


def described(config: Config, arch: ArchSpec, device: str) -> str:
    """Returns a log line: the implementation of the actor's layers and the reason; arguments as for `why_local`."""
    why = why_local(config, arch, device)
    fp8 = fp8_training(config.megatron.transformer)
    products = "" if fp8 is None else f"; FP8 products: fp8_recipe={fp8.recipe}, fp8={fp8.format}"
    if why is not None:
        products += products and ", emulated: operands are rounded to FP8 and multiplied in float32"
        return f"the actor's layers are Megatron's local ones, not TransformerEngine's: {why}{products}"
    if lacks_attention(arch):
        version, why = metadata.version(NAME), "it has none for this model's packed sequences"
        return f"the actor's layers are TransformerEngine's ({version}), with PyTorch's attention: {why}{products}"
    kind = attention(config, arch)
    slow = (
        f"; it is slow, and its memory grows with the square of the length: {FLASH_ATTN}" if kind == "unfused" else ""
    )
    alone = ""
    if config.actor.use_prefix_grouper and not supports_prefix_sharing(config, arch):
        alone = "; it does not support a shared prompt prefix: the prompt is computed once per sample"
    version = metadata.version(NAME)
    return f"the actor's layers are TransformerEngine's ({version}), with its {kind} attention{slow}{alone}{products}"
