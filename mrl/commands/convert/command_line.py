"""Command-line parts that the converters share: flags, progress bar, plan, targets from flags.

`mrl/commands/convert/convert.py` does the conversion.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from mrl.checkpoint.formats.base import Source, Target
from mrl.checkpoint.formats.hf import MAX_FILE_BYTES, HfTarget
from mrl.checkpoint.formats.megatron import MegatronTarget
from mrl.checkpoint.formats.trtllm import TrtllmTarget, read_activation_scales
from mrl.checkpoint.io.partial_folder import MANIFEST
from mrl.commands.convert.convert import Conversion, convert, plan_conversion
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.hf import hf_layout
from mrl.resharding.regions import full_region, volume
from mrl.resharding.trtllm import TrtllmMapping

AUTO = "auto"
_DTYPES = (AUTO, "float32", "bfloat16", "float16")


class FlagParser(argparse.ArgumentParser):
    """Argument parser that treats `--tp_size` and `--tp-size` as the same flag and accepts no abbreviations."""

    def __init__(self, description: str, example: str, prog: str) -> None:
        """Sets the description, the example that is shown below the flags, and the program's name."""
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n{example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parses the arguments."""
        spelling = {option.replace("_", "-"): option for option in self._option_string_actions}
        found = []
        for word in arguments:
            flag, equals, value = word.partition("=")
            known = spelling.get(flag.replace("_", "-")) if word.startswith("--") else None
            found.append(word if known is None else known + equals + value)
        return self.parse_args(found)


def add_conversion_flags(parser: FlagParser, what: str) -> None:
    """Adds the flags that all conversions have.

    Args:
        parser: Parser that receives the flags.
        what: Help text of --model_dir.
    """
    add_folder_flags(parser, what)
    parser.add_argument("--dtype", choices=_DTYPES, default=AUTO, help="dtype of the weights; auto: that of the source")
    parser.add_argument("--num_workers", type=positive, default=1, metavar="N", help="number of processes (1)")
    parser.add_argument("--allow_nan", action="store_true", help="accept infinite and NaN values, and count them")
    parser.add_argument(
        "--dry_run", action="store_true", help="print tensors, bytes, files and peak memory; write nothing"
    )


def add_folder_flags(parser: FlagParser, what: str) -> None:
    """Adds the flags for the folders that are read and written; `what` is the help text of --model_dir."""
    parser.add_argument("--model_dir", required=True, help=what)
    parser.add_argument("--output_dir", required=True, help="folder to create; named OUTPUT_DIR.partial until complete")


def run_conversion(
    args: argparse.Namespace, source: Source, make_target: Callable[[argparse.Namespace, Source], Target]
) -> int:
    """Converts the checkpoint, or prints the plan; closes the source.

    Args:
        args: Parsed arguments with the flags of `add_conversion_flags`.
        source: Opened source checkpoint.
        make_target: `megatron_target`, `trtllm_target` or `hf_target`.
    """
    console = Console(stderr=True)
    with closing(source):
        target = make_target(args, source)
        plan = plan_conversion(source, target)
        if args.dry_run:
            Console(soft_wrap=True, highlight=False).print(_plan_text(plan, args.num_workers))
            return 0
        with progress_bar(console, "converting", plan.num_bytes) as advance:
            manifest = convert(
                source,
                target,
                args.output_dir,
                plan=plan,
                num_workers=args.num_workers,
                allow_nan=args.allow_nan,
                progress=advance,
            )
    if manifest is None:
        console.print("This process is done; the last one to finish renames the folder.", highlight=False)
        return 0
    bijection = manifest["bijection"]
    console.print(
        f"{args.output_dir}: {len(manifest['target']['files'])} files, {plan.num_bytes / 1e9:.3f} GB; "
        f"{bijection['hf_elements']} elements of {bijection['hf_tensors']} tensors, each in its place ({MANIFEST})",
        highlight=False,
        soft_wrap=True,
    )
    if left_out := source.num_left_out():
        console.print(f"{left_out} tensors of layers for multi-token prediction were not read", highlight=False)
    return 0


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar of `total` bytes and yields the function that advances it."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def positive(text: str) -> int:
    """Parses an integer above 0, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} came, expected a number above 0")
    return number


def common_dtype(source: Source, wanted: str) -> str:
    """Returns `wanted`, or for "auto" the dtype of most elements of the source.

    Raises:
        UserError: The source is damaged or does not match its config.
    """
    if wanted != AUTO:
        return wanted
    source.check()
    elements: Counter[str] = Counter()
    for name, stored in hf_layout(source.arch, "float32").items():
        elements[source.dtype(name)] += volume(full_region(stored.shape))
    return elements.most_common(1)[0][0]


def add_megatron_flags(parser: FlagParser) -> None:
    """Adds Megatron-LM's flags for parallel sizes."""
    group = parser.add_argument_group("layout of the target, as in Megatron-LM")
    for name in ("tensor", "pipeline", "expert"):
        group.add_argument(f"--{name}-model-parallel-size", type=positive, default=1, metavar="N")
    group.add_argument("--expert-tensor-parallel-size", type=positive, metavar="N", help="default: as the other layers")
    group.add_argument("--virtual-pipeline-model-parallel-size", type=positive, default=1, metavar="N")
    for end in ("first", "last"):
        group.add_argument(f"--num-layers-in-{end}-pipeline-stage", type=positive, metavar="N")


