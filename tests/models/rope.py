"""Rotary settings of a test's model, spelled so that every version of transformers in mrl's range reads the same."""


def both_spellings(rope):
    """Transformers 5's `rope_parameters`, and `rope_theta` beside `rope_scaling` of older versions."""
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": None if rope["rope_type"] == "default" else scaling}
    return {"rope_parameters": rope, **old}
