"""Terminal output: progress, the main metrics, and sampled responses at evaluations.

`observe.console` "rich" draws a live panel and falls back to "plain" (one line per step) where the output is not a
terminal or its encoding lacks the characters. Control characters in model output are shown as escapes, so that a
response cannot send commands to the terminal.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mrl.observability.data_sources import headlines
from mrl.observability.loggers.base import Logger, Opening, Phase
from mrl.observability.text_format import format_duration, format_number, visible

WATCHED: tuple[tuple[str, str], ...] = (
    ("reward", "critic/score/mean"),
    ("val accuracy", "val/accuracy"),
    ("response length", "response_length/mean"),
    ("ppo kl", "actor/ppo_kl"),
    ("kl to reference", "actor/kl_loss"),
    ("entropy", "actor/entropy"),
    ("grad norm", "actor/grad_norm"),
    ("clip frac", "actor/pg_clipfrac"),
    ("zero-var groups", "group/zero_variance_frac"),
    ("pref accuracy", "rewards/accuracies"),
    ("tokens/s/rank", "perf/throughput"),
    ("step s", "perf/time_per_step"),
    ("loss", "warm_start/loss"),
    ("nll", "actor/nll"),
    ("distill loss", "distillation/abs_loss"),
)
"""(label in the panel, metric); metrics that a run does not have are omitted. `mrl/docs/metrics.md` explains them."""

PLAIN: tuple[tuple[tuple[str, str], ...], ...] = (
    (("reward", "critic/score/mean"), ("length", "response_length/mean")),
    (("pref accuracy", "rewards/accuracies"), ("margin", "rewards/margins")),
    (("entropy", "actor/entropy"), ("kl", "actor/kl_loss"), ("grad", "actor/grad_norm")),
    (("loss", "warm_start/loss"), ("nll", "actor/nll"), ("distill loss", "distillation/abs_loss")),
    (("tokens/s/rank", "perf/throughput"), ("step s", "perf/time_per_step")),
)
"""Groups of (label, metric) on a plain line: learning progress, warning signs, speed."""

TITLES = {"warm_start": "warm start", "train": "training", "val": "training"}
BLOCKS = "▁▂▃▄▅▆▇█"
CELL_WIDTH = 38
VALUE_WIDTH = 8
LABEL_WIDTH = max(len(label) for label, _ in WATCHED)
SPARK_WIDTH = 16
PACE_STEPS = 20
PLAIN_WARM_START_LINES = 10

PROGRESS_S = 30.0
"""Time without a line after which the plain console prints the progress inside a phase, s."""


class ConsoleState:
    """Latest metrics, their history, and the pace of the run."""

    def __init__(self, opening: Opening) -> None:
        train = opening.config.train
        self.totals = {"warm_start": train.warm_start.num_steps, "train": train.num_steps or 0}
        self.phase: Phase = "train"
        self.step = opening.resume_step or 0
        self.latest: dict[str, float] = {}
        self.history: dict[str, list[float]] = {name: [] for _, name in WATCHED}
        self._ends: deque[float] = deque([time.monotonic()], maxlen=PACE_STEPS + 1)

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> bool:
        """Stores the metrics of a step; returns whether the step is new."""
        kind: Phase = "warm_start" if phase == "warm_start" else "train"
        if kind != self.phase:
            self.phase, self.step = kind, 0
            self.latest.clear()
            self._ends = deque([time.monotonic()], maxlen=PACE_STEPS + 1)
        fresh = phase != "val" and step != self.step
        if fresh:
            self.step = step
            self._ends.append(time.monotonic())
        self.latest |= metrics
        for name, values in self.history.items():
            if name in metrics:
                values.append(metrics[name])
        return fresh

    @property
    def total(self) -> int:
        """Number of steps of the current phase."""
        return self.totals["warm_start" if self.phase == "warm_start" else "train"]

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end of this phase, from the pace of the last steps; None before the first step."""
        if len(self._ends) < 2:
            return None
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * max(0, self.total - self.step)

    def watched(self) -> Iterator[tuple[str, str, float]]:
        """Yields (label, metric, value) of the watched metrics that have a value."""
        for word, name in WATCHED:
            if name in self.latest:
                yield word, name, self.latest[name]


