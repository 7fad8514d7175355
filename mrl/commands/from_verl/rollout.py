"""Translates verl's `rollout` section: the engine, and the settings that depend on it.

`config/verl_keys/verl_rollout.py` maps the keys; `engines/vllm/fields.py` has the values that an engine refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mrl.commands.from_verl.engine_arguments import engine_arguments
from mrl.commands.from_verl.off_policy import off_policy
from mrl.commands.from_verl.verl_run import VerlRun
from mrl.config import registry
from mrl.config.config import Config
from mrl.config.verl_keys import verl_rollout
from mrl.config.verl_keys.translated_keys import DTYPES, MAPS, ROLLOUT
from mrl.engines import _field_support
from mrl.engines._capabilities import engine_capabilities, engines_with_arguments

Pair = tuple[str, Any]

EPISODES = ("multi_turn.", "agent.")
"""Sections that only matter for multi-turn runs."""

ENGINES = {"vllm": "vllm", "sglang": "native", "hf": "native", "???": "native", "trtllm": "trtllm"}
"""Engine of verl -> engine of mrl."""

OWN_WAY = (
    "name", "dtype", "quantization", "prompt_length", "response_length", "expert_parallel_size",
    "moe_tensor_parallel_size", "repetition_penalty", "calculate_log_probs", "engine_kwargs", "engine_kwargs.trtllm",
    "engine_kwargs.vllm", "cudagraph_capture_sizes", "do_sample", "nnodes", "n_gpus_per_node", "over_sample_rate",
    "multi_turn.tool_config_path", "multi_turn.format",
)  # fmt: skip
"""Keys of `rollout`, besides `val_kwargs`, that are not simply copied."""


def lengths(verl: VerlRun) -> tuple[int, int]:
    """Returns the longest prompt and the longest response, tokens."""
    prompt, response = verl[f"{ROLLOUT}prompt_length"], verl[f"{ROLLOUT}response_length"]
    prompt = verl["data.max_prompt_length"] if isinstance(prompt, str) else prompt
    return prompt, verl["data.max_response_length"] if isinstance(response, str) else response


def rollout(verl: VerlRun) -> Iterator[Pair]:
    """Yields keys of `rollout` and their values."""
    engine = verl.one_of(f"{ROLLOUT}name", ENGINES, "native")
    yield "rollout.name", engine
    episodes = verl[f"{ROLLOUT}multi_turn.enable"] is True
    yield from zip(("rollout.prompt_length", "rollout.response_length"), lengths(verl), strict=True)
    for name in verl_rollout.MAPS:
        if "val_kwargs" not in name and name not in OWN_WAY and (episodes or not name.startswith(EPISODES)):
            yield f"rollout.{name}", verl[f"{ROLLOUT}{name}"]
    if episodes:
        formats = tuple(registry.names("environments.formats"))
        yield "rollout.multi_turn.format", verl.one_of(f"{ROLLOUT}multi_turn.format", formats, "hermes")
    if episodes and not verl[f"{ROLLOUT}multi_turn.tool_config_path"]:
        verl.notes[f"{ROLLOUT}multi_turn.enable"] = (
            "no tools are configured: set rollout.agent.environment before the run"
        )
    if episodes and (tools := verl[f"{ROLLOUT}multi_turn.tool_config_path"]):
        yield "rollout.agent.environment", "verl_tools"
        yield "rollout.agent.environment_kwargs", {"tool_config_path": tools}
    yield from _own_ranks(verl)
    yield from off_policy(verl, engine)
    yield from _experts(verl, engine)
    yield from _sampling(verl)
    given = f"{ROLLOUT}dtype" in verl.given
    yield "rollout.dtype", verl.one_of(f"{ROLLOUT}dtype", DTYPES, "bfloat16") if given else None
    yield "rollout.quantization", {"fp8": "fp8"}.get(verl.one_of(f"{ROLLOUT}quantization", ("None", "fp8"), "None"))
    yield from engine_arguments(verl, engine)


def _own_ranks(verl: VerlRun) -> Iterator[Pair]:
    """Yields the number of rollout-only nodes, from the section or from a recipe, which has it elsewhere."""
    section = "rollout." if "rollout.nnodes" in verl.given else ROLLOUT
    if verl[f"{section}nnodes"]:
        yield "rollout.nnodes", verl[f"{section}nnodes"]
        given = verl[f"{section}n_gpus_per_node"]
        as_others = verl.given.get("trainer.n_gpus_per_node", 8)
        yield "rollout.n_gpus_per_node", as_others if isinstance(given, str) else given


def _experts(verl: VerlRun, engine: str) -> Iterator[Pair]:
    """Yields the expert parallel sizes.

    In vLLM the ranks of a replica share its experts, by expert or by tensor parallelism; verl also counts data-parallel
    ranks.
    """
    tp, ep = verl[f"{ROLLOUT}tensor_model_parallel_size"], verl[f"{ROLLOUT}expert_parallel_size"]
    inside = (tp if ep > 1 else 1) if engine == "vllm" else math.gcd(tp, ep)
    yield "rollout.expert_parallel_size", inside
    cut = verl[f"{ROLLOUT}moe_tensor_parallel_size"]
    yield "rollout.moe_tensor_parallel_size", None if cut == 1 else cut
    if inside != ep:
        verl.notes[f"{ROLLOUT}expert_parallel_size"] = f"a replica's {tp} rank(s) have all experts: {inside} is used"


def _sampling(verl: VerlRun) -> Iterator[Pair]:
    if verl[f"{ROLLOUT}repetition_penalty"] != 1:
        verl.notes[f"{ROLLOUT}repetition_penalty"] = MAPS[f"{ROLLOUT}repetition_penalty"][2]
    if not verl[f"{ROLLOUT}calculate_log_probs"]:
        verl.decided[f"{ROLLOUT}calculate_log_probs"] = "always on: mrl records them while sampling"
    if verl.given.get(f"{ROLLOUT}name") == "hf":
        yield "rollout.do_sample", verl[f"{ROLLOUT}do_sample"]
    elif not verl[f"{ROLLOUT}do_sample"]:
        verl.decided[f"{ROLLOUT}do_sample"] = "verl's engines ignore it in training and always sample"
    samples = verl[f"{ROLLOUT}val_kwargs.do_sample"] and verl[f"{ROLLOUT}val_kwargs.temperature"] != 0
    if samples:
        for name in ("n", "do_sample", "temperature", "top_k", "top_p"):
            yield f"rollout.val_kwargs.{name}", verl[f"{ROLLOUT}val_kwargs.{name}"]
    elif verl[f"{ROLLOUT}val_kwargs.n"] != 1:
        verl.notes[f"{ROLLOUT}val_kwargs.n"] = "without do_sample and a temperature the samples are equal: one is used"


def without_refused(config: Config, notes: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yields keys that the engine refuses, and their replacements; None: the default.

    Args:
        config: Translated config.
        notes: verl's key -> reason, updated for these keys.
    """
    name = config.rollout.name
    if name not in engines_with_arguments():
        return
    size, ep = config.rollout.moe_tensor_parallel_size, config.rollout.expert_parallel_size
    if name == "vllm" and size not in (None, config.rollout.tensor_model_parallel_size // ep):
        notes[f"{ROLLOUT}moe_tensor_parallel_size"] = (
            "refused with rollout.name=vllm: it follows from tensor_model_parallel_size and expert_parallel_size"
        )
        yield "rollout.moe_tensor_parallel_size", None
    for field, refusal in _field_support.unsupported_fields(
        engine_capabilities(name).fields, config.rollout, on_a_cpu=False
    ):
        notes[f"{ROLLOUT}{field}"] = f"refused with rollout.name={name}: {refusal.why}. {refusal.instead}"
        yield f"rollout.{field}", None
