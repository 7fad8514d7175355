"""SLURM's short forms: `gpu[01-03,7]-ib0,login` for hosts, `4(x2),3` for the tasks of each node.

Owns reading them without SLURM's programs, which a container does not have.
"""

from __future__ import annotations

import re

from mrl.errors import UserError


def hosts_of(text: str) -> list[str]:
    """The host names that a node list stands for, in its order (`scontrol show hostnames`).

    Args:
        text: Such as SLURM_STEP_NODELIST. A name may have several brackets; the last one varies fastest.

    Raises:
        UserError: It is no node list.
    """
    return [host for item in _items(text) for host in _expanded(item, text)]


def first_host(text: str) -> str:
    """The first host of a node list."""
    return hosts_of(text)[0]


def tasks_of_node(text: str, node: int) -> int:
    """Tasks of one node.

    Args:
        text: Such as SLURM_STEP_TASKS_PER_NODE: "4(x2),3" is 4, 4 and 3.
        node: Index of the node in the step, SLURM_NODEID.

    Raises:
        UserError: It is no such list, or the list ends before the node.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE='{text}' is not of the form 4(x2),3.")
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise UserError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE='{text}' has {len(counts)} node(s).")
    return counts[node]


def _items(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not items or ",".join(items) != text:
        raise UserError(f"'{text}' is not a list of nodes such as node[1-3,7],login: set MASTER_ADDR yourself.")
    return items


def _expanded(item: str, text: str) -> list[str]:
    head, bracket, tail = re.fullmatch(r"([^\[]*)(?:\[([^\]]*)\])?(.*)", item).groups()  # type: ignore[union-attr]
    if bracket is None:
        return [head]
    names = []
    for part in bracket.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"'[{part}]' in the list of nodes '{text}' is no range: set MASTER_ADDR yourself.")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            names += [f"{head}{number:0{len(match[1])}}{rest}" for rest in _expanded(tail, text)]
    return names
