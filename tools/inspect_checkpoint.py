"""Prints a checkpoint's format, layout, tensors, bytes and hashes. Reads Hugging Face, Megatron and TensorRT-LLM."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import Any

from mrl.checkpoint.formats.detect import open_source
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.commands.convert.command_line import FlagParser, add_like_flag, like_arch, run_tool

EXAMPLE = """\
  python tools/inspect_checkpoint.py runs/math/checkpoints/step-00000400 --no_hash
"""


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the description of a checkpoint as JSON, and checks its headers."""
    with closing(open_source(args.folder, like_arch(args))) as source:
        source.check()
        found = source.describe()
        found["files"] = {}
        for name in source.files:
            path = source.folder / name
            found["files"][name] = {"num_bytes": path.stat().st_size}
            if not args.no_hash:
                found["files"][name]["xxh3"] = xxh3_file(path)
    return found


def work(args: argparse.Namespace) -> int:
    """Prints the description."""
    found = describe(args)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for key, value in found.items():
        if key not in ("tensors", "files"):
            print(f"{key:<24} {value}")
    print(f"{'files':<24} {len(found['files'])}")
    for name, record in found["files"].items():
        print(f"  {name}  {record['num_bytes']} bytes  {record.get('xxh3', '')}".rstrip())
    print(f"{'tensors':<24} {len(found['tensors'])}")
    for name, tensor in found["tensors"].items():
        print(f"  {name}  {tensor['shape']} {tensor['dtype']}")
    return 0


def main() -> int:
    """Parses the flags, prints the description, and returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", help="folder of the checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no_hash", action="store_true", help="only read headers")
    add_like_flag(parser)
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
