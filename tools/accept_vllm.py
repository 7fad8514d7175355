r"""Does vLLM do here what mrl needs of it? One command, about ten minutes, one page.

    python tools/accept_vllm.py                                   # one GPU, a small random model
    python tools/accept_vllm.py --model_dir Qwen3-0.6B            # a model of yours
    python tools/accept_vllm.py --num_ranks 2                     # a replica of two GPUs, by torchrun
    python tools/accept_vllm.py --checks start refit rollout.dtype=float32 run.device=cpu

mrl's own engine is asked the same, as a control: what fails with it too is not vLLM's. Each check runs against a
started engine; one that fails, hangs or ends its process stops no other. The page, OUTPUT_DIR/acceptance-vllm.md (and
.json), says what works, what does not, what that means and what to do, with versions and figures. Without a GPU, and
with vLLM's build for CPUs, the same is asked of the CPU; what a CPU does not have is named. Nothing is changed but
OUTPUT_DIR.

Exit status: 0 nothing fails, 1 something does, 2 a mistake in what was given or vLLM is missing.
"""

from __future__ import annotations

import argparse

from acceptance import tool
from acceptance.vllm import ENGINES, VllmAcceptance
from acceptance.vllm_table import CHECKS, PAGE

TORCHRUN = "torchrun --standalone --no-python --nproc-per-node {ranks}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the checks and writes the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tool.add_engines(parser, engines=ENGINES, checks=CHECKS, launcher=TORCHRUN)
    tool.add_options(parser, folder="acceptance-vllm", start_timeout_s=600.0, timeout_s=300.0)
    given = tool.parse(parser, arguments, ("engines", "checks"))
    return tool.run("accept_vllm", PAGE, arguments, lambda: tool.of_engines(VllmAcceptance, given, TORCHRUN, __file__))


if __name__ == "__main__":
    raise SystemExit(main())
