"""Prints the tables of `mrl/docs/verl.md`: `python -m mrl.config.verl_keys.docs_page`."""

from __future__ import annotations

import sys

from mrl.config.verl_keys import verl_rollout
from mrl.config.verl_keys.translated_keys import BEFORE_MOOT, MAPS, MISSING, MOOT, PASSED, ROLLOUT

_ROLLOUT = """### Every field of its rollout section

verl's RolloutConfig, by the names under `actor_rollout_ref.rollout`. A field without an mrl key is refused in an mrl
config, with this reason; `from-verl` drops it, and lists those that are marked if they are set."""


def tables() -> str:
    """Returns the tables of all verl keys, as Markdown."""
    maps = [f"| `{key}` | `{to}` | {text} |" for key, (to, _, text) in MAPS.items() if not key.startswith(ROLLOUT)]
    maps += [f"| `{prefix}*` | `{to}` | Megatron's own, by its name there |" for prefix, to in PASSED.items()]
    parts = [("| verl | mrl | |", "|---|---|---|", *maps)]
    for title, patterns in (
        ("needs no counterpart, because", MOOT),
        ("has none, is listed, because", BEFORE_MOOT | MISSING),
    ):
        rows = [f"| `{pattern}` | {why} |" for pattern, why in patterns.items() if not pattern.startswith(ROLLOUT)]
        parts.append((f"| verl | {title} |", "|---|---|", *rows))
    acts = [f"| `{name}` | `{to}` | {text} |" for name, (to, _, text) in verl_rollout.MAPS.items()]
    refused = [f"| `{name}` | refused | {why} |" for name, why in verl_rollout.NEEDLESS.items()]
    listed = [f"| `{name}` | refused, listed | {why} |" for name, why in verl_rollout.ABSENT.items()]
    parts += [(_ROLLOUT,), ("| verl | mrl | |", "|---|---|---|", *acts, *refused, *listed)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables())
