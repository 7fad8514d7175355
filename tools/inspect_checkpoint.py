"""What a checkpoint is: format, layout, tensors with shapes, bytes, hashes. Hugging Face, Megatron or TensorRT-LLM."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from typing import Any

from mrl.convert_cli import FlagParser, run_tool
from mrl.formats.detect import open_source
from mrl.formats.output_file import hash_file
from mrl.models.hf_config import arch_from_folder

EXAMPLE = """\
  python tools/inspect_checkpoint.py runs/math/checkpoints/step-00000400 --no_hash
"""


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The checkpoint as JSON; its headers are checked."""
    arch = None if args.like is None else arch_from_folder(args.like)
    with closing(open_source(args.folder, arch)) as source:
        source.check()
        found = source.describe()
        found["files"] = {}
        for name in source.files:
            path = source.folder / name
            found["files"][name] = {"num_bytes": path.stat().st_size}
            if not args.no_hash:
                found["files"][name]["xxh3"] = hash_file(path)
    return found


def work(args: argparse.Namespace) -> int:
    """Prints."""
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
    """Parses the flags; returns the exit status."""
    parser = FlagParser(__doc__, EXAMPLE)
    parser.add_argument("folder", metavar="FOLDER", help="the checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--no_hash", action="store_true", help="read headers only")
    parser.add_argument("--like", metavar="FOLDER", help="config.json for a Megatron checkpoint that has none")
    return run_tool(parser, work)


if __name__ == "__main__":
    sys.exit(main())
