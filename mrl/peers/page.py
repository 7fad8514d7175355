"""The tables of `mrl/docs/verl.md`: `python -m mrl.peers.page` prints them from `verl_keys.py`."""

from __future__ import annotations

import sys

from mrl.peers.verl_keys import MAPS, MISSING, MOOT, PASSED


def tables() -> str:
    """What becomes of every key, as Markdown."""
    maps = [f"| `{key}` | `{to}` | {text} |" for key, (to, _, text) in MAPS.items()]
    maps += [f"| `{prefix}*` | `{to}` | Megatron's own, by its name there |" for prefix, to in PASSED.items()]
    parts = [("| verl | mrl | |", "|---|---|---|", *maps)]
    for title, patterns in (("needs no counterpart, because", MOOT), ("has none: it is listed, because", MISSING)):
        rows = [f"| `{pattern}` | {why} |" for pattern, why in patterns.items()]
        parts.append((f"| verl | {title} |", "|---|---|", *rows))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables())
