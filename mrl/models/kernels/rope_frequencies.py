"""RoPE frequencies and their scalings.

The convention is transformers': the first `rotary_dim` dimensions of a head are two halves (x1, x2), rotated to
(x1 cos - x2 sin, x2 cos + x1 sin); the others are not changed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrl.models._positions import attention_factor, chosen_factor, original_length
from mrl.models.base import ArchSpec, RopeScaling


def rotary_frequencies(arch: ArchSpec) -> tuple[Tensor, float]:
    """Returns the inverse frequencies of a model, fp32 [rotary_dim / 2], and the factor of its cosines and sines.

    "dynamic" has the unscaled frequencies, which transformers uses up to `max_position_embeddings`; longer sequences
    are refused (`trainer/validation/rollout.py`).

    Source: transformers, modeling_rope_utils.py, `ROPE_INIT_FUNCTIONS`.
    """
    dim, theta, scaling = arch.rotary_dim, arch.rope_theta, arch.rope_scaling
    inv_freq = inverse_frequencies(dim, theta)
    if scaling is None or scaling.rope_type == "dynamic":
        return inv_freq, 1.0
    if scaling.rope_type == "longrope":
        factors = torch.tensor(chosen_factor(scaling), dtype=torch.float32)
        return 1.0 / (factors * _powers(dim, theta)), attention_factor(arch)
    if scaling.factor is None:
        raise ValueError(f"rope_type {scaling.rope_type} has no factor")
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.rope_type == "yarn":
        return scale_yarn(dim, theta, scaling.factor, scaling), attention_factor(arch)
    if scaling.low_freq_factor is None or scaling.high_freq_factor is None:
        raise ValueError(f"rope_type {scaling.rope_type} has no low_freq_factor or high_freq_factor")
    scaled = scale_llama3(
        inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=original_length(scaling),
    )
    return scaled, 1.0


def inverse_frequencies(rotary_dim: int, theta: float) -> Tensor:
    """Returns theta^(-2i / rotary_dim) for i = 0 .. rotary_dim / 2 - 1, fp32 [rotary_dim / 2]."""
    return 1.0 / _powers(rotary_dim, theta)


def _powers(rotary_dim: int, theta: float) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    powers: Tensor = theta**exponents
    return powers


def scale_yarn(rotary_dim: int, theta: float, factor: float, scaling: RopeScaling) -> Tensor:
    """Returns yarn's inverse frequencies: high ones as they are, low ones divided by `factor`, a ramp between them.

    Args:
        rotary_dim: Dimensions of a head that are rotated.
        theta: Base of the frequencies.
        factor: Ratio of the extended to the original context length.
        scaling: Settings of the ramp.

    Source: transformers, modeling_rope_utils.py, `_compute_yarn_parameters` (Peng et al. 2023, section 3.2).
    """
    original = original_length(scaling)

    def dimension(rotations: float) -> float:
        """Returns the dimension whose frequency rotates so often within the original length."""
        return (rotary_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast or 32), dimension(scaling.beta_slow or 1)
    if scaling.truncate is None or scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers, kept = _powers(rotary_dim, theta), 1 - ramp
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def scale_llama3(
    inv_freq: Tensor,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Tensor:
    """Applies Llama-3 scaling: divides low frequencies by `factor`, keeps high ones and interpolates between them.

    Args:
        inv_freq: Unscaled inverse frequencies, [rotary_dim / 2].
        factor: Ratio of the extended to the original context length.
        low_freq_factor: Wavelengths above original / low_freq_factor are divided by `factor`.
        high_freq_factor: Wavelengths below original / high_freq_factor are kept.
        original_max_position_embeddings: Context length before scaling, tokens.

    Source: transformers, modeling_rope_utils.py, `_compute_llama3_parameters`.
    """
    wavelength = 2 * math.pi / inv_freq
    smooth = (original_max_position_embeddings / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original_max_position_embeddings / low_freq_factor, inv_freq / factor, between)
    return torch.where(wavelength < original_max_position_embeddings / high_freq_factor, inv_freq, scaled)
