"""The reference of the KL: which weights it has, from when on, and where they are kept so that a resume finds them.

Owns the choice and the folders `checkpoints/reference-<step>`. The weights themselves are a second set in the actor's
modules (`megatron/actor.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch.distributed as dist

from mrl.config.config import ReferenceConfig
from mrl.distributed.collectives import together


class Reference:
    """Of one run; every rank holds one and calls each method together.

    Attributes:
        path: Hugging Face folder that holds it; None before there is one.
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
        """No reference yet.

        Args:
            config: Where it comes from.
            folder: The run's checkpoints.
            needed: Whether the algorithm asks for one; otherwise nothing is loaded or written.
            initial: Hugging Face folder that the actor of step 0 was read from; None: it is in none.
            load: Collective over the job: fills the reference's tensors from a Hugging Face folder.
            take: Fills them from the actor of now.
            export: Collective over the job: writes the actor as such a folder.
        """
        self.path: str | None = None
        self._config, self._folder, self._needed, self._initial = config, folder, needed, initial
        self._load, self._take, self._export = load, take, export

    @property
    def record(self) -> str | None:
        """The path as commits have it: one in the run folder by its name, so that the folder can be moved."""
        return Path(self.path).name if self.path and Path(self.path).parent == self._folder else self.path

    def start(self, step: int) -> None:
        """Collective over the job: the first one is `reference.path`, else the actor as it is after `step`."""
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
        """Collective over the job: becomes the actor of now where `reference.update_interval` says so."""
        interval = self._config.update_interval
        if self._needed and interval and step % interval == 0:
            self._freeze(step)

    def resume(self, step: int, path: str | None) -> str:
        """Collective over the job: the one of a commit; a new one where that had none or the config names another.

        Args:
            step: Of the commit.
            path: As the commit has it (`record`).

        Returns:
            What changed, in words; "" where nothing did.
        """
        if path is not None and (self._folder / path).is_dir():
            path = str(self._folder / path)
        self.path = path
        named = self._config.path
        if not self._needed:
            return ""
        if path is None or (named not in (None, path) and not self._config.update_interval):
            self.start(step)
            return f"the reference of the KL from here on is '{self.path}'"
        self._load(path)
        return ""

    def drop_unused(self, used: Collection[str | None], discard: Callable[[Path], None]) -> None:
        """Gives the folders that are in no commit's `record` to `discard`; for one rank.

        Args:
            used: The commits' records.
            discard: Removes a folder.
        """
        names = {Path(record).name for record in used if record is not None}
        for folder in self._folder.glob("reference-*"):
            if folder.name not in names:
                discard(folder)

    def _freeze(self, step: int) -> None:
        folder = self._folder / f"reference-{step:08d}"
        with together():
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed before its next commit
        self._export(folder)
        self.path = str(folder)
        self._take()
