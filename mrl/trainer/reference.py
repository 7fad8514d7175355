"""Lifecycle of the KL reference: initial weights, periodic updates from the actor, resume.

A reference copied from the actor is saved as `checkpoints/reference-<step>`. In memory it is a second set of weights
for the actor's modules (`megatron/actor.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist

from mrl.config.config import ReferenceConfig
from mrl.distributed.collectives import raise_on_all_ranks


class Reference:
    """KL reference of the run; every method except `drop_unused` is collective over the job.

    Attributes:
        path: Hugging Face folder with the reference's weights, or PEFT folder with its adapters; None before `start`.
    """

    def __init__(
        self,
        config: ReferenceConfig,
        folder: Path,
        *,
        needed: bool,
        initial: str | None,
        load: Callable[[str], None],
        take: Callable[[], None],
        export: Callable[[Path], None],
    ) -> None:
        """Loads nothing yet.

        Args:
            config: Config section `reference`.
            folder: Folder of the run's checkpoints.
            needed: True if the algorithm uses a reference; otherwise nothing is loaded or written.
            initial: Hugging Face folder with the actor's weights at step 0; None if there is no such folder.
            load: Collective function that fills the reference's tensors from such a folder.
            take: Collective function that copies the current actor into the reference.
            export: Collective function that writes the current actor as such a folder.
        """
        self.path: str | None = None
        self._config, self._folder, self._needed, self._initial = config, folder, needed, initial
        self._load, self._take, self._export = load, take, export

    @property
    def stored_path(self) -> str | None:
        """Path as stored in checkpoints: only the name for a folder inside the run, so that the run can be moved."""
        return Path(self.path).name if self.path and Path(self.path).parent == self._folder else self.path

    def start(self, step: int) -> None:
        """Collective over the job: loads `reference.path`, or copies the actor as it is after `step`."""
        if not self._needed:
            return
        if self._config.path is not None:
            self.path = self._config.path
            self._load(self.path)
        elif step == 0 and self._initial is not None:
            self.path = self._initial
            self._take()
        else:
            self._freeze(step)

    def update(self, step: int) -> None:
        """Collective over the job: copies the current actor every `reference.update_interval` steps."""
        interval = self._config.update_interval
        if self._needed and interval and step % interval == 0:
            self._freeze(step)

    def resume(self, step: int, path: str | None) -> str:
        """Collective over the job: loads the reference of a checkpoint, or a new one if the config names another.

        Args:
            step: Step of the checkpoint.
            path: Value of `stored_path` in the checkpoint.

        Returns:
            Log line about a changed reference; "" if it is unchanged.
        """
        if path is not None and (self._folder / path).is_dir():
            path = str(self._folder / path)
        self.path = path
        configured = self._config.path
        if not self._needed:
            return ""
        if path is None or (configured not in (None, path) and not self._config.update_interval):
            self.start(step)
            return f"the KL reference is '{self.path}' from now on"
        self._load(path)
        return ""

    def drop_unused(self, used: Collection[str | None], discard: Callable[[Path], None]) -> None:
        """Discards the reference folders that no checkpoint uses; call it on one rank.

        Args:
            used: Values of `stored_path` in all checkpoints.
            discard: Function that removes a folder.
        """
        names = {Path(record).name for record in used if record is not None}
        for folder in self._folder.glob("reference-*"):
            if folder.name not in names:
                discard(folder)

    def _freeze(self, step: int) -> None:
        folder = self._folder / f"reference-{step:08d}"
        with raise_on_all_ranks():
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed before its next checkpoint
        self._export(folder)
        self.path = str(folder)
        self._take()
