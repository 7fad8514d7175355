"""What `rollout.engine_kwargs.trtllm` hands on to TensorRT-LLM's `LLM`, and what it must not.

Owns the rules of that section and its merging with the arguments that mrl makes. The classes of all fields are in
`llm_fields.py`. A field that only the installed version knows is passed on where TensorRT-LLM is installed, and held
against the installed fields when the engine starts. It imports TensorRT-LLM in `merged` alone, and no torch.

    refusals(rollout)                       # before anything starts
    merged(derived, given, version)         # the arguments of LLM
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from mrl.config.config import RolloutConfig
from mrl.config.did_you_mean import did_you_mean
from mrl.config.foreign_types import expected, fits, literals
from mrl.engines.trtllm.llm_fields import AT_LEAST_ONE, MAPPING, SECTIONS, TABLE, VERSION
from mrl.engines.trtllm.package_signature import is_installed, texts_of
from mrl.errors import UserError

ENGINE = "trtllm"
KEY = f"rollout.engine_kwargs.{ENGINE}"
EXAMPLE = "{attn_backend: FLASHINFER}"
DRAFTERS = ("NGram", "AUTO")
"""Of `speculative_config.decoding_type`: those that draft from the text, without weights of their own."""
ENUMS = {"capacity_scheduler_policy": "CapacitySchedulerPolicy", "context_chunking_policy": "ContextChunkingPolicy"}
"""Field of a section -> the enumeration of TensorRT-LLM's that its value is made a member of."""

Given = Mapping[str, Any]


def given_by(rollout: RolloutConfig) -> dict[str, Any]:
    """What is to be handed on; {} where nothing is."""
    found = rollout.engine_kwargs.get(ENGINE)
    return dict(found) if isinstance(found, Mapping) else {}


def refusals(rollout: RolloutConfig) -> Iterator[str]:
    """A message for each argument that is not handed on."""
    given = given_by(rollout)
    for name, value in given.items():
        yield from _refusal(rollout, str(name), value)


def expert_refusals(rollout: RolloutConfig) -> Iterator[str]:
    """A message where a dense model's experts are set."""
    if "moe_config" in given_by(rollout):
        yield f"{KEY}.moe_config is refused: it would have no effect because the model has no experts."


def _refusal(rollout: RolloutConfig, name: str, value: Any) -> Iterator[str]:
    """Of a field of `LLM`, or of those inside its value."""
    if name not in SECTIONS:
        yield from _field_refusal(name, value)
        if name == "speculative_config" and isinstance(value, Mapping):
            yield from _draft_refusal(value)
        return
    if name == "cuda_graph_config" and (value is None or rollout.enforce_eager):
        yield (
            f"{KEY}.{name} is refused: rollout.enforce_eager says whether there are CUDA graphs. Set it to false, "
            + ("or leave this out." if rollout.enforce_eager else "or to true for none.")
        )
    elif not isinstance(value, Mapping):
        yield f"{KEY}.{name}={_shown(value)} came, expected a mapping of {_choices(name)}."
    else:
        for inner, each in value.items():
            yield from _field_refusal(f"{name}.{inner}", each)
        if name == "cuda_graph_config" and {"batch_sizes", "max_batch_size"} <= value.keys():
            yield f"{KEY}.{name}: batch_sizes and max_batch_size came, TensorRT-LLM takes one of them."


def _field_refusal(path: str, value: Any) -> Iterator[str]:
    verdict = TABLE.get(path)
    if verdict is None:
        if not is_installed():
            yield f"{KEY}.{path} is unknown to TensorRT-LLM {VERSION}.{_meant(path, TABLE)}"
    elif verdict.kind != "free":
        yield f"{KEY}.{path} is refused: {verdict.why}."
    elif verdict.takes == MAPPING:
        if not isinstance(value, Mapping):
            yield f"{KEY}.{path}={_shown(value)} came, expected a mapping."
    else:
        yield from _value_refusal(path, verdict.takes, value)


def _value_refusal(path: str, takes: str, value: Any) -> Iterator[str]:
    """Of a value that is not of the kind; the installed version knows best which texts it takes."""
    if takes.startswith("Literal") and (texts := texts_of(path)):
        takes = f"Literal{list(texts)}"
    if not fits(takes, value):
        near = did_you_mean(value, literals(takes)) if isinstance(value, str) else ""
        yield f"{KEY}.{path}={_shown(value)} came, expected {expected(takes)}.{near}"
    elif isinstance(value, int | float) and value < (least := int(path in AT_LEAST_ONE)):
        yield f"{KEY}.{path}={value} came, expected at least {least}."
    elif isinstance(value, list) and any(each < 1 for each in value):
        yield f"{KEY}.{path}={value} came, expected numbers of at least 1."


