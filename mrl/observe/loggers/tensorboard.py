"""TensorBoard event files in the run folder: all metrics, samples as text.

Owns the event files. Warm start and reinforcement learning count their own steps, so each is a TensorBoard run of its
own (tensorboard/warm_start, tensorboard/train). On resume `purge_step` hides what lies beyond the resumed step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mrl.errors import UserError
from mrl.observe.loggers.base import Logger, Opening, Phase

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Logger):
    """Wanted with `observe.tensorboard`."""

    def __init__(self, opening: Opening) -> None:
        """Opens no file before the first value."""
        self._opening = opening
        self._writers: dict[str, SummaryWriter] = {}

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        writer = self._writer(phase)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prompt, response and reward as indented text, so that nothing in them is markup."""
        blocks = [f"reward {row['reward']}\n{row['prompt']}{row['response']}" for row in rows]
        text = "\n\n---\n\n".join("\n".join(f"    {line}" for line in block.splitlines()) for block in blocks)
        self._writer(phase).add_text(f"samples/{phase}", text, step)

    def close(self) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, phase: Phase) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        name = "warm_start" if phase == "warm_start" else "train"
        if name not in self._writers:
            resumed = self._opening.resume_step
            folder = self._opening.run.tensorboard / name
            self._writers[name] = SummaryWriter(str(folder), purge_step=0 if resumed is None else resumed + 1)
        return self._writers[name]


def open_tensorboard(opening: Opening) -> TensorBoard | None:
    """The logger where `observe.tensorboard` is set."""
    if not opening.config.observe.tensorboard:
        return None
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise UserError(
            "observe.tensorboard is true, and the package 'tensorboard' is not installed. "
            "Run `pip install tensorboard`, or set observe.tensorboard=false."
        ) from error
    return TensorBoard(opening)


LOGGER = open_tensorboard