def megatron_target(args: argparse.Namespace, source: Source) -> MegatronTarget:
    """Returns the target of the flags, with the fewest ranks that fit one copy of the model."""
    tp, pp, ep = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size
    etp = args.expert_tensor_parallel_size
    if source.arch.moe is None and (ep > 1 or etp is not None):
        raise UserError(f"--expert-model-parallel-size={ep}: this {source.arch.family} model has no experts.")
    stage = tp
    while stage % (ep * (tp if etp is None else etp)):
        stage += tp
    grid = ParallelLayout(
        stage * pp,
        tp=tp,
        pp=pp,
        vpp=args.virtual_pipeline_model_parallel_size,
        ep=ep,
        etp=etp,
        first_stage_layers=args.num_layers_in_first_pipeline_stage,
        last_stage_layers=args.num_layers_in_last_pipeline_stage,
    )
    return MegatronTarget(source.arch, grid, common_dtype(source, args.dtype))


def add_trtllm_flags(parser: FlagParser) -> None:
    """Adds TensorRT-LLM's flags for parallel sizes."""
    group = parser.add_argument_group("layout of the target, as in TensorRT-LLM's convert_checkpoint.py")
    group.add_argument("--tp_size", type=positive, default=1, metavar="N")
    group.add_argument("--pp_size", type=positive, default=1, metavar="N")
    group.add_argument("--moe_tp_size", type=positive, default=0, metavar="N", help="tensor parallelism of an expert")
    group.add_argument("--moe_ep_size", type=positive, default=0, metavar="N", help="expert parallelism")
    group.add_argument("--use_parallel_embedding", action="store_true")
    group.add_argument("--embedding_sharding_dim", type=int, choices=(0, 1), default=0)
    group.add_argument("--gpus_per_node", type=positive, default=8, metavar="N")
    group.add_argument(
        "--fp8_activation_scales",
        metavar="FILE",
        help="FP8 linear layers; JSON file: module name -> max |input| during calibration / 448",
    )


def trtllm_target(args: argparse.Namespace, source: Source) -> TrtllmTarget:
    """Returns the target of the flags."""
    mapping = TrtllmMapping(
        args.tp_size,
        args.pp_size,
        args.moe_tp_size,
        args.moe_ep_size,
        args.use_parallel_embedding,
        args.embedding_sharding_dim,
    )
    scales = None if args.fp8_activation_scales is None else read_activation_scales(args.fp8_activation_scales)
    dtype = common_dtype(source, args.dtype)
    return TrtllmTarget(source.arch, mapping, dtype, activation_scales=scales, gpus_per_node=args.gpus_per_node)


def add_like_flag(parser: FlagParser) -> None:
    """Adds the flag that supplies config.json for a Megatron checkpoint."""
    parser.add_argument("--like", metavar="FOLDER", help="config.json folder, for Megatron checkpoints without one")


def add_adapter_flag(parser: FlagParser, model: str = "MODEL_DIR") -> None:
    """Adds the flag that names adapters of the Hugging Face source, which the help text calls `model`."""
    parser.add_argument("--adapter", metavar="FOLDER", help=f"PEFT folder: merge its low-rank adapters into {model}")


def add_base_flag(
    parser: FlagParser, use: str = "for a checkpoint of mrl that has only adapters (actor.lora): merge them into it"
) -> None:
    """Adds the flag that names the model of a checkpoint's adapters."""
    parser.add_argument("--base", metavar="MODEL", help=f"Hugging Face folder of the run's model.path: {use}")


def like_arch(args: argparse.Namespace) -> ArchSpec | None:
    """Returns the structure of the model that --like names, or None without the flag.

    Raises:
        UserError: The folder has no readable config.json.
    """
    return None if args.like is None else arch_from_folder(args.like)


def add_hf_flags(parser: FlagParser) -> None:
    """Adds the flags for writing a Hugging Face folder."""
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="Hugging Face folder whose tokenizer, generation settings and config are copied",
    )
    parser.add_argument(
        "--max_file_bytes", type=positive, default=MAX_FILE_BYTES, metavar="N", help="largest file, bytes (5 GiB)"
    )


def hf_target(args: argparse.Namespace, source: Source) -> HfTarget:
    """Returns the target of the flags."""
    names = hf_layout(source.arch, "float32")
    dtype = {name: source.dtype(name) for name in names} if args.dtype == AUTO else args.dtype
    return HfTarget(source.arch, dtype, like=args.like, max_file_bytes=args.max_file_bytes)


def _plan_text(plan: Conversion, num_workers: int) -> str:
    proof = plan.proof
    repeated = "".join(f", {count} copies of {why}" for why, count in proof.repeated_elements.items())
    lines = [
        f"tensors        {plan.num_tensors}",
        f"bytes          {plan.num_bytes} ({plan.num_bytes / 1e9:.3f} GB)",
        f"files          {len(plan.file_bytes)}, largest {max(plan.file_bytes.values()) / 1e9:.3f} GB",
        f"peak memory    {plan.peak_bytes * num_workers / 1e9:.3f} GB of buffers in {num_workers} processes",
        f"elements       {proof.hf_elements} of the model, {proof.padding_elements} padding{repeated}",
    ]
    lines += [f"cast           {change}: {count} elements" for change, count in plan.dtype_changes.items()]
    return "\n".join(lines)