class PlainConsole(Logger):
    """Logger that prints one line per step."""

    def __init__(self, opening: Opening, console: Console) -> None:
        self._console = console
        self._state = ConsoleState(opening)
        self._last_line = time.monotonic()

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Prints a step when its first metrics arrive, and every evaluation."""
        state = self._state
        before = state.latest.get("val/accuracy")
        fresh = state.record(phase, step, metrics)
        if phase == "val":
            self._line(f"evaluation after step {step}: {evaluation_summary(metrics, before)}")
        elif fresh and (phase == "train" or self._prints_warm_start(step)):
            groups = (
                "  ".join(f"{word} {format_number(metrics[name])}" for word, name in group if name in metrics)
                for group in PLAIN
            )
            eta = f"left {format_duration(state.eta_s)}" if state.eta_s is not None else ""
            width = len(str(state.total))
            head = f"{TITLES[phase]} {step:{width}d}/{state.total}"
            self._line(" | ".join(part for part in (head, *groups, eta) if part))

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints evaluation samples, one per line."""
        for row in rows if phase == "val" else ():
            answer = "" if row["answer"] is None else f"  answer {visible(row['answer'])}"
            prompt, response = visible(_question(row)), visible(row["response"])
            self._line(f"  {prompt} -> {response}{answer}  reward {_reward(row)}")

    def note(self, text: str) -> None:
        """Prints the message."""
        self._line(visible(text))

    def progress(self, text: str) -> None:
        """Prints the progress inside a phase every `PROGRESS_S` seconds."""
        now = time.monotonic()
        if now - self._last_line >= PROGRESS_S:
            self._line(text)

    def _prints_warm_start(self, step: int) -> bool:
        every = max(1, self._state.total // PLAIN_WARM_START_LINES)
        return step == 1 or step % every == 0 or step == self._state.total

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(Text(text), soft_wrap=True)


class RichConsole(Logger):
    """Logger that draws a live panel at the bottom; evaluations and notes scroll above it."""

    def __init__(self, opening: Opening, console: Console) -> None:
        """Starts drawing on `console`."""
        self._console = console
        self._state = ConsoleState(opening)
        self._title = str(opening.run.root)
        self._where = ""
        self._lock = threading.Lock()
        self._live = Live(get_renderable=self._panel, console=console, refresh_per_second=4)
        self._live.start()

    def record(self, phase: Phase, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the panel; an evaluation is also printed above it."""
        with self._lock:
            before = self._state.latest.get("val/accuracy")
            self._state.record(phase, step, metrics)
        if phase == "val":
            line = Text.assemble((f"after step {step}", "bold"), f"   {evaluation_summary(metrics, before)}")
            self._console.print(line)

    def samples(self, phase: Phase, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Prints a table of evaluation samples."""
        if phase == "val":
            self._console.print(sample_table(rows))

    def note(self, text: str) -> None:
        """Prints the message above the panel."""
        self._console.print(Text(visible(text), style="dim"))

    def phase(self, where: str) -> None:
        """Shows the current activity in the panel's corner."""
        self._where = where

    def progress(self, text: str) -> None:
        """Shows the progress inside a phase in the panel's corner."""
        self._where = text

    def close(self) -> None:
        """Stops updating the panel and leaves it on the screen."""
        self._where = ""
        self._live.stop()

    def _panel(self) -> RenderableType:
        width = self._console.width - 4
        columns = max(1, min(3, width // CELL_WIDTH))
        blocks = max(1, min(SPARK_WIDTH, width // columns - LABEL_WIDTH - VALUE_WIDTH - 3))
        with self._lock:
            state = self._state
            head = Table.grid(padding=(0, 2), expand=True)
            head.add_column()
            head.add_column(ratio=1)
            head.add_column(justify="right")
            share = f"{state.step}/{state.total}  {100 * state.step / max(1, state.total):.0f}%"
            left = f"  {format_duration(state.eta_s)} left" if state.eta_s is not None else ""
            bar = ProgressBar(total=max(1, state.total), completed=state.step, complete_style="cyan")
            head.add_row(Text(TITLES[state.phase], style="bold"), bar, Text(share + left))
            cells = [
                (
                    Text(word, "dim"),
                    Text(format_number(value), "bold"),
                    Text(spark(state.history[name], blocks), "cyan"),
                )
                for word, name, value in state.watched()
            ]
        body = Table.grid(padding=(0, 1), expand=True)
        for _ in range(columns):
            body.add_column(no_wrap=True)
            body.add_column(no_wrap=True, justify="right", min_width=VALUE_WIDTH)
            body.add_column(no_wrap=True, ratio=1)
        for first in range(0, len(cells), columns):
            body.add_row(*(part for cell in cells[first : first + columns] for part in cell))
        return Panel(
            Group(head, *([body] if cells else [])),
            title=Text(f"mrl {self._title}"),
            title_align="left",
            subtitle=Text(self._where) if self._where else None,
            subtitle_align="right",
            border_style="dim",
            box=box.ROUNDED,
        )


def open_console(opening: Opening) -> Logger | None:
    """Returns the logger for `observe.console` and the kind of standard output."""
    wanted = opening.config.observe.console
    if wanted == "off":
        return None
    console = Console(file=sys.stdout, highlight=False)
    drawable = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
    return RichConsole(opening, console) if wanted == "rich" and drawable else PlainConsole(opening, console)


LOGGER = open_console


def evaluation_summary(metrics: Mapping[str, float], before: float | None) -> str:
    """Formats accuracy with its change since the last evaluation, reward, length, and each data set's result."""
    words = []
    if "val/accuracy" in metrics:
        change = "" if before is None else f" ({metrics['val/accuracy'] - before:+.3f})"
        words.append(f"accuracy {metrics['val/accuracy']:.3f}{change}")
    for word, name in (("reward", "val/reward/mean"), ("response length", "val/response_length/mean")):
        if name in metrics:
            words.append(f"{word} {format_number(metrics[name])}")
    words += [f"{visible(source)} {format_number(metrics[name])}" for source, name in headlines(metrics).items()]
    return "   ".join(words)


def sample_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table of prompt, response, answer and reward ("none" without a score); positive rewards are green."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", pad_edge=False)
    for name in ("prompt", "response", "answer"):
        table.add_column(name, overflow="fold", ratio=None)
    table.add_column("reward", justify="right")
    for row in rows:
        answer = "" if row["answer"] is None else visible(row["answer"])
        reward = Text(_reward(row), style="green" if (row["reward"] or 0) > 0 else "red")
        table.add_row(Text(visible(_question(row))), Text(visible(row["response"])), Text(answer), reward)
    return table


def _question(row: Mapping[str, Any]) -> str:
    """Returns the prompt without the system prompt, which is the same in every row."""
    return str(row.get("question") or row["prompt"])


def _reward(row: Mapping[str, Any]) -> str:
    return "none" if row["reward"] is None else format_number(row["reward"])


def spark(values: Sequence[float], most: int) -> str:
    """Draws a history as at most `most` blocks, each the mean of its part; "" for fewer than two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    width = min(most, len(finite))
    edges = [round(index * len(finite) / width) for index in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)
