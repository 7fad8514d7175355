"""Megatron distributed checkpoint (any layout) -> Hugging Face folder; no GPU, no process group."""

from __future__ import annotations

import argparse
import sys

from mrl.convert_cli import FlagParser, add_conversion_flags, add_hf_flags, hf_target, run_conversion, run_tool
from mrl.formats.megatron import MegatronSource
from mrl.models.hf_config import arch_from_folder

EXAMPLE = """\
  python tools/convert_megatron_to_hf.py --model_dir runs/math/checkpoints/step-00000400 --output_dir math-hf \\
    --like Qwen3-30B-A3B
"""


def work(args: argparse.Namespace) -> int:
    """Opens the source and converts it."""
    arch = None if args.like is None else arch_from_folder(args.like)
    source = MegatronSource(args.model_dir, arch)
    return run_conversion(args, source, lambda source: hf_target(args, source))


def main() -> int:
    """Parses the flags; returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    add_conversion_flags(parser, "distributed checkpoint: of mrl, of Megatron-LM (torch_dist), or of a converter")
    add_hf_flags(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
