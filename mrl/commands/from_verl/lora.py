"""Translates LoRA in verl's model section, of its FSDP actor or of its Megatron actor, to `actor.lora`."""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun, format_value
from mrl.config.config import ALL_LINEAR
from mrl.config.json_file import read_json
from mrl.config.peft_folder import ADAPTER_CONFIG, is_adapter_folder
from mrl.config.verl_keys.translated_keys import DTYPES, ROLLOUT, ROOT
from mrl.config.verl_keys.verl_lora import (
    EVERYTHING,
    MEGATRONS,
    MERGED,
    MODULES,
    NO_DORA,
    NO_DROPOUT,
    OWN,
    WITHOUT_ADAPTERS,
)

MODEL = f"{ROOT}model."
SECTION = "actor.lora."


def lora(verl: VerlRun) -> Iterator[tuple[str, Any]]:
    """Yields keys of `actor.lora` and their values; nothing if verl trains all weights.

    verl reads `lora_rank` and its neighbours with FSDP, and `lora.rank` with Megatron; the others are noted.
    """
    own, others = (MEGATRONS, OWN) if verl.megatron else (OWN, MEGATRONS)
    _note_other_actor(verl, others)
    rank, alpha, targets, excluded, path = (f"{MODEL}{name}" for name in own)
    folder = verl.given.get(path) or None
    if folder is not None and _is_adapter_folder(folder):
        yield f"{SECTION}adapter_path", folder
        yield from _of_folder(verl, str(folder), (rank, alpha, targets, excluded))
    elif verl[rank] > 0:
        yield f"{SECTION}rank", verl[rank]
        yield f"{SECTION}alpha", float(verl[alpha])
        yield f"{SECTION}target_modules", _names(verl, targets, [ALL_LINEAR])
        yield f"{SECTION}exclude_modules", _names(verl, excluded, [])
        if folder is not None and verl.megatron:
            verl.notes[path] = (
                "no folder of PEFT with this name is here, and adapters in a checkpoint of Megatron-Bridge are not "
                "read: set actor.lora.adapter_path to a PEFT folder"
            )
        else:
            yield f"{SECTION}adapter_path", folder
    elif folder is not None:
        verl.notes[path] = (
            "no folder of PEFT with this name is here, so its rank is not known: set actor.lora.adapter_path to it, "
            "and rank, alpha and target_modules to those of its adapter_config.json"
        )
        return
    else:
        return
    yield from _merge(verl)
    if verl.megatron:
        yield from _megatron(verl)


def _merge(verl: VerlRun) -> Iterator[tuple[str, Any]]:
    """Yields `merge` where it is set, which both actors read; an engine may be unable to store adapters."""
    key = f"{MODEL}lora.merge"
    if key in verl.given:
        engine = verl.given.get(f"{ROLLOUT}name")
        if engine == "trtllm" and not verl[key]:
            verl.decided[key] = MERGED
        else:
            yield f"{SECTION}merge", verl[key]


