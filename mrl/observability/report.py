"""`mrl report RUN`: writes a self-contained HTML page about a run, finished or not, from its run folder.

This module selects headlines, charts and tables; `charts.py` draws and `html.py` formats.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mrl.algorithms.base import resolve
from mrl.checkpoint.io.atomic_files import replace_file
from mrl.checkpoint.io.jsonl_log import Row, number, read_rows
from mrl.checkpoint.run_dir.run_dir import RunDir, flatten, read_run_info
from mrl.config import config as config_module
from mrl.config import registry
from mrl.config.config import AlgorithmConfig, Config
from mrl.config.did_you_mean import did_you_mean_path
from mrl.errors import UserError
from mrl.observability.charts import Point, Series, colour, line_chart, stacked_bars
from mrl.observability.data_sources import headlines
from mrl.observability.html import card, cell, grid, header, page, section, table, turns_cell
from mrl.observability.report_charts import ACCURACY, AGES, EPISODES, LEARNING, MISMATCH, POLICY, SPEED, Drawing
from mrl.observability.text_format import format_duration, format_number

EDGE_STEPS = 5
"""Number of first and last steps over which the headline rewards are averaged."""

FEWEST_DRAWN = 3
"""Minimum number of points for a chart in "All other metrics"; fewer are written in a table."""

ROUNDING = 1e-6
"""Largest difference at which two lines count as equal and only one is drawn."""

OVERLAP = 1.02
"""Ratio of the phases' time to the steps' time above which some phases must have run concurrently."""

_OVERLAP_HINT = (
    " Sampling and training ranks worked concurrently, so their phases add up to more than the time of the steps."
)


def write_report(run_dir: Path) -> Path:
    """Writes report.html into a run folder and returns its path; an incomplete last line of a log file is ignored.

    Raises:
        UserError: The folder does not exist or contains no metrics, a file is damaged, or the page cannot be written.
    """
    run = RunDir(Path(run_dir))
    if not run.root.is_dir():
        hint = did_you_mean_path(run_dir)
        raise UserError(f"'{run_dir}' is not a folder.{hint} Give a run folder, the run.output_dir of a training run.")
    history = RunHistory(run)
    if not history.steps and not history.warm_start:
        raise UserError(
            f"'{run_dir}' contains no metrics ({run.metrics.name} is missing or empty): no step was finished."
        )
    config = _config(run)
    facts = _facts(run)
    name = run.root.resolve().name
    body = "".join(
        (
            _headline(name, history, config, facts, run.committed_steps()),
            section("Learning", _drawings(history.steps, LEARNING)),
            section("By data set", _drawings(history.steps, by_data_set(history.steps))),
            section("Episodes", _drawings(history.steps, EPISODES), "Conversations with environments."),
            _samples(_sample_rows(run)),
            section("Policy", _drawings(history.steps, POLICY)),
            section(
                "Engine and actor mismatch",
                _drawings(history.steps, MISMATCH),
                "Probabilities of the sampled tokens, as the engine sampled them and as the actor recomputes them.",
            ),
            section(
                "Staleness",
                _drawings(history.steps, AGES),
                "Steps between the weights that sampled a token and the weights that it trains.",
            ),
            section("Warm start", _warm_start(history), "Supervised steps before reinforcement learning."),
            section(
                "Time",
                _timing(history) + _drawings(history.times, SPEED),
                "Step 0 is the evaluation and checkpoint before the first step. Start-up is not counted."
                f"{_OVERLAP_HINT if _overlaps(history) else ''}",
            ),
            section("Weight sync", _refit(history), "Copies of the actor's weights into the engine."),
            section("Settings that differ from the defaults", _differences(config)),
            section("Starts", _starts(facts)),
            section("Settings changed on resume", _changes(facts)),
            section("Notes", _notes(read_rows(run.notes, by_step=False))),
            _other_metrics(history),
        )
    )
    try:
        replace_file(run.report, page(f"mrl: {name}", body).encode())
    except OSError as error:
        raise UserError(f"the report '{run.report}' cannot be written: {error.strerror}.") from error
    return run.report


def report_at_end(run_dir: Path, *, announces: bool) -> None:
    """Writes the report of a finished run; only warns on failure, since all steps are already in checkpoints.

    Args:
        run_dir: Run folder.
        announces: True to print the path of the report, or the reason for its absence.
    """
    try:
        words = f"report {write_report(run_dir)}"
    except UserError as error:
        words = f"WARNING no report: {error} All steps are done; `mrl report {run_dir}` tries again."
    if announces:
        Console().print(Text(words), soft_wrap=True)


class RunHistory:
    """All metrics of a run: {metric: [(step, value)]} for training, its timings, and the warm start."""

    def __init__(self, run: RunDir) -> None:
        """Reads metrics.jsonl and timings.jsonl."""
        metrics, times = read_rows(run.metrics), read_rows(run.timings)
        self.steps = _columns(metrics, "train")
        self.times = _columns(times, "train")
        self.warm_start = _columns(metrics, "warm_start")
        self.warm_start_times = _columns(times, "warm_start")

    @property
    def last_step(self) -> int:
        """Last RL step with metrics."""
        return int(max((points[-1][0] for points in self.steps.values()), default=0))


def _columns(rows: Sequence[Row], phase: str) -> dict[str, list[Point]]:
    columns: dict[str, list[Point]] = {}
    for row in rows:
        step = number(row.get("step"))
        if row.get("phase") != phase or step is None:
            continue
        for name, value in row.items():
            y = number(value)
            if name not in ("step", "phase") and y is not None:
                columns.setdefault(name, []).append((step, y))
    return columns


def _config(run: RunDir) -> Config | None:
    """Returns the run's config; None where config.yaml is missing or from another version of mrl."""
    try:
        return config_module.load(run.config)
    except UserError:
        return None


