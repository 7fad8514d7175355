"""Compares the weights of two checkpoints of any format and layout. Exit status: 0 equal, 1 different, 2 an error."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from rich.console import Console

from mrl.checkpoint.formats.detect import open_source
from mrl.commands.convert.command_line import FlagParser, add_like_flag, like_arch, progress_bar, run_tool
from mrl.commands.convert.verify import verify
from mrl.resharding.hf import hf_layout
from mrl.resharding.regions import full_region, volume

EXAMPLE = """\
  python tools/verify_checkpoint.py Qwen3-30B-A3B qwen3-trtllm
"""


def work(args: argparse.Namespace) -> int:
    """Compares the checkpoints and prints the result."""
    arch = like_arch(args)
    with closing(open_source(args.a, arch)) as a, closing(open_source(args.b, arch)) as b:
        total = sum(volume(full_region(stored.shape)) for stored in hf_layout(a.arch, "float32").values())
        with progress_bar(Console(stderr=True), "comparing elements", total) as advance:
            found = verify(a, b, atol=args.atol, rtol=args.rtol, progress=advance)
    for key, (left, right) in found.config.items():
        print(f"config       {key}: {left} in A, {right} in B")
    print(f"compared     {found.num_elements} elements of {found.num_tensors} tensors")
    if found.first is None:
        print("same weights")
        return 0
    where = "" if found.first.index is None else str(list(found.first.index))
    print(f"different    {found.different_elements} elements of {found.different_tensors} tensors")
    print(f"first        {found.first.tensor}{where}\n  A          {found.first.a}\n  B          {found.first.b}")
    return 1


def main() -> int:
    """Parses the flags, compares, and returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    parser.add_argument("a", metavar="A", help="checkpoint: Hugging Face, Megatron or TensorRT-LLM")
    parser.add_argument("b", metavar="B", help="checkpoint to compare with")
    parser.add_argument("--atol", type=float, help="absolute tolerance: |a - b| <= atol + rtol * |b|; default: bitwise")
    parser.add_argument("--rtol", type=float, help="relative tolerance, see --atol")
    add_like_flag(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
