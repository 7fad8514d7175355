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

from acceptance import tool
from acceptance.trtllm import ENGINES, Acceptance
from acceptance.trtllm_table import CHECKS, PAGE

MPIRUN = "mpirun -n {ranks}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and writes the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_engines(parser, engines=ENGINES, checks=CHECKS, launcher=MPIRUN)
    tool.add_options(parser, folder="acceptance", start_timeout_s=300.0, timeout_s=120.0)
    given = tool.parse(parser, arguments, ("engines", "checks"))
    return tool.run("accept_trtllm", PAGE, arguments, lambda: tool.of_engines(Acceptance, given, MPIRUN, __file__))


if __name__ == "__main__":
    raise SystemExit(main())
