"""Converts a Megatron distributed checkpoint of any layout to a TensorRT-LLM checkpoint."""

from __future__ import annotations

import argparse
import sys

from mrl.checkpoint.formats.megatron import MegatronSource
from mrl.commands.convert.command_line import (
    FlagParser,
    add_conversion_flags,
    add_like_flag,
    add_trtllm_flags,
    like_arch,
    run_conversion,
    run_tool,
    trtllm_target,
)

EXAMPLE = """\
  python tools/convert_megatron_to_trtllm.py --model_dir qwen3-megatron --output_dir qwen3-trtllm \\
    --dtype bfloat16 --tp_size 8 --moe_tp_size 2 --moe_ep_size 4
"""


def work(args: argparse.Namespace) -> int:
    """Opens the source and converts it."""
    return run_conversion(args, MegatronSource(args.model_dir, like_arch(args)), trtllm_target)


def main() -> int:
    """Parses the flags, converts, and returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    add_conversion_flags(parser, "distributed checkpoint from mrl, Megatron-LM (torch_dist) or a converter")
    add_trtllm_flags(parser)
    add_like_flag(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
