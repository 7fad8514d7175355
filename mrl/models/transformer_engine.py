"""Whether the actor's layers are TransformerEngine's, on this machine and for this run, and why not.

Owns the rule and its words; the one place that asks TransformerEngine itself. The layers are built in
`mrl/megatron/model.py`. Importing this imports neither torch nor TransformerEngine.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from importlib import metadata
from typing import Literal, get_args

from mrl.config.config import Config
from mrl.errors import UserError, first_line
from mrl.models.base import ArchSpec

NAME = "transformer_engine"
DEVICES = {"cuda"}
"""Where its kernels run."""
DTYPES = {"bfloat16"}
"""In which it has an attention that is fit for packed sequences: neither flash-attn nor cuDNN's has float32."""
LENGTH_UNIT = 64
"""Longest lengths that it is told of are multiples: cuDNN before 9.7 asks for that where keys are more than queries."""
FLASH_ATTN = "pip install --no-build-isolation flash-attn"

Attention = Literal["flash", "fused", "unfused"]


@cache
def why_unusable(device: str) -> str | None:
    """Why this process cannot use TransformerEngine; None: it can. It is imported to find out.

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
            del sys.modules[name]  # what did import is not to be found by others
        return f"it is installed but does not import: {type(error).__name__}: {first_line(error)}"
    return None


def asked_for(config: Config) -> bool:
    """Whether the layers are TransformerEngine's wherever it can be used."""
    return config.actor.transformer_impl != "local" and config.model.dtype in DTYPES


def why_local(config: Config, arch: ArchSpec, device: str) -> str | None:
    """Why the actor's layers are Megatron's local ones; None: they are TransformerEngine's.

    Args:
        config: Sections model, parallel and actor.
        arch: The model.
        device: "cpu" or "cuda"; of this process.
    """
    if config.actor.transformer_impl == "local":
        return "actor.transformer_impl=local"
    if (unusable := why_unusable(device)) is not None:
        return unusable
    if config.model.dtype not in DTYPES:
        return f"its attention for packed sequences has no {config.model.dtype} (model.dtype)"
    return None if attention(config, arch) else f"it has no attention for packed sequences on this device: {FLASH_ATTN}"


def attention(config: Config, arch: ArchSpec) -> Attention | None:
    """Which of its attentions TransformerEngine takes on this device for what the actor gives it; None: there is none.

    Args:
        config: As for `why_local`, and `megatron.transformer.attention_backend`.
        arch: As for `why_local`.
    """
    return _attention(config, arch, shared=shares(config, arch))


def shares(config: Config, arch: ArchSpec) -> bool:
    """Whether TransformerEngine's attention is given tokens that sequences share once; arguments as for `attention`.

    It is not where only its slow attention could take queries and keys of different numbers.
    """
    if not config.actor.use_prefix_grouper:
        return False
    shared, alone = (_attention(config, arch, shared=each) for each in (True, False))
    return shared in ("flash", "fused") or (shared is not None and alone in (None, shared))


def _attention(config: Config, arch: ArchSpec, *, shared: bool) -> Attention | None:
    wanted = config.megatron.transformer.get("attention_backend") or "auto"
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    shape = arch.num_heads // tp, max(1, arch.num_kv_heads // tp), arch.head_dim
    ring = parallel.context_parallel_size > 1 and not shared
    possible = _attentions(shape, config.rollout.longest, config.model.dtype, ring, shared)
    found = [kind for kind in possible if wanted in ("auto", kind)]
    return found[0] if found else None


@cache
def _attentions(shape: tuple[int, int, int], longest: int, dtype: str, ring: bool, shared: bool) -> list[Attention]:
    """Those that it could take, the one that it would choose first.

    Args:
        shape: Heads, KV heads, head dim.
        longest: Tokens of a sequence.
        dtype: Of queries, keys and values.
        ring: Keys go around the context-parallel ranks.
        shared: The keys of a sequence are more than its queries.
    """
    import torch

    choice = importlib.import_module(f"{NAME}.pytorch.attention.dot_product_attention.utils")
    heads, groups, head_dim = shape
    longest = -(-longest // LENGTH_UNIT) * LENGTH_UNIT
    wanted = choice.AttentionParams(
        qkv_type=torch.Tensor,
        qkv_dtype=getattr(torch, dtype),
        qkv_layout="thd_thd_thd",
        batch_size=2,
        num_heads=heads,
        num_gqa_groups=groups,
        max_seqlen_q=longest,
        max_seqlen_kv=longest + (LENGTH_UNIT if shared else 0),
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        attn_mask_type="padding_causal_bottom_right" if shared else "padding_causal",
        window_size=(-1, 0),
        context_parallel=ring,
    )
    flash, _, fused, _, unfused, possible = choice.get_attention_backend(wanted)
    kinds = get_args(Attention)
    return [kind for is_so in ((flash, fused, unfused), possible) for kind, so in zip(kinds, is_so, strict=True) if so]


def check(config: Config, arch: ArchSpec, device: str) -> None:
    """Refuses a run that wants TransformerEngine's layers, or cannot do without, on a machine that cannot give them.

    Args:
        config: As for `why_local`.
        arch: As for `why_local`.
        device: As for `why_local`.

    Raises:
        UserError: With the reason.
    """
    why = why_local(config, arch, device)
    if why is None or config.actor.transformer_impl == "local":
        return
    advice = "Mend that, or set actor.transformer_impl=local"
    if config.actor.transformer_impl == "te":
        raise UserError(f"actor.transformer_impl=te, but TransformerEngine cannot be used: {why}. {advice}.")
    if device == "cuda" and arch.moe is not None and asked_for(config):
        raise UserError(
            f"the model has {arch.moe.num_experts} experts in a layer, and TransformerEngine, which computes them "
            f"together, cannot be used: {why}. {advice}: one expert after the other, many times slower."
        )


def described(config: Config, arch: ArchSpec, device: str) -> str:
    """Whose layers the actor has, and why, in one line; arguments as for `why_local`."""
    why = why_local(config, arch, device)
    if why is not None:
        return f"the actor's layers are Megatron's local ones, not TransformerEngine's: {why}"
    kind = attention(config, arch)
    slow = (
        f"; it is slow, and its memory grows with the square of the length: {FLASH_ATTN}" if kind == "unfused" else ""
    )
    alone = ""
    if config.actor.use_prefix_grouper and not shares(config, arch):
        alone = "; it has none that is fit for shared tokens: prompts are computed again for each of their samples"
    version = metadata.version(NAME)
    return f"the actor's layers are TransformerEngine's ({version}), with its {kind} attention{slow}{alone}"
