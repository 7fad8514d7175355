"""Parser of SLURM's compact lists: `gpu[01-03,7]-ib0,login` for hosts, `4(x2),3` for tasks per node.

It does not call SLURM's programs, which containers lack.
"""

from __future__ import annotations

import re

from mrl.errors import UserError


def expand_host_list(text: str) -> list[str]:
    """Returns the host names of a node list in its order, as `scontrol show hostnames` does.

    Args:
        text: Node list, such as SLURM_STEP_NODELIST. A name may have several brackets; the last one varies fastest.

    Raises:
        UserError: It is not a node list.
    """
    return [host for item in _items(text) for host in _expand(item, text)]


def first_host(text: str) -> str:
    """Returns the first host of a node list."""
    return expand_host_list(text)[0]


def num_tasks_on_node(text: str, node: int) -> int:
    """Returns the number of tasks on one node.

    Args:
        text: Tasks per node, such as SLURM_STEP_TASKS_PER_NODE: "4(x2),3" is 4, 4 and 3.
        node: Index of the node in the step (SLURM_NODEID).

    Raises:
        UserError: The text is malformed or has no entry for the node.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE='{text}' is not of the form 4(x2),3. Start a new step with srun."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise UserError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE='{text}' has {len(counts)} node(s).")
    return counts[node]


def _items(text: str) -> list[str]:
    """Splits at commas outside of brackets."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not items or ",".join(items) != text:
        raise UserError(f"'{text}' is not a node list such as node[1-3,7],login. Set MASTER_ADDR to the first host.")
    return items


def _expand(item: str, text: str) -> list[str]:
    head, bracket, tail = re.fullmatch(r"([^\[]*)(?:\[([^\]]*)\])?(.*)", item).groups()  # type: ignore[union-attr]
    if bracket is None:
        return [head]
    names = []
    for part in bracket.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"'[{part}]' in the node list '{text}' is not a range. Set MASTER_ADDR to the first host.")
        for number in range(int(match[1]), int(match[2] or match[1]) + 1):
            names += [f"{head}{number:0{len(match[1])}}{rest}" for rest in _expand(tail, text)]
    return names
