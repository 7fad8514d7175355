"""The checks of vLLM: those of every engine (`trtllm_table.py`) and one of its experts; what to do when one fails."""

from __future__ import annotations

from dataclasses import replace

from acceptance.page import Page
from acceptance.result import Check
from acceptance.trtllm_table import ASLEEP, CUT, FP8, GRAPHS, PLAIN, SETTINGS
from acceptance.trtllm_table import CHECKS as OF_TRTLLM

EXPERTS = "experts"
"""Session on a mixture of experts."""

NOT_OF_VLLM = ("qkv", "pause")
"""They look into TensorRT-LLM; vLLM's own tensors are compared bit by bit in each refit (its checksum)."""

REMEDIES = {
    "start": "read the log; the page has the versions, and setup.py's extra [vllm] those that mrl is written for",
    "sleep": "rollout.free_cache_engine=false where both fit at the same time, else rollout.name=native",
    "logprobs": "train on the actor's own: algorithm.rollout_correction.bypass_mode=false; if 'refit' fails too, "
    "do not train",
}

CHECKS: dict[str, Check] = {
    **{
        name: replace(check, remedy=REMEDIES.get(name, check.remedy))
        for name, check in OF_TRTLLM.items()
        if name not in (*NOT_OF_VLLM, "end")
    },
    "experts": Check(
        EXPERTS,
        "Are the experts that it tells of each token those that give its log-probabilities, on a mixture of experts?",
        "the actor would route tokens by the experts of others",
        "actor.router_replay=recompute with algorithm.rollout_correction.bypass_mode=false, which replays the actor's",
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
