"""Translates arguments that a verl run passes to its engine, as `rollout.engine_kwargs` or as keys of `rollout`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config.verl_keys import verl_rollout
from mrl.config.verl_keys.translated_keys import ENGINE_ARGUMENTS, ROLLOUT, is_harmless
from mrl.config.verl_keys.verl_lora import IN_ENGINE
from mrl.engines.trtllm import llm_fields
from mrl.engines.vllm import engine_fields

_NEEDLESS = """
model tokenizer tokenizer_mode skip_tokenizer_init load_format model_weights distributed_executor_backend
data_parallel_size data_parallel_rank nnodes node_rank kv_cache_memory_bytes logprobs_mode max_logprobs
return_sampling_mask generation_config override_generation_config async_scheduling seed worker_cls
worker_extension_cls disable_log_stats
"""
NEEDLESS = frozenset(_NEEDLESS.split())
"""Arguments of vLLM that mrl sets itself, without effect on what verl's run computes."""
LORA = re.compile("lora|peft")
"""Pattern in the names of arguments about adapters."""


def engine_arguments(verl: VerlRun, engine: str) -> Iterator[tuple[str, Any]]:
    """Yields keys of `rollout` with their values; records why arguments are left out.

    Args:
        verl: Settings of the run.
        engine: `rollout.name` of the translation.
    """
    for owner, prefix in ENGINE_ARGUMENTS.items():
        given = verl.under(prefix)
        if engine != owner:
            verl.decided |= {f"{prefix}{path}": "arguments of an engine that is not the run's" for path in given}
            continue
        passed_on: dict[str, Any] = {}
        for path, value in given.items():
            if engine == "trtllm":
                _translate_trtllm_argument(verl, path, value, passed_on)
            else:
                yield from _translate_vllm_argument(verl, path, value, passed_on)
        if engine == "vllm":
            _graph_sizes(verl, passed_on)
        yield "rollout.engine_kwargs", {engine: passed_on} if passed_on else None


def _translate_trtllm_argument(verl: VerlRun, path: str, value: Any, passed_on: dict[str, Any]) -> None:
    """Copies an argument of TensorRT-LLM to `passed_on`, or records why it is left out.

    Args:
        verl: The verl run; receives the reason in `notes`, or in `decided` where mrl sets the argument itself.
        path: Dotted name below verl's `engine_kwargs.trtllm`; keys inside a mapping argument are copied with it.
        value: Value of the argument in the verl run.
        passed_on: Arguments for `rollout.engine_kwargs.trtllm`, extended in place.
    """
    key = f"{ENGINE_ARGUMENTS['trtllm']}{path}"
    name, _, inner = path.partition(".")
    what = llm_fields.TABLE.get(name if inner and name not in llm_fields.SECTIONS else path)
    if LORA.search(name):
        verl.decided[key] = IN_ENGINE
    elif what is None:
        verl.notes[key] = f"TensorRT-LLM {llm_fields.VERSION} has no such argument"
    elif what.kind == "free":
        _put(passed_on, path.split("."), value)
    else:
        (verl.decided if what.kind == "derived" else verl.notes)[key] = what.why


def _translate_vllm_argument(
    verl: VerlRun, path: str, value: Any, passed_on: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Copies an argument of vLLM to `passed_on`, yields it as a config key, or records why it is left out.

    Like verl, drops nulls and accepts a mapping as JSON.

    Args:
        verl: The verl run; receives the reason in `notes`, or in `decided` where nothing is lost.
        path: Dotted name below verl's `engine_kwargs.vllm`.
        value: Value of the argument in the verl run.
        passed_on: Arguments for `rollout.engine_kwargs.vllm`, extended in place.
    """
    key, name = f"{ENGINE_ARGUMENTS['vllm']}{path}", path.partition(".")[0]
    if value is None:
        verl.decided[key] = "null in verl, the same as not set"
    elif name == "enable_sleep_mode":
        verl.decided[key] = verl_rollout.NEEDLESS[name]
    elif name == "enable_expert_parallel":
        yield "rollout.expert_parallel_size", verl[f"{ROLLOUT}tensor_model_parallel_size"] if value else 1
    elif name in engine_fields.KEYS:
        yield engine_fields.KEYS[name], value
    elif LORA.search(name):
        verl.decided[key] = IN_ENGINE
    elif name in engine_fields.REFUSED:
        moot = name in NEEDLESS or name not in engine_fields.DERIVED or is_harmless(key, value)
        (verl.decided if moot else verl.notes)[key] = engine_fields.REFUSED[name]
    elif name not in engine_fields.NAMES:
        verl.notes[key] = f"vLLM {engine_fields.VERSION} has no such argument of its engine"
    else:
        _put(passed_on, path.split("."), _parsed(value))


def _graph_sizes(verl: VerlRun, passed_on: dict[str, Any]) -> None:
    """Adds verl's CUDA graph sizes to `compilation_config`, as verl does."""
    graphs, name = verl[f"{ROLLOUT}cudagraph_capture_sizes"], "compilation_config"
    if not graphs:
        return
    if not isinstance(passed_on.setdefault(name, {}), dict):
        key = f"{ENGINE_ARGUMENTS['vllm']}{name}"
        verl.notes[key] = f"left out: it is not a mapping, and verl adds {ROLLOUT}cudagraph_capture_sizes to it"
        passed_on[name] = {}
    passed_on[name]["cudagraph_capture_sizes"] = graphs


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
