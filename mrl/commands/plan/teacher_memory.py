"""Memory of distillation teachers on a rank of a pipeline stage: weights, hidden states, and terms of the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.megatron import padded_vocab
from mrl.trainer.resolve import Resolved

LOGITS = 4
"""Number of fp32 tensors per chunk of logits: log-probabilities of both sides, their difference, a product with it."""
FP32_BYTES = 4


@dataclass(frozen=True)
class TeacherMemory:
    """Memory of all teachers, bytes.

    Attributes:
        waiting: Weights, in host memory.
        turn: Weights on the device while the largest teacher with layers of its own runs.
        states: Final hidden states of a step's tokens and a second copy of a minibatch's, in host memory.
        output: Output weights and one chunk of both sides' logits, on the device in an update.
    """

    waiting: int = 0
    turn: int = 0
    states: int = 0
    output: int = 0

    @property
    def in_host(self) -> dict[str, int]:
        """Terms in host memory -> bytes."""
        return {"teachers": self.waiting, "teachers' hidden states": self.states}

    @property
    def during_forward(self) -> dict[str, int]:
        """Terms on the device while a teacher with layers of its own runs -> bytes."""
        return {"a teacher's weights": self.turn}

    @property
    def during_update(self) -> dict[str, int]:
        """Terms on the device in an update -> bytes."""
        return {"comparison with teachers": self.output}


def teacher_memory(found: Resolved, stage: int, weights: Sequence[int]) -> TeacherMemory:
    """Returns the memory of all teachers on a rank.

    Args:
        found: Resolved run.
        stage: Pipeline stage of the rank.
        weights: Size of each teacher's weights on this stage, bytes.
    """
    config, grid, teachers = found.config, found.grid, found.teachers
    if not teachers:
        return TeacherMemory()
    same = [teacher == found.arch for teacher in teachers]
    states = output = 0
    if stage == grid.pp - 1 and not config.distillation.distillation_loss.is_sampled:
        item, train = ITEM_BYTES[config.model.dtype], config.train
        samples = (train.batch_size + (train.minibatch_size or train.batch_size)) * config.rollout.n
        tokens = math.ceil(samples / grid.dp) * config.rollout.response_length
        states = tokens * max(teacher.hidden_size for teacher in teachers) * item
        rows = padded_vocab(found.arch, grid.tp) // grid.tp
        output = sum(rows * teacher.hidden_size * item for teacher in teachers)
        output += LOGITS * FP32_BYTES * rows * min(config.actor.logprob_chunk_tokens, tokens)
    return TeacherMemory(
        waiting=sum(weights),
        turn=max((size for size, is_same in zip(weights, same, strict=True) if not is_same), default=0),
        states=states,
        output=output,
    )
