"""Megatron distributed checkpoint (any layout) -> TensorRT-LLM checkpoint: config.json and one file per rank."""

from __future__ import annotations

import argparse
import sys

from mrl.convert_cli import FlagParser, add_conversion_flags, add_trtllm_flags, run_conversion, run_tool, trtllm_target
from mrl.formats.megatron import MegatronSource
from mrl.models.hf_config import arch_from_folder

EXAMPLE = """\
  python tools/convert_megatron_to_trtllm.py --model_dir qwen3-megatron --output_dir qwen3-trtllm \\
    --dtype bfloat16 --tp_size 8 --moe_tp_size 2 --moe_ep_size 4
"""


def work(args: argparse.Namespace) -> int:
    """Opens the source and converts it."""
    arch = None if args.like is None else arch_from_folder(args.like)
    source = MegatronSource(args.model_dir, arch)
    return run_conversion(args, source, lambda source: trtllm_target(args, source))


def main() -> int:
    """Parses the flags; returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    add_conversion_flags(parser, "distributed checkpoint: of mrl, of Megatron-LM (torch_dist), or of a converter")
    add_trtllm_flags(parser)
    parser.add_argument("--like", metavar="FOLDER", help="folder whose config.json says which model it is")
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
