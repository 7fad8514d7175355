"""What the installed TensorRT-LLM can do, found by looking for each feature and not by its version.

Owns the differences between the 1.2 and the 1.3 line that the LLM API's engine meets: how an engine is made to sleep,
which tags its memory has, which samplers there are and what they hear, whether log-probabilities can be asked for as
they were sampled, and whether FP8 weights can be replaced.
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
    """Of the installed package.

    Attributes:
        version: As it calls itself; for messages.
        sleep: Arguments of `LLM` that make its memory releasable; empty: there is no such feature.
        weight_tags: Memory that holds weights and all that is no KV cache, in the order of waking.
        cache_tag: Memory of the KV cache.
        discarded_tags: Those of `weight_tags` whose contents are lost when they sleep: parameters of the model.
        graphs_sleep: CUDA graphs are known to survive sleep: 1.3's own test of sleep samples with them, over all tags,
            and 1.2's says that they are unsupported.
        processed_logprobs: Arguments of `SamplingParams` that ask for log-probabilities of what is sampled from.
        cpp_sampler: There is a TRTLLMSampler: it hears each request's seed and `min_p`, and gives the sampled token's
            log-probability under the temperature.
        torch_min_p: TorchSampler hears `min_p`; whether it hears a request's seed cannot be seen.
        routed_experts: A completion can tell which experts its tokens went to.
        fp8_in_parts: Weights and scales of FP8 blocks can be loaded after the start, some at a time.
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
    """Looks at the installed package.

    Raises:
        UserError: TensorRT-LLM is not installed, or cannot be imported.
    """
    try:
        import tensorrt_llm
        from tensorrt_llm._torch import virtual_memory
        from tensorrt_llm.llmapi import llm_args
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        raise UserError(
            f"rollout.name=trtllm needs TensorRT-LLM 1.2 or 1.3, which does not import ({first_line(error)}). Start in "
            "NVIDIA's container (nvcr.io/nvidia/tensorrt-llm/release), or use rollout.name=native."
        ) from error
    samplers = importlib.import_module(SAMPLERS)
    known = llm_args.TorchLlmArgs.model_fields
    home: Any = llm_args if hasattr(llm_args, "ExecutorMemoryType") else virtual_memory
    tags: dict[str, Any] = {item.name: item for item in home.ExecutorMemoryType if not item.value.startswith("_")}
    cache = tags.pop("KV_CACHE")
    sleep: dict[str, Any] = {}
    parameters: list[Any] = []
    if "sleep_config" in known:  # what is not named waits in host memory
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
        torch_min_p="min_p" in _heard_by_torch(samplers),
        routed_experts="enable_return_routed_experts" in known and _tells_experts(),
        fp8_in_parts=_fp8_in_parts(),
    )


def _heard_by_torch(samplers: Any) -> set[str]:
    """What TorchSampler reads of a request's setting."""
    homes = [samplers]
    with suppress(ImportError):  # a module of its own where the samplers are a package
        homes.append(importlib.import_module(f"{SAMPLERS}.sampler_common"))
    found = next((home.UtilsSamplingParams for home in homes if hasattr(home, "UtilsSamplingParams")), None)
    return set() if found is None else {field.name for field in dataclasses.fields(found)}


def _tells_experts() -> bool:
    from tensorrt_llm import sampling_params

    return hasattr(sampling_params.SamplingParams(), "return_routed_experts")


def _fp8_in_parts() -> bool:
    """Whether the linear layers' own loader of FP8 blocks takes a part of what it fuses."""
    try:
        method = importlib.import_module(LINEAR).FP8BlockScalesLinearMethod
    except (ImportError, AttributeError):
        return False
    return "allow_partial_loading" in inspect.signature(method.load_weights_vanilla).parameters


def _processed_logprobs() -> dict[str, Any]:
    """The argument of `SamplingParams` by whose value's name its meaning is recognised; the probe proves it."""
    from tensorrt_llm import sampling_params

    modes = getattr(sampling_params, "LogprobMode", None)
    if not (isinstance(modes, enum.EnumMeta) and hasattr(sampling_params.SamplingParams(), "logprobs_mode")):
        return {}
    members: list[Any] = list(modes)
    named = [mode for mode in members if "PROCESSED" in mode.name]
    return {"logprobs_mode": named[0]} if named else {}
