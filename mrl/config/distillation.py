"""The section `distillation`, with verl's names, and what its loss modes are.

Owns its fields and their defaults. Which of them go together is checked by `trainer/validation/distillation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from mrl.config.paths import FilePath

SAMPLED = ("k1", "k2", "k3", "abs")
"""Loss modes of the sampled token alone: the teacher gives its log-probability, and nothing else of it is kept."""

TOP_K = "forward_kl_topk"


@dataclass(frozen=True)
class TeacherConfig:
    """One teacher."""

    key: Optional[str] = None
    """Prompts with this in the column `distillation.teacher_key` are this teacher's; null where it is the only one."""
    model_path: Optional[FilePath] = None
    """Hugging Face folder with the student's tokenizer; or its name on the hub. null: a preset."""
    preset: Optional[str] = None
    """As `model.preset`, with the student's vocabulary: a shape with random weights, to plan and rehearse."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """As `model.overrides`."""


@dataclass(frozen=True)
class DistillationLossConfig:
    """How the student is drawn to the teacher; on the student's own samples, at `rollout.temperature`."""

    loss_mode: Literal["k1", "k2", "k3", "abs", "forward_kl_topk", "reverse_kl", "forward_kl", "jsd"] = "k3"
    """k1, k2, k3, abs: estimates at the sampled token (`algorithm.kl_estimator`); forward_kl_topk: over the teacher's
    `topk` tokens; reverse_kl, forward_kl, jsd: exact, over the whole vocabulary."""
    topk: int = 32
    """Tokens of forward_kl_topk."""
    beta: float = 0.5
    """Of jsd, (0, 1): the teacher's weight in the mixture; near 0 as forward_kl, near 1 as reverse_kl."""
    use_task_rewards: bool = True
    """Add it to the algorithm's loss; false: it is all that is minimised."""
    distillation_loss_coef: float = 1.0
    """Its factor beside the algorithm's loss."""
    loss_max_clamp: Optional[float] = None
    """A token's loss is kept between minus this and this; beyond it has no gradient. null: not."""
    log_prob_min_clamp: Optional[float] = None
    """Log-probabilities of forward_kl_topk are raised to this, nats; null: not."""
    use_policy_gradient: bool = False
    """The negative of a token's loss is its advantage in a clipped surrogate, in place of a loss with a gradient of its
    own; of k1, k2, k3 and abs."""
    clip_ratio_low: float = 0.2
    """As `algorithm.clip_low`, of that surrogate; its `dual_clip` is 3."""
    clip_ratio_high: float = 0.2
    """As `algorithm.clip_high`, of that surrogate."""

    @property
    def is_sampled(self) -> bool:
        """Whether the sampled token's log-probability is all that is asked of a teacher."""
        return self.loss_mode in SAMPLED


@dataclass(frozen=True)
class DistillationConfig:
    """On-policy distillation (verl's names): teachers score what the student samples."""

    enabled: bool = False
    """Whether there are teachers."""
    teacher_models: list[TeacherConfig] = field(default_factory=list)
    """The teachers; of the student's layers, or of others of its kind."""
    teacher_key: str = "data_source"
    """Column of the data row whose value names the teacher, where there are several."""
    distillation_loss: DistillationLossConfig = field(default_factory=DistillationLossConfig)