def reference_of_adapters(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns `reference.path` where a KL needs it: with adapters to start from, verl's reference has none."""
    needed = values.get(f"{SECTION}adapter_path") is not None and values.get("algorithm.kl_in") is not None
    return {"reference.path": values.get("model.path")} if needed and not values.get("reference.path") else {}


def differs(verl: VerlRun, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields settings of LoRA with another effect in mrl.

    Args:
        verl: Settings of the run.
        tree: Section `actor` of the config.
    """
    section = tree.get("lora", {})
    if not section:
        return
    path = f"{MODEL}lora_adapter_path"
    if "adapter_path" in section and not _is_adapter_folder(section["adapter_path"]):
        yield (
            f"{path}={format_value(section['adapter_path'])}: verl takes rank, alpha and modules from this folder; set "
            "actor.lora to the same values, mrl refuses others"
        )
    if not verl.megatron:
        return
    kind = verl.given.get(f"{MODEL}lora.type") or "lora"
    if kind == "lora":
        yield (
            f"{MODEL}lora.type=lora: in verl query, key and value have one common lora_A, also gate and up, and the "
            "experts of a rank may share a pair; in mrl each of them has its own pair, as in PEFT"
        )
    key = f"{MODEL}lora.lora_A_init_method"
    if verl[key] != "kaiming":
        yield f"{key}={verl[key]}: in mrl lora_A starts as in PEFT, uniform within 1 / sqrt(inputs) (actor.lora.init)"


def _note_other_actor(verl: VerlRun, names: tuple[str, ...]) -> None:
    """Notes a rank or a folder of adapters that verl's actor does not read."""
    actor = ("Megatron", "FSDP") if verl.megatron else ("FSDP", "Megatron")
    for name in (names[0], names[-1]):
        key = f"{MODEL}{name}"
        if verl.given.get(key) not in (None, 0, ""):
            verl.notes[key] = (
                f"verl's {actor[0]} actor does not read this key of its {actor[1]} actor. For adapters set "
                "actor.lora.rank"
            )


def _of_folder(verl: VerlRun, folder: str, overridden: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yields rank, scale and modules of a PEFT folder, from which verl takes them too."""
    found = read_json(Path(folder) / ADAPTER_CONFIG)
    for name, key in (("r", "rank"), ("lora_alpha", "alpha"), ("use_rslora", "use_rslora")):
        yield f"{SECTION}{key}", found.get(name)
    for name in ("target_modules", "exclude_modules"):
        if isinstance(value := found.get(name), list):
            yield f"{SECTION}{name}", _shortest([str(one) for one in value])
    for key in overridden:
        if key in verl.given:
            verl.decided[key] = "the folder of adapters has its own"


def _names(verl: VerlRun, key: str, default: list[str]) -> list[str] | None:
    """Returns the Hugging Face names in a list of modules; what is no such name is noted."""
    given = verl.given.get(key)
    if given is None or given == [] or given == ALL_LINEAR:
        return default
    if isinstance(given, str):
        verl.notes[key] = "a regular expression; mrl has lists of ends of module names, such as [q_proj, mlp.up_proj]"
        return default
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        verl.notes[key] = "expected a list of module names"
        return default
    found: list[str] = []
    unknown = []
    for name in given:
        if any(sign in name for sign in "*?[") or name in WITHOUT_ADAPTERS:
            unknown.append(name)
        else:
            found += MODULES.get(name, (name,))
    if unknown:
        verl.notes[key] = (
            f"{', '.join(unknown)}: mrl adapts projections of attention and MLP, named by the ends of their Hugging "
            "Face names, without wildcards"
        )
    return _shortest(found) or default


def _is_adapter_folder(folder: Any) -> bool:
    return is_adapter_folder(os.path.expanduser(str(folder)))


def _shortest(names: list[str]) -> list[str]:
    """Returns each name once; all projections together are all-linear."""
    unique = list(dict.fromkeys(names))
    return [ALL_LINEAR] if {*EVERYTHING} <= {*unique} else unique


def _megatron(verl: VerlRun) -> Iterator[tuple[str, Any]]:
    """Yields what only Megatron's LoRA has, and notes what mrl lacks."""
    kind = verl.given.get(f"{MODEL}lora.type")
    if kind == "dora":
        verl.notes[f"{MODEL}lora.type"] = f"{NO_DORA}, are trained"
    elif kind not in (None, "lora", "canonical_lora"):
        verl.notes[f"{MODEL}lora.type"] = "mrl has adapters of language models only, and plain LoRA"
    if verl.given.get(f"{MODEL}lora.dropout") not in (None, 0, 0.0):
        verl.notes[f"{MODEL}lora.dropout"] = NO_DROPOUT
    if verl.given.get(f"{MODEL}lora.lora_B_init_method") not in (None, "zero"):
        verl.notes[f"{MODEL}lora.lora_B_init_method"] = "lora_B starts at zero"
    dtype = verl.given.get(f"{MODEL}lora.dtype")
    if dtype is not None:
        yield f"{SECTION}dtype", verl.one_of(f"{MODEL}lora.dtype", DTYPES, DTYPES["bfloat16"])
