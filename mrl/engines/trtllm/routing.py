"""Which experts TensorRT-LLM's LLM API sent each token to: how that is asked, and what does not go together with it.

Owns the arguments of `LLM` and of a request; `sampling.py` makes what comes back a part of a rollout. It was read in
`_torch/route_capture.py` of the main branch (September 2026, pull request 18397), which keeps what the
router chose before a load balancer renumbers it. `TorchLlmArgs`, `SamplingParams` and `CompletionOutput` of 1.2.1 have
no such field. Where it is missing, `actor.router_replay=recompute` replays the actor's own choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mrl.config.config import RolloutConfig
from mrl.engines.trtllm.engine_kwargs import KEY, given_by
from mrl.engines.trtllm.features import Features
from mrl.engines.trtllm.package_signature import is_installed, lacks
from mrl.errors import UserError

ENGINE_ARGUMENT = "enable_return_routed_experts"
REQUEST_ARGUMENT = "return_routed_experts"
SEPARATED = ("CUTLASS", "DEEPGEMM")
"""`moe_config.backend` whose kernels are given the experts; the first is taken where none is set. The others choose
inside a kernel, where nothing sees it."""
NO_EVICT = "GUARANTEED_NO_EVICT"
"""`scheduler_config.capacity_scheduler_policy` under which no request is paused. One that is paused reads its tokens
again, and the positions of those that follow are counted on as if it had not."""
INSTEAD = (
    "Set it to false, and actor.router_replay=recompute with algorithm.rollout_correction.bypass_mode=false, which "
    "replays the actor's own choice with any engine; or use rollout.name=native"
)


def is_unknown() -> bool:
    """Whether the installed version is known not to tell; 1.2 where none is installed."""
    return not is_installed() or lacks(ENGINE_ARGUMENT)


def refusals(rollout: RolloutConfig) -> Iterator[str]:
    """A message for each argument in `rollout.engine_kwargs.trtllm` under which the experts cannot be told."""
    if not rollout.enable_rollout_routing_replay:
        return
    given = given_by(rollout)
    said = "rollout.enable_rollout_routing_replay=true"
    if given.get("speculative_config"):
        yield f"{said} with {KEY}.speculative_config: TensorRT-LLM tells no experts of tokens that were drafted."
    for section, name, known in (
        ("moe_config", "backend", SEPARATED),
        ("scheduler_config", "capacity_scheduler_policy", (NO_EVICT,)),
    ):
        inside = given.get(section)
        value = inside.get(name) if isinstance(inside, dict) else None
        if value is not None and value not in known:
            why = "it chooses experts inside a kernel" if section == "moe_config" else "a paused request loses count"
            yield f"{said} with {KEY}.{section}.{name}={value}: {why}. Set it to {' or '.join(known)}, or leave it out."


def engine_arguments(config: RolloutConfig, features: Features) -> dict[str, Any]:
    """Arguments of `LLM`; {} where nothing is to be told.

    Raises:
        UserError: The installed version cannot tell.
    """
    if not config.enable_rollout_routing_replay:
        return {}
    if not features.routed_experts:
        raise UserError(
            f"rollout.enable_rollout_routing_replay=true: TensorRT-LLM {features.version} does not tell which experts "
            f"it chose: its LLM has no {ENGINE_ARGUMENT}. {INSTEAD}."
        )
    return {
        ENGINE_ARGUMENT: True,
        "moe_config": {"backend": SEPARATED[0]},
        "scheduler_config": {"capacity_scheduler_policy": NO_EVICT},
    }
