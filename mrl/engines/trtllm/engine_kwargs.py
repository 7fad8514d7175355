"""Validation of `rollout.engine_kwargs.trtllm`, and its merge with the arguments that mrl derives for `LLM`.

`llm_fields.py` classifies the fields. A field that only the installed version has is accepted if TensorRT-LLM is
installed, and checked when the engine starts. Only `merge_arguments` imports TensorRT-LLM; nothing imports torch.

    refusals(rollout)                       # before anything starts
    merged(derived, given, version)         # the arguments of LLM
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mrl.config.config import RolloutConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.config.type_annotations import expected, fits, literals
from mrl.engines.trtllm.llm_fields import AT_LEAST_ONE, MAPPING, SECTIONS, TABLE, VERSION
from mrl.engines.trtllm.package_signature import accepted_strings, is_installed
from mrl.errors import UserError

ENGINE = "trtllm"
KEY = f"rollout.engine_kwargs.{ENGINE}"
EXAMPLE = "{attn_backend: FLASHINFER}"
DRAFTERS = ("NGram", "AUTO")
"""Values of `speculative_config.decoding_type` that draft from the text, without weights of their own."""
ENUMS = {"capacity_scheduler_policy": "CapacitySchedulerPolicy", "context_chunking_policy": "ContextChunkingPolicy"}
"""TensorRT-LLM's enumeration for a section's field whose value must be a member."""

Given = Mapping[str, Any]


def user_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    """Returns `rollout.engine_kwargs.trtllm`; {} where it is not set."""
    found = rollout.engine_kwargs.get(ENGINE)
    return dict(found) if isinstance(found, Mapping) else {}


def refusals(rollout: RolloutConfig) -> Iterator[str]:
    """Yields a message for each rejected argument."""
    given = user_arguments(rollout)
    for name, value in given.items():
        yield from _refusal(rollout, str(name), value)


def expert_refusals(rollout: RolloutConfig) -> Iterator[str]:
    """Yields a message where MoE arguments are set for a dense model."""
    if "moe_config" in user_arguments(rollout):
        yield f"{KEY}.moe_config is refused: it would have no effect because the model has no experts."


def _refusal(rollout: RolloutConfig, name: str, value: Any) -> Iterator[str]:
    if name not in SECTIONS:
        yield from _field_refusal(name, value)
        if name == "speculative_config" and isinstance(value, Mapping):
            yield from _draft_refusal(value)
        return
    if name == "cuda_graph_config" and (value is None or rollout.enforce_eager):
        yield (
            f"{KEY}.{name} is refused: rollout.enforce_eager turns CUDA graphs on or off. Set it to false, "
            + ("or leave this out." if rollout.enforce_eager else "or to true for none.")
        )
    elif not isinstance(value, Mapping):
        yield f"{KEY}.{name}={_as_yaml(value)}: expected a mapping of {_choices(name)}."
    else:
        for inner, each in value.items():
            yield from _field_refusal(f"{name}.{inner}", each)
        if name == "cuda_graph_config" and {"batch_sizes", "max_batch_size"} <= value.keys():
            yield f"{KEY}.{name}: set either batch_sizes or max_batch_size, not both."


def _field_refusal(path: str, value: Any) -> Iterator[str]:
    rule = TABLE.get(path)
    if rule is None:
        if not is_installed():
            yield f"{KEY}.{path} is unknown to TensorRT-LLM {VERSION}.{_suggestion(path, TABLE)}"
    elif rule.kind != "free":
        yield f"{KEY}.{path} is refused: {rule.why}."
    elif rule.takes == MAPPING:
        if not isinstance(value, Mapping):
            yield f"{KEY}.{path}={_as_yaml(value)}: expected a mapping."
    else:
        yield from _value_refusal(path, rule.takes, value)


def _value_refusal(path: str, takes: str, value: Any) -> Iterator[str]:
    """Yields a message where the value has the wrong type; the installed version determines which strings are valid."""
    if takes.startswith("Literal") and (texts := accepted_strings(path)):
        takes = f"Literal{list(texts)}"
    if not fits(takes, value):
        near = did_you_mean(value, literals(takes)) if isinstance(value, str) else ""
        yield f"{KEY}.{path}={_as_yaml(value)}: expected {expected(takes)}.{near}"
    elif isinstance(value, int | float) and value < (least := int(path in AT_LEAST_ONE)):
        yield f"{KEY}.{path}={value}: expected at least {least}."
    elif isinstance(value, list) and any(each < 1 for each in value):
        yield f"{KEY}.{path}={value}: expected numbers of at least 1."


def _draft_refusal(speculative: Given) -> Iterator[str]:
    kind = speculative.get("decoding_type")
    if kind not in DRAFTERS:
        yield (
            f"{KEY}.speculative_config.decoding_type={_as_yaml(kind)}: expected {' or '.join(DRAFTERS)}. The engine "
            "starts with dummy weights, and a weight sync sends none for other drafters."
        )


def merge_arguments(derived: Given, given: Given, version: str) -> dict[str, Any]:
    """Merges the arguments that mrl derives from `rollout` with the user's, and creates TensorRT-LLM's config objects.

    Args:
        derived: Arguments from mrl; those of SECTIONS as mappings, or None to disable the section.
        given: Validated `rollout.engine_kwargs.trtllm`.
        version: Installed TensorRT-LLM version, for messages.

    Raises:
        UserError: The installed version has no such field, does not support it with a sleeping engine, or rejects a
            value.
    """
    from tensorrt_llm.llmapi import llm_args

    _check_known(given, llm_args.TorchLlmArgs.model_fields, "", version)
    found = dict(derived)
    for name, value in given.items():
        if name not in SECTIONS:
            found[name] = _speculative_config(llm_args, value) if name == "speculative_config" else value
    for name, kind in SECTIONS.items():
        own, user = derived.get(name, {}), given.get(name, {})
        if user and own is None:
            raise UserError(
                f"{KEY}.{name}: TensorRT-LLM {version} is not known to keep CUDA graphs while its engine sleeps, so "
                "mrl disables them. Leave it out, or set rollout.free_cache_engine=false."
            )
        if own or user:
            found[name] = _section(llm_args, kind, own, user, name, version)
    return found


def _section(llm_args: Any, name: str, own: Given, user: Given, section: str, version: str) -> Any:
    """Creates an object of TensorRT-LLM's class `name`; the user's values override mrl's."""
    kind = getattr(llm_args, name)
    _check_known(user, kind.model_fields, section, version)
    if "batch_sizes" in user:  # its largest element replaces max_batch_size
        own = {name: value for name, value in own.items() if name != "max_batch_size"}
    values = {**own, **user}
    try:
        members = {field: getattr(llm_args, ENUMS[field])(value) for field, value in values.items() if field in ENUMS}
        return kind(**{**values, **members})
    except (TypeError, ValueError) as error:
        raise UserError(f"TensorRT-LLM {version} refuses {KEY}.{section}={dict(user)}: {_cause(error)}.") from error


