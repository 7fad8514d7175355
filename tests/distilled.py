"""How each field of `distillation` shows, for `test_fields.py`: what sets it, what is on both sides, a refusal."""

from typing import Any

LOSS = "distillation.distillation_loss"
TEACHERS = "distillation.teacher_models"
SHAPE = (
    "preset: qwen2_tiny, overrides: {hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16, "
    "num_attention_heads: 2, num_key_value_heads: 2}"
)
ON = ("distillation.enabled=true", f"{TEACHERS}=[{{{SHAPE}}}]")
ROUTED = ("distillation.enabled=true", f"{TEACHERS}=[{{key: addition, {SHAPE}}}, {{key: other, {SHAPE}}}]")
TOP_K = (*ON, f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=4")
BY_GRADIENT = (*ON, "actor.lr=0.1", "actor.ppo_epochs=2", f"{LOSS}={{use_policy_gradient: true, loss_mode: k1}}")


def _of(*changed: str, given: tuple[str, ...] = ON, **more: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return changed, {"given": given, **more}


ROWS = {
    "distillation.enabled": _of(*ON, given=()),
    TEACHERS: _of(f"{TEACHERS}=[{{{SHAPE}}}, {{{SHAPE}}}]", refused="key is null"),
    f"{TEACHERS}[].key": _of(
        f"{TEACHERS}[0].key=elsewhere", given=ROUTED, refused="the keys in distillation.teacher_models are"
    ),
    f"{TEACHERS}[].model_path": _of(f"{TEACHERS}=[{{model_path: nowhere}}]", refused="nowhere is not a folder"),
    f"{TEACHERS}[].preset": _of(f"{TEACHERS}[0].preset=llama_tiny"),
    f"{TEACHERS}[].overrides": _of(f"{TEACHERS}[0].overrides.intermediate_size=32"),
    "distillation.teacher_key": _of(
        "distillation.teacher_key=answer", given=ROUTED, refused="the keys in distillation.teacher_models are"
    ),
    f"{LOSS}.loss_mode": _of(f"{LOSS}.loss_mode=reverse_kl"),
    f"{LOSS}.topk": _of(f"{LOSS}.topk=2", given=TOP_K),
    f"{LOSS}.beta": _of(f"{LOSS}.beta=0.1", given=(*ON, f"{LOSS}.loss_mode=jsd")),
    f"{LOSS}.use_task_rewards": _of(f"{LOSS}.use_task_rewards=false"),
    f"{LOSS}.distillation_loss_coef": _of(f"{LOSS}.distillation_loss_coef=0.1"),
    f"{LOSS}.loss_max_clamp": _of(f"{LOSS}.loss_max_clamp=0.000001"),
    f"{LOSS}.log_prob_min_clamp": _of(f"{LOSS}.log_prob_min_clamp=-0.1", given=TOP_K),
    f"{LOSS}.use_policy_gradient": _of(f"{LOSS}.use_policy_gradient=true"),
    f"{LOSS}.clip_ratio_low": _of(f"{LOSS}.clip_ratio_low=0.001", given=BY_GRADIENT),
    f"{LOSS}.clip_ratio_high": _of(f"{LOSS}.clip_ratio_high=0.001", given=BY_GRADIENT),
}
"""By key; the entries of the list as `teacher_models[]`."""
