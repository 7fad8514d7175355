"""Converts a Megatron distributed checkpoint of any layout to a Hugging Face folder; no GPU or process group."""

from __future__ import annotations

import argparse
import sys

from mrl.checkpoint.formats.megatron import MegatronSource
from mrl.commands.convert.command_line import (
    FlagParser,
    add_conversion_flags,
    add_hf_flags,
    hf_target,
    like_arch,
    run_conversion,
    run_tool,
)

EXAMPLE = """\
  python tools/convert_megatron_to_hf.py --model_dir runs/math/checkpoints/step-00000400 --output_dir math-hf \\
    --like Qwen3-30B-A3B
"""


def work(args: argparse.Namespace) -> int:
    """Opens the source and converts it."""
    return run_conversion(args, MegatronSource(args.model_dir, like_arch(args)), hf_target)


def main() -> int:
    """Parses the flags, converts, and returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    add_conversion_flags(parser, "distributed checkpoint from mrl, Megatron-LM (torch_dist) or a converter")
    add_hf_flags(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
