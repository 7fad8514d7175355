r"""Does TensorRT-LLM do here what mrl needs of it? One command, about ten minutes, one page.

    python tools/accept_trtllm.py                                  # one GPU, a small random model
    python tools/accept_trtllm.py --model_dir Qwen3-0.6B           # a model of yours
    python tools/accept_trtllm.py --num_ranks 2                    # a replica of two GPUs, over mpirun
    python tools/accept_trtllm.py --checks start refit --engines trtllm rollout.dtype=bfloat16

mrl's own engine is asked the same, as a control: what fails with it too is not TensorRT-LLM's. Each check runs against
a started engine; one that fails, hangs or ends its process stops no other. The page,
OUTPUT_DIR/acceptance.md (and .json), says what works, what does not, what that means and what to do, with versions and
figures. Nothing is changed but OUTPUT_DIR.

Exit status: 0 nothing fails, 1 something does, 2 a mistake in what was given or TensorRT-LLM is missing.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from mrl.acceptance.accept import ENGINES, Acceptance
from mrl.acceptance.page import verdict, write_page
from mrl.acceptance.table import CHECKS, PAGE
from mrl.errors import UserError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("acceptance"), help="default: %(default)s")
    parser.add_argument("--model_dir", type=Path, help="Hugging Face folder; default: a small random model")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), metavar="ENGINE", help="default: %(default)s")
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), metavar="CHECK", help="default: %(default)s")
    parser.add_argument("--num_ranks", type=int, default=1, help="GPUs, as one replica; default: %(default)s")
    parser.add_argument("--launcher", help='words that start the ranks; default with several: "mpirun -n NUM_RANKS"')
    parser.add_argument("--start-timeout-s", type=float, default=300.0, help="default: %(default)s")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of each check; default: %(default)s")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config, as with mrl train")
    found = parser.parse_intermixed_args(arguments)
    for flag in ("engines", "checks"):  # nargs="+" takes the overrides behind it too
        given = getattr(found, flag)
        found.overrides += [word for word in given if "=" in word]
        setattr(found, flag, [word for word in given if "=" not in word])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and writes the page; returns the exit status."""
    given = parse(arguments)
    launcher = given.launcher
    if launcher is None:
        launcher = f"mpirun -n {given.num_ranks}" if given.num_ranks > 1 else ""
    words = sys.argv[1:] if arguments is None else arguments
    began = time.monotonic()
    try:
        acceptance = Acceptance(
            folder=given.output_dir,
            tools=Path(__file__).resolve().parent,
            engines=given.engines,
            checks=given.checks,
            overrides=given.overrides,
            model_dir=given.model_dir,
            num_ranks=given.num_ranks,
            launcher=shlex.split(launcher),
            start_timeout_s=given.start_timeout_s,
            timeout_s=given.timeout_s,
            tell=lambda line: print(line, flush=True),
        )
        results = acceptance.run()
    except UserError as error:
        print(f"accept_trtllm: error: {error}", file=sys.stderr)
        return 2
    page = write_page(
        PAGE,
        acceptance.folder,
        results,
        acceptance.versions,
        command=shlex.join(["python", "tools/accept_trtllm.py", *words]),
        took_s=time.monotonic() - began,
    )
    print(f"{verdict(results)}\n{page}")
    return 1 if any(result.status == "fails" for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
