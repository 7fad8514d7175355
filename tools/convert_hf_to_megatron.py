"""Converts a Hugging Face folder to a Megatron distributed checkpoint at any layout; no GPU or process group."""

from __future__ import annotations

import argparse
import sys

from mrl.checkpoint.formats.hf import HfSource
from mrl.commands.convert.command_line import (
    FlagParser,
    add_conversion_flags,
    add_megatron_flags,
    megatron_target,
    run_conversion,
    run_tool,
)

EXAMPLE = """\
  python tools/convert_hf_to_megatron.py --model_dir Qwen3-30B-A3B --output_dir qwen3-megatron \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
"""


def work(args: argparse.Namespace) -> int:
    """Opens the source and converts it."""
    return run_conversion(args, HfSource(args.model_dir), megatron_target)


def main() -> int:
    """Parses the flags, converts, and returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    add_conversion_flags(parser, "Hugging Face folder with safetensors")
    add_megatron_flags(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
