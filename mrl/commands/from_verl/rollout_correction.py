"""Translates verl's `algorithm.rollout_correction`, whose names mrl shares, and drops settings without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.verl_keys.translated_keys import CORRECTION


def rollout_correction(verl: VerlRun) -> Iterator[tuple[str, Any]]:
    """Yields the fields that have an effect; records why the others are left out."""
    notes = verl.notes
    given = {name: value for name, value in verl.under(f"{CORRECTION}.").items() if value not in (None, "null", "None")}
    bypass, names = bool(given.get("bypass_mode", False)), ["rollout_is", "rollout_rs"]
    if bypass:
        names.append("loss_type")
        if given.get("loss_type", "ppo_clip") == "ppo_clip" and "rollout_is" in given:
            notes[f"{CORRECTION}.rollout_is"] = "left out: with bypass_mode and ppo_clip it is only measured"
            verl.lossless.add(f"{CORRECTION}.rollout_is")
            names.remove("rollout_is")
    for kind in ("rollout_is", "rollout_rs"):
        names += [name for name in given if name.startswith(f"{kind}_") and kind in given and kind in names]
    for name in given:
        key = f"{CORRECTION}.{name}"
        if name not in (*names, "bypass_mode") and key not in notes:
            verl.decided[key] = "without effect, given the other settings"
    yield f"{CORRECTION}.bypass_mode", bypass
    for name in names:
        value = given.get(name)
        yield f"{CORRECTION}.{name}", str(value) if name.endswith("threshold") and value is not None else value
