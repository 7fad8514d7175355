"""Number of ranks that the dry run, `mrl plan` and `mrl rehearse` assume.

The first of: `--world-size`, the ranks started by a launcher, nodes x GPUs in the config's file name, the minimum of
the layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mrl.config.config import Config
from mrl.trainer.validation.parallel import build_parallel_layout


@dataclass(frozen=True)
class WorldSize:
    """Number of ranks of a run.

    Attributes:
        ranks: Number of ranks.
        why: Source of the number, for messages.
    """

    ranks: int
    why: str


def world_size(config: Config, file: str, asked: int | None, *, started: int = 1) -> WorldSize:
    """Returns the number of ranks that a run is for.

    Args:
        config: Settings of the run.
        file: Path of the config; its name may contain nodes x GPUs, as in `..._4x8_...`.
        asked: Value of `--world-size`; None if not given.
        started: Number of ranks in this process's job.
    """
    if asked is not None:
        return WorldSize(asked, "--world-size")
    if started > 1:
        return WorldSize(started, "those that the launcher started")
    named = re.search(r"_(\d{1,9})x(\d{1,9})(?=[_.])", Path(file).name)
    if named:
        return WorldSize(int(named[1]) * int(named[2]), f"{named[1]}x{named[2]} of the config's name")
    return WorldSize(build_parallel_layout(config, 1).min_world_size, "the fewest of this layout: --world-size")
