"""Shapes of models that were not downloaded yet, for `mrl plan`, `mrl rehearse` and `mrl train --dry-run`."""

from __future__ import annotations

from dataclasses import replace

from mrl.checkpoint.formats.hub import resolve_hub_models, resolve_model_path
from mrl.commands.rehearse.placeholders import (
    hint_at_placeholders,
    matching_preset,
    missing_files,
    with_placeholder_texts,
    with_placeholders,
)
from mrl.config.config import Config
from mrl.config.hub_cache import is_hub_name
from mrl.config.paths import BYTES
from mrl.errors import UserError
from mrl.models.presets import PRESETS


def with_shapes(config: Config, *, placeholders: bool = False) -> tuple[Config, list[str]]:
    """Returns the config with shapes for models that the hub's cache lacks, and a note for each replacement.

    Args:
        config: Config, not resolved.
        placeholders: Replace other missing files by placeholders, too.

    Reads config.json and tokenizer of such a model from the hub, without its weights. If the hub cannot be reached, a
    preset replaces `model.path`, whose name contains the preset's, and lengths in tokens are unknown. Data files that
    are named as on the hub and missing are then replaced too.

    Raises:
        UserError: The hub cannot be reached, and no preset matches, or the model is not the actor.
    """
    notes: list[str] = []
    try:
        with hint_at_placeholders(config):
            config, notes = _with_hub_shapes(config)
    except UserError:
        if not placeholders:
            raise
    if placeholders:
        config, replacements = with_placeholders(config)
        notes += replacements
    return config, notes


def _with_hub_shapes(config: Config) -> tuple[Config, list[str]]:
    try:
        return resolve_hub_models(config), []
    except UserError:
        notes = ["models from the hub: config.json and tokenizer were read, weights were not downloaded"]
    path = config.model.path
    if path is not None and is_hub_name(path):
        try:
            resolve_model_path("model.path", path, download=True, weights=False)
        except UserError as error:
            config, notes = _with_preset(config, path, error)
    return resolve_hub_models(config, download=True, weights=False), notes


def with_notes(error: UserError, notes: list[str]) -> UserError:
    """Returns the error with the notes on replaced models, so that a refused run has them too."""
    return UserError("\n".join([str(error), *(f"note: {note}" for note in notes)])) if notes else error


def _with_preset(config: Config, path: str, error: UserError) -> tuple[Config, list[str]]:
    """Returns the config with a preset for `model.path`, and notes; `error` is why the hub's model is not used."""
    try:
        preset = matching_preset(path)
    except UserError:
        raise UserError(
            f"{error} To plan without the model, set the closest preset, with the vocabulary size of the model: ~model "
            f"model.preset=NAME model.overrides.vocab_size=SIZE model.tokenizer={BYTES}, with NAME one of "
            f"{', '.join(PRESETS)}."
        ) from error
    sizes = {"vocab_size": PRESETS[preset]["vocab_size"]}
    config = replace(config, model=replace(config.model, path=None, preset=preset, overrides=sizes))
    note = f"model.path={path} is not in the cache and the hub was not reached: the shape is that of preset {preset}"
    config, notes = with_placeholder_texts(
        config, missing_files(config.data, on_hub=True), config.model.tokenizer in (None, path)
    )
    reference, critic = config.reference, config.critic
    reference = replace(reference, path=None) if reference.path == path else reference
    critic = replace(critic, path=None) if critic.path == path else critic
    return replace(config, reference=reference, critic=critic), [note, *notes]
