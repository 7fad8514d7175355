r"""Acceptance test of vLLM as a rollout engine: runs about ten minutes and writes one page.

    python tools/accept_vllm.py                                   # one GPU, a small random model
    python tools/accept_vllm.py --model_dir Qwen3-0.6B            # your model
    python tools/accept_vllm.py --num_ranks 2                     # a replica of two GPUs, with torchrun
    python tools/accept_vllm.py --checks start refit rollout.dtype=float32 run.device=cpu

The native engine runs the same checks as a control: a check that fails with it too is not caused by vLLM. Each check
runs against a started engine; one that fails, hangs or crashes does not stop the others. The report,
OUTPUT_DIR/acceptance-vllm.md (and .json), lists for each check the result, its meaning and the remedy, with versions
and measurements. Without a GPU, and with vLLM's CPU build, the checks run on the CPU, and those that a CPU cannot run
are listed. Only OUTPUT_DIR is modified.

Exit status: 0 no check fails, 1 a check fails, 2 invalid arguments or vLLM is missing.
"""

from __future__ import annotations

import argparse

from acceptance import tool
from acceptance.vllm import ENGINES, VllmAcceptance
from acceptance.vllm_table import CHECKS, PAGE

TORCHRUN = "torchrun --standalone --no-python --nproc-per-node {ranks}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks, writes the report and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_engines(parser, engines=ENGINES, checks=CHECKS, launcher=TORCHRUN)
    tool.add_options(parser, folder="acceptance-vllm", start_timeout_s=600.0, timeout_s=300.0)
    given = tool.parse(parser, arguments, ("engines", "checks"))
    return tool.run("accept_vllm", PAGE, arguments, lambda: tool.of_engines(VllmAcceptance, given, TORCHRUN, __file__))


if __name__ == "__main__":
    raise SystemExit(main())