def _draft_refusal(speculative: Given) -> Iterator[str]:
    kind = speculative.get("decoding_type")
    if kind not in DRAFTERS:
        yield (
            f"{KEY}.speculative_config.decoding_type={_shown(kind)} came, expected {' or '.join(DRAFTERS)}: the engine "
            "starts with dummy weights, and a refit brings none of another drafter."
        )


def merged(derived: Given, given: Given, version: str) -> dict[str, Any]:
    """The arguments of `LLM`: what mrl makes of `rollout`, and what is handed on beside it.

    Args:
        derived: Arguments; those of SECTIONS as mappings, or None for none.
        given: `rollout.engine_kwargs.trtllm`, which `refusals` has let through.
        version: Of the installed TensorRT-LLM, for messages.

    Raises:
        UserError: The installed version has no such field, cannot do it while its engine sleeps, or refuses a value.
    """
    from tensorrt_llm.llmapi import llm_args

    _check_known(given, llm_args.TorchLlmArgs.model_fields, "", version)
    found = dict(derived)
    for name, value in given.items():
        if name not in SECTIONS:
            found[name] = _drafts(llm_args, value) if name == "speculative_config" else value
    for name, kind in SECTIONS.items():
        ours, theirs = derived.get(name, {}), given.get(name, {})
        if theirs and ours is None:
            raise UserError(
                f"{KEY}.{name}: TensorRT-LLM {version} is not known to keep CUDA graphs while its engine sleeps, so "
                "that there are none. Leave it out, or set rollout.free_cache_engine=false."
            )
        if ours or theirs:
            found[name] = _made(llm_args, kind, ours, theirs, name, version)
    return found


def _made(llm_args: Any, name: str, ours: Given, theirs: Given, section: str, version: str) -> Any:
    """An object of TensorRT-LLM's class `name`; what is given goes before what is mrl's."""
    kind = getattr(llm_args, name)
    _check_known(theirs, kind.model_fields, section, version)
    if "batch_sizes" in theirs:  # the largest of them is the largest graph
        ours = {name: value for name, value in ours.items() if name != "max_batch_size"}
    values = {**ours, **theirs}
    try:
        members = {field: getattr(llm_args, ENUMS[field])(value) for field, value in values.items() if field in ENUMS}
        return kind(**{**values, **members})
    except (TypeError, ValueError) as error:
        raise UserError(f"TensorRT-LLM {version} refuses {KEY}.{section}={dict(theirs)}: {_cause(error)}.") from error


def _drafts(llm_args: Any, value: Given) -> Any:
    """The configuration of a drafter by its `decoding_type`, made as TensorRT-LLM makes it of its own YAML files."""
    make = getattr(getattr(llm_args, "DecodingBaseConfig", None), "from_dict", None)
    if make is None:
        return dict(value)
    try:
        return make(dict(value))
    except (TypeError, ValueError) as error:
        raise UserError(f"TensorRT-LLM refuses {KEY}.speculative_config={dict(value)}: {_cause(error)}.") from error


def _check_known(given: Given, known: Collection[str], section: str, version: str) -> None:
    """Raises UserError for what the installed version does not have."""
    for name in given:
        if name not in known:
            path = f"{section}.{name}" if section else name
            names = [f"{section}.{each}" if section else each for each in known]
            raise UserError(f"{KEY}.{path} is unknown to TensorRT-LLM {version}.{_meant(path, names)}")


def _meant(path: str, known: Collection[str]) -> str:
    section, _, name = path.rpartition(".")
    beside = [each for each in known if each.rpartition(".")[0] == section]
    inside = [each for each in known if each.rpartition(".")[2] == name and each != path]
    asked = f" Did you mean '{inside[0]}'?" if inside else did_you_mean(path, beside)
    return asked or " Look its arguments up in TensorRT-LLM's documentation."


def _choices(section: str) -> str:
    names = (name.partition(".") for name, verdict in TABLE.items() if verdict.kind == "free")
    return ", ".join(inner for outer, _, inner in names if outer == section)


def _cause(error: Exception) -> str:
    """A refusal of pydantic's in one line; its first says only how many there are."""
    return " ".join(str(error).split())


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
