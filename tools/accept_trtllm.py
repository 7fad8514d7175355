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
from pathlib import Path

from mrl.acceptance import tool
from mrl.acceptance.accept import ENGINES, Acceptance
from mrl.acceptance.table import CHECKS, PAGE


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", type=Path, help="Hugging Face folder; default: a small random model")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), metavar="ENGINE", help="default: %(default)s")
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), metavar="CHECK", help="default: %(default)s")
    parser.add_argument("--num_ranks", type=int, default=1, help="GPUs, as one replica; default: %(default)s")
    parser.add_argument("--launcher", help='words that start the ranks; default with several: "mpirun -n NUM_RANKS"')
    tool.add_options(parser, folder="acceptance", start_timeout_s=300.0, timeout_s=120.0)
    return tool.parse(parser, arguments, ("engines", "checks"))


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and writes the page; returns the exit status."""
    given = parse(arguments)
    launcher = given.launcher
    if launcher is None:
        launcher = f"mpirun -n {given.num_ranks}" if given.num_ranks > 1 else ""

    def begin() -> Acceptance:
        return Acceptance(
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
            tell=tool.tell,
        )

    return tool.run("accept_trtllm", PAGE, arguments, begin)


if __name__ == "__main__":
    raise SystemExit(main())
