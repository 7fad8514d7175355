"""How many ranks a run is for, where a command only looks at it: the dry run, `mrl plan` and `mrl rehearse`.

Owns the rule: `--world-size`, else the ranks that a launcher started with this one, else nodes x GPUs of the config's
name, else the fewest that the layout needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mrl.config.config import Config
from mrl.trainer.validation.parallel import grid_of


@dataclass(frozen=True)
class WorldSize:
    """Ranks of a run.

    Attributes:
        ranks: How many.
        why: Who said so, in words.
    """

    ranks: int
    why: str


def world_size(config: Config, file: str, asked: int | None, *, started: int = 1) -> WorldSize:
    """The ranks that a run is for.

    Args:
        config: Of the run.
        file: Where it stands; its name may say nodes x GPUs, `..._4x8_...`.
        asked: `--world-size`.
        started: Ranks of the job that this process is one of.
    """
    if asked is not None:
        return WorldSize(asked, "--world-size")
    if started > 1:
        return WorldSize(started, "those that the launcher started")
    named = re.search(r"_(\d{1,9})x(\d{1,9})(?=[_.])", Path(file).name)
    if named:
        return WorldSize(int(named[1]) * int(named[2]), f"{named[1]}x{named[2]} of the config's name")
    return WorldSize(grid_of(config, 1).fewest_ranks, "the fewest of this layout: --world-size")
