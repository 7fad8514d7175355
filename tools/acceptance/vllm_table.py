"""Checks of vLLM: those of every engine (`trtllm_table.py`) and one for MoE routing, with remedies for failures."""

from __future__ import annotations

from dataclasses import replace

from acceptance.page import Page
from acceptance.result import Check
from acceptance.trtllm_table import ASLEEP, CUT, FP8, GRAPHS, PLAIN, SETTINGS
from acceptance.trtllm_table import CHECKS as OF_TRTLLM

EXPERTS = "experts"
"""Session with a MoE model."""

NOT_OF_VLLM = ("qkv", "pause")
"""Checks that inspect TensorRT-LLM's internals; vLLM's tensors are compared bitwise in each weight sync (checksum)."""

REMEDIES = {
    "start": "read the log; compare the versions on the page with those of setup.py's extra [vllm]",
    "sleep": "rollout.free_cache_engine=false where both fit at the same time, else rollout.name=native",
    "logprobs": "train on the actor's own log-probabilities: algorithm.rollout_correction.bypass_mode=false; if "
    "'refit' fails too, do not train",
}

CHECKS: dict[str, Check] = {
    **{
        name: replace(check, remedy=REMEDIES.get(name, check.remedy))
        for name, check in OF_TRTLLM.items()
        if name not in (*NOT_OF_VLLM, "end")
    },
    "experts": Check(
        EXPERTS,
        "Do the experts that it returns for each token of a MoE model reproduce the token's log-probability?",
        "the actor would route tokens to the experts of other tokens",
        "use actor.router_replay=recompute with algorithm.rollout_correction.bypass_mode=false, which replays the "
        "actor's own choice",
    ),
    "end": OF_TRTLLM["end"],
}

SESSIONS: dict[str, tuple[str, ...]] = {
    **{name: SETTINGS[name] for name in (PLAIN, CUT, GRAPHS, ASLEEP, FP8)},
    EXPERTS: (
        "rollout.enforce_eager=true",
        "rollout.free_cache_engine=true",
        "rollout.enable_rollout_routing_replay=true",
        "actor.router_replay=rollout",
    ),
}

PAGE = Page(
    "vLLM with mrl",
    "acceptance-vllm",
    CHECKS,
    {"native": "the control, mrl's own (`rollout.name=native`)", "vllm": "`rollout.name=vllm`"},
)
