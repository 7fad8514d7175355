"""Converts a TensorRT-LLM checkpoint to a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys

from mrl.checkpoint.formats.trtllm import TrtllmSource
from mrl.commands.convert.command_line import (
    FlagParser,
    add_conversion_flags,
    add_hf_flags,
    hf_target,
    run_conversion,
    run_tool,
)

EXAMPLE = """\
  python tools/convert_trtllm_to_hf.py --model_dir qwen3-trtllm --output_dir qwen3-hf --like Qwen3-30B-A3B
"""


def work(args: argparse.Namespace) -> int:
    """Opens the source and converts it."""
    return run_conversion(args, TrtllmSource(args.model_dir), hf_target)


def main() -> int:
    """Parses the flags, converts, and returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    add_conversion_flags(parser, "TensorRT-LLM checkpoint: config.json and rank files")
    add_hf_flags(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
