r"""Acceptance test of TensorRT-LLM as a rollout engine: runs about ten minutes and writes one page.

    python tools/accept_trtllm.py                                  # one GPU, a small random model
    python tools/accept_trtllm.py --model_dir Qwen3-0.6B           # your model
    python tools/accept_trtllm.py --num_ranks 2                    # a replica of two GPUs, with mpirun
    python tools/accept_trtllm.py --checks start refit --engines trtllm rollout.dtype=bfloat16

The native engine runs the same checks as a control: a check that fails with it too is not caused by TensorRT-LLM. Each
check runs against a started engine; one that fails, hangs or crashes does not stop the others. The report,
OUTPUT_DIR/acceptance.md (and .json), lists for each check the result, its meaning and the remedy, with versions and
measurements. Only OUTPUT_DIR is modified.

Exit status: 0 no check fails, 1 a check fails, 2 invalid arguments or TensorRT-LLM is missing.
"""

from __future__ import annotations

import argparse

from acceptance import tool
from acceptance.trtllm import ENGINES, Acceptance
from acceptance.trtllm_table import CHECKS, PAGE

MPIRUN = "mpirun -n {ranks}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks, writes the report and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_engines(parser, engines=ENGINES, checks=CHECKS, launcher=MPIRUN)
    tool.add_options(parser, folder="acceptance", start_timeout_s=300.0, timeout_s=120.0)
    given = tool.parse(parser, arguments, ("engines", "checks"))
    return tool.run("accept_trtllm", PAGE, arguments, lambda: tool.of_engines(Acceptance, given, MPIRUN, __file__))


if __name__ == "__main__":
    raise SystemExit(main())
