"""How much memory the teachers of a distillation take on a rank of a pipeline stage.

Owns where their weights wait, what an update needs of them, and what is kept of what they said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.resharding.copy_op import ITEM_BYTES
from mrl.resharding.megatron import padded_vocab
from mrl.trainer.resolve import Resolved

LOGITS = 4
"""Of a chunk, at a time: both sides' log-probabilities, their difference, and a product with it."""
FP32_BYTES = 4


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of all teachers; 0 of each where there is none.

    Attributes:
        waiting: Weights, in host memory.
        turn: On the device while the largest teacher with layers of its own has its turn.
        states: Final hidden states of a step's tokens, and of a minibatch's once more, in host memory.
        output: Output weights that an update compares with, on the device, and a chunk of logits of both sides.
    """

    waiting: int = 0
    turn: int = 0
    states: int = 0
    output: int = 0

    @property
    def in_host(self) -> dict[str, int]:
        """Term -> bytes in host memory."""
        return {"teachers": self.waiting, "teachers' hidden states": self.states}

    @property
    def its_turn(self) -> dict[str, int]:
        """Term -> bytes on the device in the turn of one with layers of its own."""
        return {"a teacher's weights": self.turn}

    @property
    def compared(self) -> dict[str, int]:
        """Term -> bytes that an update needs of them on the device."""
        return {"comparison with teachers": self.output}


def teacher_memory(found: Resolved, stage: int, weights: Sequence[int]) -> TeacherMemory:
    """Of a rank of a stage.

    Args:
        found: The run.
        stage: Its pipeline stage.
        weights: Bytes of each teacher's weights there.
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
