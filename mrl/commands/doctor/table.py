"""The doctor's report: merges the findings of all hosts and formats them as a table, plain lines or JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mrl.commands.doctor.finding import Finding

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
MAX_HOSTS = 4


def merge_hosts(by_host: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Merges equal findings of different hosts into one line, in the order of the first host that has them.

    Findings are equal if level, topic and advice are; numbers in `found` may differ, and the first host's are shown.

    Args:
        by_host: Host -> its findings.
    """
    alike: dict[tuple[str, str, str], list[tuple[str, Finding]]] = {}
    for host, findings in by_host.items():
        for each in findings:
            alike.setdefault((each.level, each.topic, each.advice), []).append((host, each))
    order: list[Finding] = []
    for group in alike.values():
        hosts = list(dict.fromkeys(host for host, _ in group))
        lines = dict.fromkeys(each for host, each in group if host == hosts[0])
        order += [replace(each, where=_where(hosts, len(by_host))) for each in lines]
    topics = list(dict.fromkeys(each.topic for each in order))
    return sorted(order, key=lambda each: topics.index(each.topic))


def _where(hosts: Sequence[str], total: int) -> str:
    if total == 1:
        return ""
    if len(hosts) == total:
        return "all hosts"
    return ", ".join(hosts[:MAX_HOSTS]) + (f" and {len(hosts) - MAX_HOSTS} more" if len(hosts) > MAX_HOSTS else "")


def status_of(findings: Sequence[Finding]) -> int:
    """Returns the exit status: 2 if there is a problem, else 0."""
    return 2 if any(each.level == "problem" for each in findings) else 0


def as_json(findings: Sequence[Finding], hosts: Mapping[str, Sequence[int]]) -> str:
    """Returns a JSON object with status, hosts with their ranks, and findings."""
    return json.dumps(
        {
            "status": status_of(findings),
            "hosts": {host: list(ranks) for host, ranks in hosts.items()},
            "findings": [asdict(each) for each in findings],
        },
        indent=1,
    )


def as_lines(findings: Sequence[Finding]) -> str:
    """Returns one line per finding: level, topic, where, what was found -> advice."""
    width = max((len(each.topic) for each in findings), default=0)
    lines = []
    for each in findings:
        where = f"[{each.where}] " if each.where else ""
        advice = f" -> {each.advice}" if each.advice else ""
        lines.append(f"{each.level:<8} {each.topic:<{width}}  {where}{each.found}{advice}")
    return "\n".join([*lines, summary(findings)])


def as_table(findings: Sequence[Finding], width: int) -> str:
    """Returns a table for a terminal of `width` columns."""
    table = Table(box=None, pad_edge=False, show_edge=False, show_header=False)
    for each in findings:
        text = Text(f"[{each.where}] " if each.where else "", "dim") + Text(each.found)
        if each.advice:
            text += Text(f"\n-> {each.advice}", "bold")
        table.add_row(Text(each.level, STYLES[each.level]), each.topic, text)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width)
    console.print(table)
    console.print(summary(findings), highlight=False)
    return out.getvalue().rstrip("\n")


def summary(findings: Sequence[Finding]) -> str:
    """Returns the counts, such as "1 problem, 2 warnings, 20 ok"."""
    counts = {level: sum(each.level == level for each in findings) for level in ("problem", "warning", "ok")}
    words = [f"{count} {level}{'s' if level != 'ok' and count != 1 else ''}" for level, count in counts.items()]
    return ", ".join(words)
