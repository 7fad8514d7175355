"""Program of a rank in one session (`python -m acceptance.session SPEC`): starts the engine and runs its checks.

It writes a line before and after each check, by which `sessions.py` knows which check hangs or ended the process.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from acceptance.result import CheckError, Facts, NotHereError, Spec
from mrl.distributed import launch
from mrl.errors import UserError

log = logging.getLogger(__name__)


Outcome = tuple[str, str, Facts]
"""Status, message, facts."""


def main(file: str) -> None:
    """Runs the session; called by every rank of the job."""
    logging.basicConfig(level=logging.INFO)
    spec = Spec(**json.loads(Path(file).read_text(encoding="utf-8")))
    speaks = launch.get_launcher_env().rank == 0

    def tell(**line: object) -> None:
        if speaks:
            with open(spec.lines, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")

    began = time.monotonic()
    tell(begins="start")
    module = importlib.import_module(spec.module)
    with module.opened(spec) as bench:
        tell(ended="start", outcome=("works", "", {}), took_s=time.monotonic() - began)
        for name in spec.checks:
            began = time.monotonic()
            tell(begins=name)
            tell(
                ended=name,
                outcome=_first_failure(_outcome(module.FUNCTIONS[name], bench)),
                took_s=time.monotonic() - began,
            )
        tell(begins="end")


def _outcome(check: Callable[[Any], Facts], bench: Any) -> Outcome:
    try:
        return "works", "", check(bench)
    except CheckError as failure:
        return "fails", str(failure), failure.facts
    except NotHereError as reason:
        return "skipped", str(reason), {}
    except UserError as error:
        return "fails", str(error), {}
    except Exception as error:
        log.exception("a check failed")
        return "fails", f"{type(error).__name__}: {error}", {}


def _first_failure(own: Outcome) -> Outcome:
    """Collective over the job, if there is one: returns the outcome of the first rank that failed, else of rank 0."""
    if not dist.is_initialized():
        return own
    found: list[Outcome] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for rank, (status, said, facts) in enumerate(found):
        if status == "fails":
            return status, f"rank {rank}: {said}" if len(found) > 1 else said, facts
    return found[0]


if __name__ == "__main__":
    main(sys.argv[1])
