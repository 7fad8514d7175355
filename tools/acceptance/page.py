"""Page of an acceptance run: results, consequences of failures and remedies, as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from acceptance.result import Check, Result

LATE = "the check exceeded its time limit or hangs; its question is not answered"
MORE_TIME = "see the log for its progress; raise --timeout-s, or --start-timeout-s for a start"


@dataclass(frozen=True)
class Page:
    """Description of a page.

    Attributes:
        title: Heading of the page.
        file: File name without its suffix.
        checks: All checks that may appear on it.
        names: Display names of the engines or other subjects.
    """

    title: str
    file: str
    checks: Mapping[str, Check]
    names: Mapping[str, str]


def write_page(
    page: Page,
    folder: Path,
    results: Sequence[Result],
    versions: Mapping[str, str],
    *,
    command: str,
    took_s: float,
) -> Path:
    """Writes the page, and a JSON file of the same name; returns the path of the page.

    Args:
        page: Description of the page.
        folder: Existing output folder.
        results: Results of the checks.
        versions: Versions of installed packages.
        command: Command line of the tool.
        took_s: Duration of the run, seconds.
    """
    content = {
        "command": command,
        "took_s": took_s,
        "versions": dict(versions),
        "verdict": verdict(results),
        "results": [asdict(result) for result in results],
    }
    (folder / f"{page.file}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    file = folder / f"{page.file}.md"
    lines = [*_head(page, results, versions, command, took_s), *_findings(page, results)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def verdict(results: Sequence[Result]) -> str:
    """Returns a summary with one clause per engine."""
    found = []
    for engine in dict.fromkeys(result.engine for result in results):
        own = [result for result in results if result.engine == engine]
        counts = {status: sum(result.status == status for result in own) for status in ("works", "fails", "skipped")}
        if counts["fails"]:
            word = "does not work here"
        elif counts["works"]:
            word = "works here in all checks that ran"
        else:
            word = "was not checked"
        found.append(f"{engine} {word}: {counts['works']} work, {counts['fails']} fail, {counts['skipped']} skipped")
    return "; ".join(found)


def _head(
    page: Page, results: Sequence[Result], versions: Mapping[str, str], command: str, took_s: float
) -> Iterator[str]:
    engines = list(dict.fromkeys(result.engine for result in results))
    by_name = {(result.engine, result.check): result for result in results}
    yield from (f"# {page.title}", "", f"**{verdict(results)}**", "")
    yield from (f"`{command}`, {took_s:.0f} s", "", "| | |", "|---|---|")
    yield from (f"| {name} | {value} |" for name, value in versions.items())
    yield from ("", "| | asks | " + " | ".join(page.names.get(engine, engine) for engine in engines) + " |")
    yield "|---|---|" + "---|" * len(engines)
    for name in dict.fromkeys(result.check for result in results):
        cells = [by_name.get((engine, name)) for engine in engines]
        words = [_word(cell) for cell in cells]
        yield f"| {name} | {page.checks[name].asks} | " + " | ".join(words) + " |"


def _findings(page: Page, results: Sequence[Result]) -> Iterator[str]:
    failing = [result for result in results if result.status == "fails"]
    if failing:
        yield from ("", "## Failures")
    for result in failing:
        check = page.checks[result.check]
        yield from ("", f"### {result.engine}: {result.check}", "")
        yield f"- failure: {result.said}"
        yield f"- consequence: {LATE if result.late else check.means}"
        yield f"- remedy: {MORE_TIME if result.late else check.remedy}"
        yield f"- log: {result.log}"
    skipped = [result for result in results if result.status == "skipped"]
    if skipped:
        yield from ("", "## Skipped", "")
        yield from (f"- {result.engine}: {result.check}: {result.said}" for result in skipped)
    yield from ("", "## Measurements")
    for result in results:
        if result.facts:
            yield from ("", f"### {result.engine}: {result.check}", "")
            yield from (f"- {name}: {_shown(value)}" for name, value in result.facts.items())


def _word(result: Result | None) -> str:
    if result is None:
        return ""
    return f"{result.status}, {result.took_s:.1f} s" if result.took_s else result.status


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shown(each)}" for name, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
