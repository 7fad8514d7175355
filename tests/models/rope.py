"""Rotary settings of a test's model, spelled so that every version of transformers in mrl's range reads the same."""

from typing import Any


def both_spellings(rope):
    """Transformers 5's `rope_parameters`, and `rope_theta` beside `rope_scaling` of older versions."""
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else scaling}
    top_level = {name: rope[name] for name in ("partial_rotary_factor",) if name in rope}
    if rope["rope_type"] == "longrope" and "original_max_position_embeddings" in rope:
        top_level["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return {"rope_parameters": rope, **old, **top_level}


def of_phi_3(keys):
    """The same with a `rope_scaling` as transformers 4 accepts it for Phi 3: a type and two lists."""
    lists = {name: keys["rope_scaling"][name] for name in ("short_factor", "long_factor")}
    return {**keys, "rope_scaling": {"type": "longrope", **lists}}


def variants(head_dim: int = 16, original: int = 16) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> (model_type, keys of config.json) of every way to compute positions, for small models.

    Args:
        head_dim: Dimensions of a head, a multiple of 8.
        original: Context length before scaling; test sequences should be longer.
    """
    theta = {"rope_theta": 300.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": original, **theta}
    half = head_dim // 2

    def longrope(rotated, **more):
        lists = {
            "short_factor": [1.0 + 0.1 * index for index in range(rotated)],
            "long_factor": [1.0 + 0.7 * index for index in range(rotated)],
        }
        return {"rope_type": "longrope", **lists, "original_max_position_embeddings": original, **theta, **more}

    partial = {"partial_rotary_factor": 0.75}
    return {
        "linear": ("llama", both_spellings({"rope_type": "linear", "factor": 2.5, **theta})),
        "dynamic": ("qwen2", both_spellings({"rope_type": "dynamic", "factor": 2.0, **theta})),
        "yarn": ("qwen2", both_spellings(yarn)),
        "yarn_all": (
            "qwen3",
            both_spellings(
                {**yarn, "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}
            ),
        ),
        "yarn_factor": ("llama", both_spellings({**yarn, "attention_factor": 0.8})),
        "longrope": ("qwen3", both_spellings(longrope(half, factor=4.0, attention_factor=1.3))),
        "phi3_partial": ("phi3", both_spellings({"rope_type": "default", **theta, **partial})),
        "phi3_longrope": ("phi3", of_phi_3(both_spellings(longrope(half)))),
        "phi4_mini": ("phi3", of_phi_3(both_spellings(longrope(head_dim * 3 // 8, **partial)))),
    }


def with_one_list(keys: dict[str, Any], *, uses_long: bool) -> dict[str, Any]:
    """The rotary keys of a longrope model with the chosen list twice, so that transformers never changes it."""
    found = dict(keys)
    for spelling in ("rope_parameters", "rope_scaling"):
        part = keys.get(spelling)
        if part and "long_factor" in part:
            chosen = part["long_factor" if uses_long else "short_factor"]
            found[spelling] = {**part, "short_factor": chosen, "long_factor": chosen}
    return found
