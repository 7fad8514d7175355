"""Generator of `mrl/docs/engines.md`: the support for every field of `rollout` in every engine.

    python -m mrl.trainer.validation.docs_engine_table > mrl/docs/engines.md

The texts are the engines' `FIELDS` (`engines/_field_support.py`) and `FIXED` in `ranges.py`.
"""

from __future__ import annotations

import sys

from mrl.config import registry
from mrl.config.config import RolloutConfig
from mrl.config.keys import dotted_keys
from mrl.engines._capabilities import engine_capabilities
from mrl.engines._field_support import COMMON_FIELDS, Fields
from mrl.trainer.validation.ranges import FIXED

HEAD = """# Every field of `rollout` in every engine

Written by `python -m mrl.trainer.validation.docs_engine_table` from each engine's declaration (`FIELDS` in its folder
of `mrl/engines/`); a test compares it with the checks of `mrl train`. No field is ignored: an engine uses it, passes it
to its library under the given name, or refuses it before anything starts. The reason after "refused" is part of the
error message, which also says what to do. Types, defaults and ranges are in [every field of a config](config.md).
`mrl train CONFIG --dry-run` checks rules between fields and with the model. """

ALIKE = """
## Equal in all engines

| `rollout.` | |
|---|---|
"""

APART = """
## Different between engines

`trtllm` is [TensorRT-LLM's LLM API](trtllm.md), `trtllm_engine` [built engines](trtllm.md#built-engines), `vllm`
[vLLM](vllm.md), `native` mrl's own. A bare name is an argument of the `LLM` of TensorRT-LLM or vLLM.

"""


def uses(engine: str) -> Fields:
    """Returns the support of all fields in an engine: its own `FIELDS` and those common to all engines."""
    return {**COMMON_FIELDS, **engine_capabilities(engine).fields}


def cells(key: str) -> list[str]:
    """Returns the table cells of a field, one for each engine.

    Raises:
        KeyError: An engine does not declare the field.
    """
    if f"rollout.{key}" in FIXED:
        only, why = FIXED[f"rollout.{key}"]
        return [f"must be {str(only).lower()}: {why}"] * len(registry.names("engines"))
    return [uses(engine)[key].words for engine in registry.names("engines")]


def page() -> str:
    """Returns the page as Markdown."""
    names = registry.names("engines")
    alike, apart = [], []
    for key in dotted_keys(RolloutConfig):
        found = cells(key)
        if len(set(found)) == 1:
            alike.append(f"| `{key}` | {found[0]} |\n")
        else:
            apart.append(f"| `{key}` | {' | '.join(found)} |\n")
    heads = f"| `rollout.` | {' | '.join(f'`{name}`' for name in names)} |\n|---|{'---|' * len(names)}\n"
    return "".join([HEAD, ALIKE, *alike, APART, heads, *apart])


if __name__ == "__main__":
    sys.stdout.write(page())