def _facts(run: RunDir) -> dict[str, Any]:
    """Returns run.json; {} where it is missing or damaged, so that the report still shows the rest."""
    try:
        return read_run_info(run)
    except UserError:
        return {}


def _headline(
    name: str, history: RunHistory, config: Config | None, facts: Mapping[str, Any], kept_steps: Sequence[int]
) -> str:
    cards = []
    accuracy = history.steps.get(ACCURACY, [])
    if accuracy:
        best = max(accuracy, key=lambda point: (point[1], point[0]))
        more = f"best {best[1]:.3f} after step {best[0]:.0f}"
        if best[0] not in kept_steps:
            more += ", whose checkpoint was not kept (checkpoint.interval, checkpoint.keep_best)"
        before = f"{accuracy[0][1]:.3f}" if len(accuracy) > 1 else ""
        cards.append(card("Held-out accuracy", f"{accuracy[-1][1]:.3f}", more, before))
    reward = [y for _, y in history.steps.get("critic/score/mean", []) if math.isfinite(y)]
    if reward:
        edge = min(EDGE_STEPS, max(1, len(reward) // 2))
        first, last = sum(reward[:edge]) / edge, sum(reward[-edge:]) / edge
        cards.append(card("Reward", f"{last:.3f}", f"mean of {edge} first and last steps", f"{first:.3f}"))
    total = config.train.num_steps if config else None
    more = "finished" if total == history.last_step else (f"of {total}" if total else "")
    cards.append(card("Steps", str(history.last_step), more))
    seconds = [sum(y for _, y in times.get("timing_s/step", [])) for times in (history.times, history.warm_start_times)]
    if any(seconds):
        parts = f"including {format_duration(seconds[1])} of warm start" if seconds[1] else "sum over the steps"
        cards.append(card("Time", format_duration(sum(seconds)), parts))
    throughput = history.times.get("perf/throughput", [])
    if throughput:
        middle = sorted(y for _, y in throughput)[len(throughput) // 2]
        cards.append(card("Throughput", format_number(middle), "tokens per second and rank, median"))
    return header(name, _subtitle(config, facts), cards)


def _subtitle(config: Config | None, facts: Mapping[str, Any]) -> str:
    """Returns one line with algorithm, model, data, layout and devices of the run."""
    words = []
    if config:
        words = [config.algorithm.name, f"model {config.model.path or config.model.preset}"]
        words.append(f"data {config.data.task or ', '.join(config.data.train_files)}")
        layout = config.parallel
        sizes = {
            "TP": layout.tensor_model_parallel_size,
            "PP": layout.pipeline_model_parallel_size,
            "VPP": layout.virtual_pipeline_model_parallel_size or 1,
            "rollout TP": config.rollout.tensor_model_parallel_size,
        }
        words.append(" ".join(f"{key}={size}" for key, size in sizes.items() if size > 1))
    if starts := facts.get("starts"):
        last = starts[-1]
        ranks = last.get("world_size", "?")
        words += [
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {last.get('device', '?')}",
            str(last.get("time", ""))[:16].replace("T", " "),
        ]
    return " · ".join(word for word in words if word)


def _drawings(columns: Mapping[str, list[Point]], drawings: Sequence[Drawing]) -> str:
    figures = []
    for title, lines in drawings:
        found = [
            Series(legend, columns[name], dots=name.startswith("val/")) for legend, name in lines if name in columns
        ]
        if len(found) == 2 and _equal_lines(found[0].points, found[1].points):
            found.pop()
        unit_interval = (0.0, 1.0) if any(name == ACCURACY for _, name in lines) else ()
        figures.append(line_chart(title, found, include=unit_interval))
    return grid(figures)


def by_data_set(columns: Mapping[str, list[Point]]) -> tuple[Drawing, ...]:
    """Returns charts of held-out results and rewards with a line per data set; none for a single data set."""
    held_out = headlines(columns)
    if not held_out:
        return ()
    trained = [re.fullmatch("train/(.+)/reward/mean", name) for name in sorted(columns)]
    return (
        ("Held out, mean over the samples", tuple(held_out.items())),
        ("Reward", tuple((match[1], match[0]) for match in trained if match)),
    )


def _equal_lines(one: Sequence[Point], other: Sequence[Point]) -> bool:
    """Returns whether two lines differ only by rounding."""
    return len(one) == len(other) and all(abs(a[1] - b[1]) <= ROUNDING for a, b in zip(one, other, strict=True))


def _warm_start(history: RunHistory) -> str:
    """Draws every warm-start metric that changes; lines equal to an earlier one are omitted."""
    kept: dict[str, list[Point]] = {}
    for name, points in history.warm_start.items():
        moves = len({y for _, y in points}) > 1
        if moves and not any(_equal_lines(points, other) for other in kept.values()):
            kept[name.removeprefix("warm_start/")] = points
    return grid([line_chart(name, [Series(name, points)], x_label="warm-start step") for name, points in kept.items()])


def _timing(history: RunHistory) -> str:
    """Draws the seconds per phase stacked over the steps, and their shares of the run including the warm start."""
    times = history.times
    phases = {
        name.removeprefix("timing_s/"): dict(points)
        for name, points in times.items()
        if name.startswith("timing_s/") and name.count("/") == 1 and name != "timing_s/step"
    }
    step_s = dict(times.get("timing_s/step", []))
    order = sorted(phases, key=lambda name: -sum(phases[name].values())) if step_s else []
    xs = sorted(step_s)
    layers = [(name, [phases[name].get(x, 0.0) for x in xs]) for name in order]
    other = [max(0.0, step_s[x] - sum(values[i] for _, values in layers)) for i, x in enumerate(xs)]
    if sum(other) > 0.005 * sum(step_s.values()):
        layers.append(("other", other))
    warm_start = [y for _, y in history.warm_start_times.get("timing_s/step", [])]
    rows = [*layers, *([("warm start", warm_start)] if warm_start else [])]
    bars = [stacked_bars("Time per step", xs, layers, y_label="s")] if layers else []
    return grid([*bars, _shares(rows)]) if rows else ""


def _overlaps(history: RunHistory) -> bool:
    """Returns whether the phases of the steps take longer than the steps, so that some ran concurrently."""
    step_s, parts = dict(history.times.get("timing_s/step", [])), dict[float, float]()
    outside = ("timing_s/step", "timing_s/save_checkpoint")
    for name, points in history.times.items():
        if name.startswith("timing_s/") and name.count("/") == 1 and name not in outside:
            for step, seconds in points:
                parts[step] = parts.get(step, 0.0) + seconds
    return sum(parts[step] for step in parts if step in step_s) > OVERLAP * sum(step_s.values()) > 0


def _shares(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Returns a bar of shares above a table with the seconds of each phase."""
    total = sum(sum(values) for _, values in rows) or 1.0
    lines, bar = [], []
    for index, (name, values) in enumerate(rows):
        share = sum(values) / total
        bar.append(f'<i style="width:{100 * share:.3f}%;background:{colour(index)}"></i>')
        key = f'<i class="key" style="background:{colour(index)}"></i>'
        average, longest = sum(values) / len(values), max(values)
        label = cell(name).replace("<td>", f"<td>{key}", 1)
        numbers = (format_duration(sum(values)), f"{100 * share:.1f} %", f"{average:.3g}", f"{longest:.3g}")
        lines.append(label + "".join(cell(word, "num") for word in numbers))
    heads = ("phase", ">total", ">share", ">mean, s/step", ">longest, s")
    return table(heads, lines).replace("<table>", f'<div class="share">{"".join(bar)}</div><table>', 1)


def _refit(history: RunHistory) -> str:
    """Returns first, median and last value of every `refit/...` metric, with charts of the transfer rates."""
    columns = {name: points for name, points in (history.steps | history.times).items() if name.startswith("refit/")}
    rows = []
    for name, points in sorted(columns.items()):
        values = [y for _, y in points]
        trio = (values[0], sorted(values)[len(values) // 2], values[-1])
        rows.append(cell(name) + "".join(cell(f"{y:,.0f}" if y == int(y) else f"{y:.4g}", "num") for y in trio))
    rates = [line_chart(name, [Series(name, points)]) for name, points in columns.items() if "per_s" in name]
    listing = table(("", ">first", ">median", ">last"), rows)
    return grid([*rates, listing])


def _sample_rows(run: RunDir) -> list[Row]:
    """Returns the rows of samples.jsonl.

    Raises:
        UserError: A row's turns do not have the format of `run_log.sample_rows`.
    """
    rows = read_rows(run.samples)
    for number_, row in enumerate(rows, 1):
        turns = row.get("turns") or []
        if not isinstance(turns, list) or not all(
            isinstance(turn, dict) and {"by", "text"} <= set(turn) for turn in turns
        ):
            raise UserError(
                f'\'{run.samples}\', line {number_}: "turns" is not a list of objects with "by" and "text". '
                "Restore the file or remove that line."
            )
    return rows


def _samples(rows: Sequence[Row]) -> str:
    """Returns a section with the last evaluation's responses; training samples where there is no evaluation.

    The last evaluation is compared with the first one that shares a prompt with it, on the prompts that both have.
    """
    held_out = [row for row in rows if row.get("phase") == "val"]
    rows = held_out or list(rows)
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return ""
    last = {_identity(row): row for row in rows if row["step"] == steps[-1]}
    heads = ["prompt", "expected", f"after step {steps[-1]}", ">reward"]
    earlier = [row for row in held_out if row["step"] < steps[-1] and _identity(row) in last]
    if not earlier:
        body = table(heads, [_prompt(row) + _response_and_reward(row) for row in last.values()])
        return section("Samples", body, f"Responses to {'held-out' if held_out else 'training'} prompts.")
    first = min(row["step"] for row in earlier)
    both = {_identity(row): row for row in earlier if row["step"] == first}
    heads[2:2] = [f"after step {first}", ">reward"]
    body = table(
        heads,
        [
            _prompt(before) + _response_and_reward(before) + _response_and_reward(last[key])
            for key, before in both.items()
        ],
    )
    return section("Samples before and after", body, "Responses to the same held-out prompts.")


def _identity(row: Row) -> tuple[Any, ...]:
    return row.get("prompt"), row.get("answer"), row.get("sample_index")


def _prompt(row: Row) -> str:
    answer = row.get("answer")
    return cell(str(row.get("prompt", "")), "text") + cell("" if answer is None else str(answer), "text")


def _response_and_reward(row: Row) -> str:
    reward = number(row.get("reward"))
    cut = " ⋯ (cut at the length limit)" if row.get("finish_reason") == "length" else ""
    tone = "good" if reward is not None and reward > 0 else "poor"
    value = "" if reward is None else format_number(reward)
    turns = [(str(turn["by"]), _turn_text(turn)) for turn in row.get("turns") or ()]
    said = turns_cell(turns, cut) if turns else cell(str(row.get("response", "")) + cut, "text")
    return said + cell(value, f"num {tone}")


def _turn_text(turn: Row) -> str:
    """Returns a turn's text, and the reward that the environment gave for it."""
    reward = number(turn.get("reward"))
    return f"{turn['text']}  [{format_number(reward)}]" if reward else str(turn["text"])


def _defaults(algorithm: str) -> dict[str, Any]:
    """Returns the default config of a run of this algorithm; does not import user code for algorithms outside mrl."""
    own = flatten(asdict(Config()))
    if algorithm not in registry.names("algorithms"):
        return own
    filled = replace(Config(), algorithm=resolve(AlgorithmConfig(name=algorithm)))
    return flatten(asdict(filled)) | {"algorithm.name": own["algorithm.name"]}


def _differences(config: Config | None) -> str:
    if config is None:
        return ""
    values, default = flatten(asdict(config)), _defaults(config.algorithm.name)
    keys = [key for key in values if values[key] != default.get(key)]
    rows = [
        cell(key, "text") + cell(_value(values[key]), "text") + cell(_value(default.get(key)), "text") for key in keys
    ]
    return table(("key", "this run", "default"), rows)


def _value(value: Any) -> str:
    return "" if value in ({}, None) else (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _starts(facts: Mapping[str, Any]) -> str:
    rows = []
    for start in facts.get("starts", []):
        resumed = start.get("resume_step")
        versions = ", ".join(f"{name} {number}" for name, number in start.get("versions", {}).items())
        where = f"{start.get('world_size', '?')} x {start.get('device', '?')}, {start.get('num_cores', '?')} cores"
        words = ("from the beginning" if resumed is None else f"from step {resumed}", where)
        rows.append(_when(start) + "".join(cell(word) for word in (*words, versions)))
    return table(("time", "started", "ranks", "versions"), rows)


def _changes(facts: Mapping[str, Any]) -> str:
    """Returns a table of the settings that resumes changed."""
    rows = []
    for start in facts.get("starts", []):
        for change in start.get("changes", []):
            step = cell(f"from step {start.get('resume_step')}")
            rows.append(_when(start) + step + cell(change, "text"))
    return table(("time", "started", "setting: before -> now"), rows)


def _notes(rows: Sequence[Row]) -> str:
    return table(("time", "note"), [_when(row) + cell(str(row.get("text", ""))) for row in rows])


def _when(row: Mapping[str, Any]) -> str:
    return cell(str(row.get("time", ""))[:19].replace("T", " "), "when")


def _other_metrics(history: RunHistory) -> str:
    """Returns collapsed small charts of every metric not shown above; constant ones become rows of a table."""
    drawn = (LEARNING, by_data_set(history.steps), POLICY, MISMATCH, AGES, SPEED)
    shown = {name for part in drawn for _, lines in part for _, name in lines}
    hidden = ("refit/", "timing_s/", "training/global_step")
    columns = {
        name: points
        for name, points in sorted((history.steps | history.times).items())
        if name not in shown and not name.startswith(hidden) and points
    }
    constant = {name: points for name, points in columns.items() if _is_constant(points)}
    body = grid(
        [
            line_chart(name, [Series(name, points, dots=name.startswith("val/"))])
            for name, points in columns.items()
            if name not in constant
        ],
        3,
    )
    if constant:
        rows = [cell(name) + cell(", ".join(_values(points))) for name, points in constant.items()]
        body += table(("metric", "value"), rows)
    return f"<details><summary>All other metrics ({len(columns)})</summary>{body}</details>" if body else ""


def _values(points: Sequence[Point]) -> list[str]:
    """Returns the distinct values in order, formatted."""
    return list(dict.fromkeys(f"{y:.4g}" for _, y in points))


def _is_constant(points: Sequence[Point]) -> bool:
    return len(points) < FEWEST_DRAWN or len(_values(points)) == 1
