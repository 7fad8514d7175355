"""Router replay with the LLM API: arguments that return each token's experts, and settings that conflict with it.

The feature was read in `_torch/route_capture.py` of the main branch (September 2026, pull request 18397), which records
the router's choice before a load balancer renumbers experts. `TorchLlmArgs`, `SamplingParams` and `CompletionOutput` of
1.2.1 do not have it. Without it, `actor.router_replay=recompute` replays the actor's own choice. `sampling.py` converts
the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.config.config import RolloutConfig
from mrl.engines.trtllm.engine_kwargs import KEY, user_arguments
from mrl.engines.trtllm.features import Features
from mrl.engines.trtllm.package_signature import is_installed, lacks
from mrl.errors import UserError

ENGINE_ARGUMENT = "enable_return_routed_experts"
REQUEST_ARGUMENT = "return_routed_experts"
SEPARATED = ("CUTLASS", "DEEPGEMM")
"""Values of `moe_config.backend` whose kernels receive the experts as input; the first is the default. Other backends
choose experts inside a kernel, where they cannot be recorded.
"""
NO_EVICT = "GUARANTEED_NO_EVICT"
"""`scheduler_config.capacity_scheduler_policy` that never pauses a request. A paused request recomputes its tokens, and
the positions of the recorded experts would be wrong.
"""
INSTEAD = (
    "Set it to false, and actor.router_replay=recompute with algorithm.rollout_correction.bypass_mode=false, which "
    "replays the actor's own choice with any engine; or use rollout.name=native"
)


def is_unknown() -> bool:
    """Returns whether the installed version is known to lack the feature; True where TensorRT-LLM is not installed."""
    return not is_installed() or lacks(ENGINE_ARGUMENT)


def refusals(rollout: RolloutConfig) -> Iterator[str]:
    """Yields a message for each argument in `rollout.engine_kwargs.trtllm` that prevents recording experts."""
    if not rollout.enable_rollout_routing_replay:
        return
    given = user_arguments(rollout)
    said = "rollout.enable_rollout_routing_replay=true"
    if given.get("speculative_config"):
        yield f"{said} with {KEY}.speculative_config: TensorRT-LLM does not return the experts of drafted tokens."
    for section, name, known in (
        ("moe_config", "backend", SEPARATED),
        ("scheduler_config", "capacity_scheduler_policy", (NO_EVICT,)),
    ):
        inside = given.get(section)
        value = inside.get(name) if isinstance(inside, dict) else None
        if value is not None and value not in known:
            why = (
                "it chooses experts inside a kernel"
                if section == "moe_config"
                else "a paused request records experts at wrong positions"
            )
            yield f"{said} with {KEY}.{section}.{name}={value}: {why}. Set it to {' or '.join(known)}, or leave it out."


def engine_arguments(config: RolloutConfig, features: Features) -> dict[str, Any]:
    """Returns the arguments of `LLM` that enable recording; {} where it is not requested.

    Raises:
        UserError: The installed version does not support it.
    """
    if not config.enable_rollout_routing_replay:
        return {}
    if not features.routed_experts:
        raise UserError(
            f"rollout.enable_rollout_routing_replay=true: TensorRT-LLM {features.version} does not return the chosen "
            f"experts: its LLM has no {ENGINE_ARGUMENT}. {INSTEAD}."
        )
    return {
        ENGINE_ARGUMENT: True,
        "moe_config": {"backend": SEPARATED[0]},
        "scheduler_config": {"capacity_scheduler_policy": NO_EVICT},
    }
