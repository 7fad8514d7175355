"""Maps phases and functions of the training loop to the stages that a rehearsal reports."""

from __future__ import annotations

from typing import Any

from mrl.distributed.local_ranks import RankError

STAGES = ("build", "refit", "rollout", "reward", "update", "checkpoint")
"""Stages of the first run, in order."""
STAGE_OF_PHASE = {
    "update_weights": "refit",
    "gen": "rollout",
    "reward_model": "reward",
    "reward": "reward",
    "testing": "rollout",
    "pack": "update",
    "old_log_prob": "update",
    "ref": "update",
    "teacher": "update",
    "values": "update",
    "adv": "update",
    "update_critic": "update",
    "update_actor": "update",
    "warm_start": "update",
    "save_checkpoint": "checkpoint",
}
STAGE_OF_FUNCTION = {
    ("trainer.py", "__init__"): "build",
    ("actor_weights.py", "load_initial"): "build",
    ("reference.py", "start"): "build",
    ("critic.py", "start"): "build",
    ("teachers.py", "load"): "build",
    ("rollout_worker.py", "sync_weights_if_stale"): "refit",
    ("prompt_assignment.py", "generate"): "rollout",
    ("scorer.py", "score"): "reward",
    ("reward_model.py", "__init__"): "build",
    ("reward_model.py", "score"): "reward",
    ("train.py", "optimizer_step"): "update",
    ("train.py", "reinforcement_step"): "update",
    ("checkpointing.py", "write"): "checkpoint",
    ("checkpointing.py", "finish_pending"): "checkpoint",
    ("checkpoint.py", "begin"): "checkpoint",
    ("checkpoint.py", "finish"): "checkpoint",
}
"""(file, function) on a rank's stack -> stage, for errors without a phase."""


def seconds_by_stage(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns stage -> seconds, from rows of timings.jsonl; an evaluation's time besides sampling counts as refit."""
    spent: dict[str, float] = {}
    for row in rows:
        times = {key.removeprefix("timing_s/"): value for key, value in row.items() if key.startswith("timing_s/")}
        for phase, seconds in times.items():
            outer, _, inner = phase.partition("/")
            if inner and outer == "testing" and inner in STAGE_OF_PHASE:
                spent[STAGE_OF_PHASE[inner]] = spent.get(STAGE_OF_PHASE[inner], 0.0) + seconds
                spent["refit"] = spent.get("refit", 0.0) - seconds
            elif not inner and phase in STAGE_OF_PHASE:
                stage = "refit" if phase == "testing" else STAGE_OF_PHASE[phase]
                spent[stage] = spent.get(stage, 0.0) + seconds
    return spent


def stage_of(error: RankError) -> str:
    """Returns the stage of the first run in which a rank failed."""
    phases = error.at.rpartition(", ")[2].split("/")
    if error.at and phases[-1] in STAGE_OF_PHASE:
        return STAGE_OF_PHASE[phases[-1]]
    known = [STAGE_OF_FUNCTION[frame] for frame in error.frames if frame in STAGE_OF_FUNCTION]
    return known[-1] if known else "build"
