"""Table of the vLLM checks: those of `trtllm_table.py` that apply, one for experts, and their remedies."""

from __future__ import annotations

from dataclasses import replace

from acceptance.page import Page
from acceptance.result import Check
from acceptance.trtllm_table import ASLEEP, CUT, FP8, GRAPHS, PLAIN, SETTINGS
from acceptance.trtllm_table import CHECKS as OF_TRTLLM

EXPERTS = "experts"
"""Session with an MoE model."""

NOT_OF_VLLM = ("qkv", "pause")
"""Checks that inspect TensorRT-LLM; vLLM's own tensors are compared bit by bit in each weight sync (by checksum)."""

REMEDIES = {
    "start": "read the log; compare the versions in the report with setup.py's extra [vllm]",
    "sleep": "rollout.free_cache_engine=false if both fit at the same time, otherwise rollout.name=native",
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
        "For an MoE model: does its routing record reproduce its log-probabilities?",
        "the actor would route tokens to wrong experts",
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
