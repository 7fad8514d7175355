"""Converts a Hugging Face folder to a TensorRT-LLM checkpoint: config.json and one file per rank."""

from __future__ import annotations

import argparse
import sys

from mrl.checkpoint.formats.hf import HfSource
from mrl.commands.convert.command_line import (
    FlagParser,
    add_conversion_flags,
    add_trtllm_flags,
    run_conversion,
    run_tool,
    trtllm_target,
)

EXAMPLE = """\
  python tools/convert_hf_to_trtllm.py --model_dir Qwen3-30B-A3B --output_dir qwen3-trtllm --tp_size 4 --pp_size 2
"""


def work(args: argparse.Namespace) -> int:
    """Opens the source and converts it."""
    return run_conversion(args, HfSource(args.model_dir), trtllm_target)


def main() -> int:
    """Parses the flags, converts, and returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    add_conversion_flags(parser, "Hugging Face folder with safetensors")
    add_trtllm_flags(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
