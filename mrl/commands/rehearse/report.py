"""What a rehearsal found: on the terminal, and as rehearsal.json.

Owns `Report` and how it is shown. What is measured is said by `rehearse.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

from mrl.checkpoint.io.atomic_files import replace_file

FILE = "rehearsal.json"
Outcome = Literal["passed", "failed", "not covered"]
ALL = "all"
"""The row of a layout that says how many ranks there are."""
STYLE = {"passed": "green", "failed": "red", "not covered": "yellow"}
GB = 1e9
LOOK: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False}

NOT_COVERED = (
    "CUDA kernels, NCCL and TransformerEngine: ranks were CPU processes over gloo with Megatron's local layers",
    "memory and speed at full size: see mrl plan",
    "learning: a random model of a few thousand parameters took one or two steps",
)


@dataclass(frozen=True)
class Stage:
    """One row of the report.

    Attributes:
        seconds: Wall clock; a part of a run is as long as rank 0 was in it.
        detail: What it showed, in words.
    """

    name: str
    outcome: Outcome
    seconds: float
    detail: str = ""


@dataclass
class Report:
    """Everything that a rehearsal has to say.

    Attributes:
        config: The file.
        world_size: Ranks of the real run.
        engine: What sampled; where it is not the run's own, `not_covered` says why.
        layout: Dimension -> (asked, rehearsed), in ranks.
        model: Size -> (asked, rehearsed).
        settings: Dotted key of the config -> (asked, rehearsed), where they differ.
        warnings: What the user should know before a real run.
        not_covered: What a rehearsal on a CPU cannot show.
        ranks: Of the rehearsal's two runs.
        cpu_s: Processor time of all ranks.
        peak_bytes: Most memory that all processes of a run held together.
        metrics: Of the last step.
        finished: Whether all stages were reached.
    """

    config: str
    world_size: int = 0
    engine: str = ""
    layout: dict[str, tuple[int, int]] = field(default_factory=dict)
    model: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=lambda: list(NOT_COVERED))
    ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    finished: bool = False

    @property
    def passed(self) -> bool:
        """Whether the last stage was reached and none failed."""
        return self.finished and all(stage.outcome != "failed" for stage in self.stages)

    def write(self, folder: Path) -> None:
        """rehearsal.json in `folder`."""
        replace_file(folder / FILE, json.dumps({"passed": self.passed, **asdict(self)}, indent=1).encode())

    def show(self, console: Console) -> None:
        """Layouts, stages and what to know, as tables."""
        for title, rows in (("layout, ranks", self.layout), ("model and stages", self.model)):
            if rows:
                console.print(_compared(title, rows, flag_ones=rows is self.layout))
        table = Table("stage", "", "s", "what it showed", title="stages", **LOOK)
        for stage in self.stages:
            style = STYLE[stage.outcome]
            table.add_row(stage.name, f"[{style}]{stage.outcome}[/]", f"{stage.seconds:.1f}", stage.detail)
        console.print(table)
        for title, lines in (("warnings", self.warnings), ("not covered", self.not_covered)):
            if lines:
                console.print(f"{title}:")
            for line in lines:
                console.print(f"  - {line}", markup=False, soft_wrap=True)
        console.print(
            f"{'passed' if self.passed else 'failed'} in {self.seconds:.0f} s; the ranks took {self.cpu_s:.0f} s of "
            f"processor time and at most {self.peak_bytes / GB:.1f} GB of memory",
            soft_wrap=True,
        )


def _compared(title: str, rows: dict[str, tuple[Any, Any]], *, flag_ones: bool) -> Table:
    table = Table("", "asked", "here", title=title, **LOOK)
    for name, (asked, used) in rows.items():
        lost = flag_ones and name != ALL and asked > 1 and used == 1
        table.add_row(name, str(asked), f"[yellow]{used}, not kept[/]" if lost else str(used))
    return table
