"""The parts of `mrl convert`: the conversions, `inspect` and `verify`, each with its flags and a script in `tools/`.

`command_line.py` has the flags that they share, `convert.py` does the conversion.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from mrl.checkpoint.formats.adapter_checkpoint import AdapterCheckpoint
from mrl.checkpoint.formats.base import Source, Target
from mrl.checkpoint.formats.detect import open_source
from mrl.checkpoint.formats.hf import HfSource
from mrl.checkpoint.formats.megatron import MegatronSource
from mrl.checkpoint.formats.merged_source import MergedSource
from mrl.checkpoint.formats.peft import PeftFolder, write_peft_folder
from mrl.checkpoint.formats.trtllm import TrtllmSource
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.commands.convert.command_line import (
    FlagParser,
    add_adapter_flag,
    add_base_flag,
    add_conversion_flags,
    add_folder_flags,
    add_hf_flags,
    add_like_flag,
    add_megatron_flags,
    add_trtllm_flags,
    hf_target,
    like_arch,
    megatron_target,
    progress_bar,
    run_conversion,
    trtllm_target,
)
from mrl.commands.convert.verify import verify
from mrl.distributed.watchdog.stdio import tolerate_closed_pipes
from mrl.errors import UserError, shown
from mrl.models.base import ArchSpec
from mrl.resharding.hf import hf_layout
from mrl.resharding.regions import full_region, volume

_HF = "Hugging Face folder with safetensors"
_MEGATRON = "distributed checkpoint from mrl, Megatron-LM (torch_dist) or a converter"
_TRTLLM = "TensorRT-LLM checkpoint: config.json and rank files"


@dataclass(frozen=True)
class Converter:
    """One word of `mrl convert`.

    Attributes:
        description: First sentence of --help.
        example: Arguments of the command in --help, after `mrl convert NAME`.
        add_flags: Adds its flags to a parser.
        work: Runs it with the parsed flags and returns the exit status.
    """

    description: str
    example: str
    add_flags: Callable[[FlagParser], None]
    work: Callable[[argparse.Namespace], int]

    def run(self, name: str, argv: Sequence[str], prog: str) -> int:
        """Parses the flags and runs the converter.

        Args:
            name: Key of the converter in CONVERTERS, for the example in --help.
            argv: Flags and folders.
            prog: Program name in usage messages.

        Returns:
            Exit status.

        Raises:
            UserError: A folder, layout or file is wrong.
        """
        parser = FlagParser(self.description, f"  mrl convert {name} {self.example}\n", prog)
        self.add_flags(parser)
        args = parser.parse(argv)
        torch.set_num_threads(1)  # a process reads, writes and hashes in one thread each; parallelism is --num_workers
        return self.work(args)


def run_as_tool(name: str) -> int:
    """Runs a converter as a script of `tools/`, with the process's arguments; prints a UserError as one line.

    Returns:
        Exit status: that of the converter, 2 after a UserError, 130 after Ctrl-C.
    """
    prog = sys.argv[0].rsplit("/", 1)[-1]
    tolerate_closed_pipes()
    try:
        return CONVERTERS[name].run(name, sys.argv[1:], prog)
    except UserError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{prog}: interrupted; repeat the command to continue\n")
        return 130


def _conversion(
    description: str,
    example: str,
    source: tuple[str, Callable[[argparse.Namespace], Source]],
    target: Callable[[argparse.Namespace, Source], Target],
    *flags: Callable[[FlagParser], None],
) -> Converter:
    """Returns a converter between two formats.

    Args:
        description: First sentence of --help.
        example: Arguments of the example in --help.
        source: Help text of --model_dir, and the function that opens it.
        target: Makes the target from the flags.
        flags: Functions that add the flags of source and target.
    """
    what, open_folder = source

    def add_flags(parser: FlagParser) -> None:
        add_conversion_flags(parser, what)
        for add in flags:
            add(parser)

    return Converter(description, example, add_flags, lambda args: run_conversion(args, open_folder(args), target))


def _open_hf(args: argparse.Namespace) -> Source:
    if args.adapter is None:
        return HfSource(args.model_dir)
    merged = _with_adapters(args.model_dir, args.adapter)
    named = merged.describe()["adapter"]["base_model_name_or_path"]
    model = f"the model {shown(named)}" if named else "no model"
    Console(stderr=True).print(
        f"Merging '{args.adapter}' into '{args.model_dir}'. adapter_config.json names {model}; whether they are the "
        "same is not checked.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return merged


def _with_adapters(model: str, adapter: str) -> Source:
    """Opens a Hugging Face folder with a PEFT folder merged into it."""
    base = HfSource(model)
    return MergedSource(base, PeftFolder(adapter, base.arch))


def _open_megatron(args: argparse.Namespace) -> Source:
    if args.base is None:
        return MegatronSource(args.model_dir, like_arch(args))
    return _with_base(args.model_dir, args.base)


def _with_base(checkpoint: str, model: str) -> Source:
    """Opens a checkpoint of adapters, merged into the Hugging Face folder of their model, which is compared first."""
    adapters, base = AdapterCheckpoint(checkpoint), HfSource(model)
    base.check()
    adapters.check_base(base)
    return MergedSource(base, adapters)


def _open_trtllm(args: argparse.Namespace) -> Source:
    return TrtllmSource(args.model_dir)


def _peft_flags(parser: FlagParser) -> None:
    add_folder_flags(parser, "checkpoint of an mrl run whose actor has adapters (actor.lora)")
    add_base_flag(parser, "compared with the one that the adapters were trained on, and named in adapter_config.json")


def _megatron_to_peft(args: argparse.Namespace) -> int:
    adapters = AdapterCheckpoint(args.model_dir)
    if args.base is not None:
        with closing(HfSource(args.base)) as base:
            base.check()
            adapters.check_base(base)
    write_peft_folder(
        args.output_dir, adapters.arch, adapters.lora, adapters.tensor, base=args.base, dtype=adapters.dtype
    )
    modules = adapters.describe()["modules"]
    Console(stderr=True).print(
        f"{args.output_dir}: adapters of {modules} modules", highlight=False, markup=False, soft_wrap=True
    )
    return 0


def _hf_to_hf_target(args: argparse.Namespace, source: Source) -> Target:
    """Returns the target of the flags, by default with the tokenizer of the source."""
    args.like = args.like or args.model_dir
    return hf_target(args, source)


def _inspect_flags(parser: FlagParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="folder of the checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no_hash", action="store_true", help="only read headers")
    add_like_flag(parser)


def _description(args: argparse.Namespace) -> dict[str, Any]:
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


def _inspect(args: argparse.Namespace) -> int:
    found = _description(args)
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


def _verify_flags(parser: FlagParser) -> None:
    parser.add_argument("a", metavar="A", help="checkpoint: Hugging Face, Megatron or TensorRT-LLM")
    parser.add_argument("b", metavar="B", help="checkpoint to compare with")
    parser.add_argument("--atol", type=float, help="absolute tolerance: |a - b| <= atol + rtol * |b|; default: bitwise")
    parser.add_argument("--rtol", type=float, help="relative tolerance, see --atol")
    add_adapter_flag(parser, "A")
    add_base_flag(parser, "if A is a checkpoint of adapters: merge them into this model")
    add_like_flag(parser)


def _open_first(args: argparse.Namespace, arch: ArchSpec | None) -> Source:
    """Opens the first checkpoint of a comparison."""
    if args.adapter is not None and args.base is not None:
        raise UserError("--adapter and --base exclude each other: A is either a model or a checkpoint of adapters.")
    if args.adapter is not None:
        return _with_adapters(args.a, args.adapter)
    return open_source(args.a, arch) if args.base is None else _with_base(args.a, args.base)


def _verify(args: argparse.Namespace) -> int:
    arch = like_arch(args)
    with closing(_open_first(args, arch)) as a, closing(open_source(args.b, arch)) as b:
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


CONVERTERS = {
    "hf-to-megatron": _conversion(
        "Converts a Hugging Face folder to a Megatron distributed checkpoint at any layout; no GPU or process group.",
        "--model_dir Qwen3-30B-A3B --output_dir qwen3-megatron \\\n"
        "    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8",
        (_HF, _open_hf), megatron_target, add_megatron_flags, add_adapter_flag,
    ),
    "hf-to-trtllm": _conversion(
        "Converts a Hugging Face folder to a TensorRT-LLM checkpoint: config.json and one file per rank.",
        "--model_dir Qwen3-30B-A3B --output_dir qwen3-trtllm --tp_size 4 --pp_size 2",
        (_HF, _open_hf), trtllm_target, add_trtllm_flags, add_adapter_flag,
    ),
    "hf-to-hf": _conversion(
        "Rewrites a Hugging Face folder: merges adapters (--adapter), or changes dtype or the size of the files.",
        "--model_dir Qwen3-8B --adapter runs/math/adapter --output_dir qwen3-math",
        (_HF, _open_hf), _hf_to_hf_target, add_hf_flags, add_adapter_flag,
    ),
    "megatron-to-hf": _conversion(
        "Converts a Megatron distributed checkpoint of any layout to a Hugging Face folder; no GPU or process group.",
        "--model_dir runs/math/checkpoints/step-00000400 --output_dir math-hf \\\n    --like Qwen3-30B-A3B",
        (_MEGATRON, _open_megatron), hf_target, add_hf_flags, add_base_flag,
    ),
    "megatron-to-trtllm": _conversion(
        "Converts a Megatron distributed checkpoint of any layout to a TensorRT-LLM checkpoint.",
        "--model_dir qwen3-megatron --output_dir qwen3-trtllm \\\n"
        "    --dtype bfloat16 --tp_size 8 --moe_tp_size 2 --moe_ep_size 4",
        (_MEGATRON, _open_megatron), trtllm_target, add_trtllm_flags, add_like_flag, add_base_flag,
    ),
    "megatron-to-peft": Converter(
        "Writes the adapters of an mrl checkpoint as a PEFT folder.",
        "--model_dir runs/math/checkpoints/step-00000400 --output_dir math-adapter --base Qwen3-8B",
        _peft_flags, _megatron_to_peft,
    ),
    "trtllm-to-hf": _conversion(
        "Converts a TensorRT-LLM checkpoint to a Hugging Face folder.",
        "--model_dir qwen3-trtllm --output_dir qwen3-hf --like Qwen3-30B-A3B",
        (_TRTLLM, _open_trtllm), hf_target, add_hf_flags,
    ),
    "inspect": Converter(
        "Prints format, layout, tensors, bytes and hashes of a Hugging Face, Megatron or TensorRT-LLM checkpoint.",
        "runs/math/checkpoints/step-00000400 --no_hash", _inspect_flags, _inspect,
    ),
    "verify": Converter(
        "Compares the weights of two checkpoints of any format and layout. Exit status: 0 equal, 1 different, 2 error.",
        "Qwen3-30B-A3B qwen3-trtllm", _verify_flags, _verify,
    ),
}  # fmt: skip
"""Word of `mrl convert` -> what it does."""
