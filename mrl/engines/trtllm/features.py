"""Detection of the installed TensorRT-LLM's features by inspection instead of by version.

Covers the differences between the 1.2 and 1.3 lines that the LLM API's engine depends on: the sleep mechanism, memory
tags, samplers and the settings they support, processed log-probabilities, and replaceable FP8 weights.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mrl.errors import UserError, first_line

SAMPLERS = "tensorrt_llm._torch.pyexecutor.sampler"
LINEAR = "tensorrt_llm._torch.modules.linear"


@dataclass(frozen=True)
class Features:
    """Features of the installed package.

    Attributes:
        version: Version string, for messages.
        sleep: Arguments of `LLM` that make its memory releasable; empty where unsupported.
        weight_tags: Memory tags of weights and everything except the KV cache, in the order of waking.
        cache_tag: Memory tag of the KV cache.
        discarded_tags: Tags among `weight_tags` whose contents are lost in sleep: the model's parameters.
        graphs_sleep: True if CUDA graphs are known to survive sleep. 1.3's own sleep test samples with them over all
            tags; 1.2's test says that they are unsupported.
        processed_logprobs: Arguments of `SamplingParams` that request log-probabilities after temperature and
            truncation.
        cpp_sampler: True if TRTLLMSampler exists. It supports per-request seeds and `min_p`, and returns the sampled
            token's log-probability after temperature.
        torch_min_p: True if TorchSampler supports `min_p`. Support of per-request seeds cannot be detected.
        routed_experts: True if a completion can return the experts of its tokens.
        fp8_in_parts: True if block-wise FP8 weights and scales can be loaded after the start, a few at a time.
    """

    version: str
    sleep: Mapping[str, Any]
    weight_tags: tuple[str, ...]
    cache_tag: str
    discarded_tags: tuple[str, ...]
    graphs_sleep: bool
    processed_logprobs: Mapping[str, Any]
    cpp_sampler: bool
    torch_min_p: bool
    routed_experts: bool
    fp8_in_parts: bool


def find() -> Features:
    """Inspects the installed package.

    Raises:
        UserError: TensorRT-LLM is not installed, or cannot be imported.
    """
    try:
        import tensorrt_llm
        from tensorrt_llm._torch import virtual_memory
        from tensorrt_llm.llmapi import llm_args
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        raise UserError(
            f"rollout.name=trtllm needs TensorRT-LLM 1.2 or 1.3, whose import failed ({first_line(error)}). Start in "
            "NVIDIA's container (nvcr.io/nvidia/tensorrt-llm/release), or use rollout.name=native."
        ) from error
    samplers = importlib.import_module(SAMPLERS)
    known = llm_args.TorchLlmArgs.model_fields
    home: Any = llm_args if hasattr(llm_args, "ExecutorMemoryType") else virtual_memory
    tags: dict[str, Any] = {item.name: item for item in home.ExecutorMemoryType if not item.value.startswith("_")}
    cache = tags.pop("KV_CACHE")
    sleep: dict[str, Any] = {}
    parameters: list[Any] = []
    if "sleep_config" in known:  # tags without a mode are offloaded to host memory
        parameters = [tag for name, tag in tags.items() if name.startswith("MODEL_WEIGHTS")]
        sleep = {"sleep_config": llm_args.SleepConfig(restore_modes=dict.fromkeys([cache, *parameters], "NONE"))}
    elif "enable_sleep" in known:
        sleep = {"enable_sleep": True}
    return Features(
        version=getattr(tensorrt_llm, "__version__", "of unknown version"),
        sleep=sleep,
        weight_tags=tuple(str(item.value) for item in tags.values()),
        cache_tag=str(cache.value),
        discarded_tags=tuple(str(item.value) for item in parameters),
        graphs_sleep="sleep_config" in known,
        processed_logprobs=_processed_logprobs(),
        cpp_sampler=hasattr(samplers, "TRTLLMSampler"),
        torch_min_p="min_p" in _torch_sampler_fields(samplers),
        routed_experts="enable_return_routed_experts" in known and _returns_experts(),
        fp8_in_parts=_loads_fp8_in_parts(),
    )


def _torch_sampler_fields(samplers: Any) -> set[str]:
    """Returns the names of the request settings that TorchSampler reads."""
    homes = [samplers]
    with suppress(ImportError):  # a module of its own where the samplers are a package
        homes.append(importlib.import_module(f"{SAMPLERS}.sampler_common"))
    found = next((home.UtilsSamplingParams for home in homes if hasattr(home, "UtilsSamplingParams")), None)
    return set() if found is None else {field.name for field in dataclasses.fields(found)}


def _returns_experts() -> bool:
    from tensorrt_llm import sampling_params

    return hasattr(sampling_params.SamplingParams(), "return_routed_experts")


def _loads_fp8_in_parts() -> bool:
    """Returns whether the linear layers' loader of block-wise FP8 accepts some of the tensors that it fuses."""
    try:
        method = importlib.import_module(LINEAR).FP8BlockScalesLinearMethod
    except (ImportError, AttributeError):
        return False
    return "allow_partial_loading" in inspect.signature(method.load_weights_vanilla).parameters


def _processed_logprobs() -> dict[str, Any]:
    """Returns the `SamplingParams` argument for processed log-probabilities, recognised by its enum's names."""
    from tensorrt_llm import sampling_params

    modes = getattr(sampling_params, "LogprobMode", None)
    if not (isinstance(modes, enum.EnumMeta) and hasattr(sampling_params.SamplingParams(), "logprobs_mode")):
        return {}
    members: list[Any] = list(modes)
    named = [mode for mode in members if "PROCESSED" in mode.name]
    return {"logprobs_mode": named[0]} if named else {}