def _speculative_config(llm_args: Any, value: Given) -> Any:
    """Creates a drafter's config from its `decoding_type`, the way TensorRT-LLM parses its YAML files."""
    make = getattr(getattr(llm_args, "DecodingBaseConfig", None), "from_dict", None)
    if make is None:
        return dict(value)
    try:
        return make(dict(value))
    except (TypeError, ValueError) as error:
        raise UserError(f"TensorRT-LLM refuses {KEY}.speculative_config={dict(value)}: {_cause(error)}.") from error


def _check_known(given: Given, known: Collection[str], section: str, version: str) -> None:
    """Raises UserError for fields that the installed version does not have."""
    for name in given:
        if name not in known:
            path = f"{section}.{name}" if section else name
            names = [f"{section}.{each}" if section else each for each in known]
            raise UserError(f"{KEY}.{path} is unknown to TensorRT-LLM {version}.{_suggestion(path, names)}")


def _suggestion(path: str, known: Collection[str]) -> str:
    section, _, name = path.rpartition(".")
    beside = [each for each in known if each.rpartition(".")[0] == section]
    inside = [each for each in known if each.rpartition(".")[2] == name and each != path]
    asked = f" Did you mean '{inside[0]}'?" if inside else did_you_mean(path, beside)
    return asked or " Look its arguments up in TensorRT-LLM's documentation."


def _choices(section: str) -> str:
    names = (name.partition(".") for name, rule in TABLE.items() if rule.kind == "free")
    return ", ".join(inner for outer, _, inner in names if outer == section)


def _cause(error: Exception) -> str:
    """Returns all lines of a pydantic error as one; its first line only counts the errors."""
    return " ".join(str(error).split())


def _as_yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
