"""The section `reward.model`. Which of its fields go together is checked by `trainer/validation/reward_model.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from mrl.config.paths import FilePath


@dataclass(frozen=True)
class RewardModelConfig:
    """A reward model: what its head gives at the last token of prompt and response, in the actor's layout."""

    path: Optional[FilePath] = None
    """Hugging Face folder of a sequence classifier with one label (`score.weight`), of any family of the actor's kind;
    or its name on the hub. null: none."""
    weight: float = 1.0
    """Factor of its score in the reward; 0: measured as `reward/model/mean`, and not part of it."""
    retokenize: Optional[bool] = None
    """It reads the text anew, by its own tokenizer and chat template; false: the actor's token ids; null: these where
    both tokenizers have the same vocabulary."""
