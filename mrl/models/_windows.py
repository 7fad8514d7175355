"""Sliding-window attention: which layers have it, read from config.json and written to it.

A family has one `WindowRule`, as transformers' model class treats the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mrl.errors import UserError, shown
from mrl.models._positions import position_limit
from mrl.models._values import flag, positive_int, value_of
from mrl.models.base import ArchSpec

FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of `layer_types`."""

Windows = tuple[int | None, tuple[int, ...]]
"""`ArchSpec.sliding_window` and `ArchSpec.windowed_layers`."""

NONE: Windows = (None, ())


@dataclass(frozen=True)
class WindowRule:
    """How a family's config.json says which layers have a sliding window.

    Attributes:
        layers: Function (config.json, number of layers) -> indices of the layers with the window, ignoring
            `layer_types`.
        reads_layer_types: True if transformers' model class of the family reads `layer_types`.
        to_hf: Function from an ArchSpec to the keys of config.json.
        has_switch: True if windows need `use_sliding_window`.
    """

    layers: Callable[[Mapping[str, Any], int], tuple[int, ...]]
    reads_layer_types: bool
    to_hf: Callable[[ArchSpec], dict[str, Any]]
    has_switch: bool = True

    def read(self, config: Mapping[str, Any], defaults: Mapping[str, Any], layers: int) -> Windows:
        """Returns the window of a model and the layers that have it.

        Args:
            config: Parsed config.json.
            defaults: Values that transformers assumes for missing keys.
            layers: Number of layers.

        Raises:
            UserError: A key has a wrong value, or names a kind of attention that mrl does not implement.
        """
        types = _layer_types(config, layers)
        if types is not None and self.reads_layer_types:
            windowed = tuple(index for index, kind in enumerate(types) if kind == SLIDING)
            is_off = self.has_switch and not _uses_window(config)
            if windowed and (is_off or value_of(config, "sliding_window", defaults) is None):
                needed = "use_sliding_window=true and a " if self.has_switch else "a "
                raise UserError(f"config.json: layer_types names '{SLIDING}', which needs {needed}sliding_window.")
        else:
            windowed = self.layers(config, layers)
            if types is not None and SLIDING in types and windowed != tuple(range(layers)):
                raise UserError(
                    f"config.json: layer_types names '{SLIDING}', but transformers ignores this key for "
                    f"'{config['model_type']}', and no layer would have a window. Remove it, or use a family that "
                    "reads it."
                )
        if not windowed or value_of(config, "sliding_window", defaults) is None:
            return NONE
        return positive_int(config, "sliding_window", defaults), windowed


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """Returns `layer_types`, one of `FULL` and `SLIDING` for each layer; None if the key is missing."""
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or any(kind not in (FULL, SLIDING) for kind in types):
        raise UserError(
            f"config.json: layer_types is {shown(types)}; expected '{FULL}' or '{SLIDING}' for each of the {layers} "
            "layers."
        )
    return types


def _never(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    return ()


def _always(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    return tuple(range(layers))


def _last(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns the layers from `max_window_layers` on, if `use_sliding_window`."""
    if not _uses_window(config):
        return ()
    first = value_of(config, "max_window_layers", {"max_window_layers": 28})
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise UserError(f"config.json: max_window_layers is {shown(first)}; expected an integer of at least 0.")
    return tuple(range(min(first, layers), layers))


def _if_used(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    return tuple(range(layers)) if _uses_window(config) else ()


def _named(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Returns () if no layer has a window; otherwise `layer_types` must say which."""
    if _uses_window(config) and config.get("layer_types") is None:
        raise UserError(
            "config.json: use_sliding_window is true, and versions of transformers differ in which layers have the "
            f"window. Name the attention of each layer in layer_types ('{FULL}' or '{SLIDING}')."
        )
    return ()


def _even(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    return tuple(range(0, layers, 2))


def _uses_window(config: Mapping[str, Any]) -> bool:
    return flag(config, "use_sliding_window", {"use_sliding_window": False})


def _typed(arch: ArchSpec) -> dict[str, Any]:
    """Returns the keys of a family that has `use_sliding_window` and `layer_types`."""
    if arch.sliding_window is None:
        return {"use_sliding_window": False}
    kinds = _kinds(arch)
    first = min(arch.windowed_layers)
    return {
        "use_sliding_window": True,
        "sliding_window": arch.sliding_window,
        "max_window_layers": first if kinds == _kinds_from(first, arch.num_layers) else arch.num_layers,
        "layer_types": kinds,
    }


def _kinds(arch: ArchSpec) -> list[str]:
    return [FULL if arch.window_of(layer) is None else SLIDING for layer in range(arch.num_layers)]


def _kinds_from(first: int, layers: int) -> list[str]:
    return [FULL] * first + [SLIDING] * (layers - first)


def _flagged(arch: ArchSpec) -> dict[str, Any]:
    """Returns the keys of a family whose layers all have the window if `use_sliding_window`."""
    if arch.sliding_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": arch.sliding_window}


def _alternating(arch: ArchSpec) -> dict[str, Any]:
    """Returns the keys of a family without `use_sliding_window`, which has a window even if no layer uses it."""
    return {"sliding_window": arch.sliding_window or position_limit(arch), "layer_types": _kinds(arch)}


def _plain(arch: ArchSpec) -> dict[str, Any]:
    """Returns the key of a family whose layers all have the window if it is set."""
    return {"sliding_window": arch.sliding_window}


NO_WINDOW = WindowRule(_never, False, lambda arch: {})
"""The family has no sliding window (Llama)."""
ALL_LAYERS = WindowRule(_always, False, _plain)
"""All layers have the window if `sliding_window` is set (Mistral, Mixtral, Phi 3)."""
ALL_IF_USED = WindowRule(_if_used, False, _flagged)
"""All layers have the window if `use_sliding_window` (Qwen 3 MoE)."""
LAST_LAYERS = WindowRule(_last, True, _typed)
"""`layer_types` names the layers, otherwise those from `max_window_layers` on have it (Qwen 2 and 3)."""
NAMED_LAYERS = WindowRule(_named, True, _typed)
"""`layer_types` names the layers (Qwen 2 MoE)."""
ALTERNATING = WindowRule(_even, True, _alternating, has_switch=False)
"""`layer_types` names the layers, otherwise the first and every other one after it have it (gpt-oss)."""
