"""Report of a rehearsal, shown on the terminal and written to rehearsal.json."""

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
"""Row of the layout table with the total number of ranks."""
OUTCOME_STYLE = {"passed": "green", "failed": "red", "not covered": "yellow"}
GB = 1e9
TABLE_STYLE: dict[str, Any] = {"title_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False}

NOT_COVERED = (
    "CUDA kernels, NCCL and TransformerEngine: ranks were CPU processes over gloo with Megatron's local layers",
    "memory and speed at full size: see mrl plan",
    "learning: a random model of a few thousand parameters took one or two steps",
)


@dataclass(frozen=True)
class Stage:
    """Row of the report.

    Attributes:
        name: Name of the stage.
        outcome: Result of the stage.
        seconds: Wall-clock time, s; for a part of a run, rank 0's time in it.
        detail: Result in words.
    """

    name: str
    outcome: Outcome
    seconds: float
    detail: str = ""


@dataclass
class Report:
    """Results of a rehearsal.

    Attributes:
        config: Config file.
        world_size: Ranks of the real run.
        engine: Engine that sampled; if it is not the config's, `not_covered` gives the reason.
        layout: Dimension -> (real, reduced), in ranks.
        model: Size -> (real, reduced).
        settings: Dotted config key -> (real, reduced), where they differ.
        stages: Rows of the stages, in order.
        warnings: Warnings for the real run.
        not_covered: Aspects that a rehearsal on a CPU does not cover.
        ranks: Number of ranks of each of the two runs.
        seconds: Duration of the rehearsal, s.
        cpu_s: CPU time of all ranks, s.
        peak_bytes: Peak memory of all processes of a run, bytes.
        metrics: Metrics of the last step.
        finished: True once the last stage was reached.
        plan_refuses: Reason for which `mrl plan` refuses the real run; "" if it does not.
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
    plan_refuses: str = ""

    @property
    def passed(self) -> bool:
        """True if the last stage was reached, none failed, and `mrl plan` accepts the real run."""
        return not self.plan_refuses and self.finished and all(stage.outcome != "failed" for stage in self.stages)

    def write(self, folder: Path) -> None:
        """Writes rehearsal.json to `folder`."""
        replace_file(folder / FILE, json.dumps({"passed": self.passed, **asdict(self)}, indent=1).encode())

    def show(self, console: Console) -> None:
        """Prints layouts, stages and warnings as tables."""
        for title, rows in (("layout, ranks", self.layout), ("model and stages", self.model)):
            if rows:
                console.print(_comparison_table(title, rows, flag_ones=rows is self.layout))
        table = Table("stage", "", "s", "result", title="stages", **TABLE_STYLE)
        for stage in self.stages:
            style = OUTCOME_STYLE[stage.outcome]
            table.add_row(stage.name, f"[{style}]{stage.outcome}[/]", f"{stage.seconds:.1f}", stage.detail)
        console.print(table)
        for title, lines in (("warnings", self.warnings), ("not covered", self.not_covered)):
            if lines:
                console.print(f"{title}:")
            for line in lines:
                console.print(f"  - {line}", markup=False, soft_wrap=True)
        outcome = "passed" if self.passed else "failed"
        if self.plan_refuses and self.finished:
            outcome = "all stages passed, but mrl plan refuses the real run (see below);"
        console.print(
            f"{outcome} in {self.seconds:.0f} s; the ranks took {self.cpu_s:.0f} s of "
            f"CPU time and at most {self.peak_bytes / GB:.1f} GB of memory",
            soft_wrap=True,
        )


def _comparison_table(title: str, rows: dict[str, tuple[Any, Any]], *, flag_ones: bool) -> Table:
    table = Table("", "asked", "here", title=title, **TABLE_STYLE)
    for name, (real, reduced) in rows.items():
        lost = flag_ones and name != ALL and real > 1 and reduced == 1
        table.add_row(name, str(real), f"[yellow]{reduced}, not kept[/]" if lost else str(reduced))
    return table
