r"""Builds refittable TensorRT engines from a TensorRT-LLM checkpoint (config.json and rank{N}.safetensors).

    python tools/build_trtllm_engine.py --checkpoint_dir ckpt --output_dir engines --max_batch_size 256 \
        --max_input_len 1024 --max_seq_len 4096 --kv_cache_type continuous
    mpirun -n 4 python tools/build_trtllm_engine.py --checkpoint_dir ckpt_tp4 --output_dir engines_tp4

The flags are those of trtllm-build, which has none for refit. A single process builds the engines of all ranks one
after another; under MPI there must be one process per rank. Checkpoint, limits and disk space are checked before
tensorrt_llm is imported; --dry-run stops there and prints the plan. The output folder gets its name when all engines
are complete.

The folder is the value of `rollout.engine_dir`; if that is missing, `mrl train` prints the command that builds it.

Written for the TensorRT backend of TensorRT-LLM 1.2 (1.3 removed it), from its sources; not run with it.

Exit status: 0 success, 2 invalid arguments, 3 TensorRT-LLM or mpi4py is missing or has another version.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrl.checkpoint.formats.trtllm import TrtllmSource, rank_file
from mrl.errors import UserError

MISSING = 3
"""Exit status if a package is missing or has another version."""

VERSIONS = ((1, 2), (1, 3))
"""First supported version, and first version that is no longer supported."""

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


class MissingError(Exception):
    """Raised if a package is missing or has another version."""


@dataclass(frozen=True)
class Limits:
    """Limits of an engine; the names are those of `tensorrt_llm.BuildConfig`."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int
    max_num_tokens: int
    opt_num_tokens: int | None

    def check(self, max_positions: int) -> None:
        """Raises UserError if the limits contradict each other or the model."""
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}; expected an integer above 0.")
        for small, large, why in (
            ("max_input_len", "max_seq_len", "a sequence includes its prompt"),
            ("max_input_len", "max_num_tokens", "a prompt is processed in one step"),
            ("opt_num_tokens", "max_num_tokens", "it is the expected number of tokens in a step"),
        ):
            given, bound = getattr(self, small), getattr(self, large)
            if given is not None and given > bound:
                raise UserError(f"--{small} is {given}, above --{large}={bound}; {why}.")
        if self.max_batch_size * self.max_beam_width > self.max_num_tokens:
            raise UserError(
                f"--max_batch_size={self.max_batch_size} x --max_beam_width={self.max_beam_width} is above "
                f"--max_num_tokens={self.max_num_tokens}; a step generates one token for each."
            )
        if self.max_seq_len > max_positions:
            raise UserError(f"--max_seq_len is {self.max_seq_len}; the model has {max_positions} positions.")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--output_dir", type=Path, default=Path("engine_outputs"), help="default: %(default)s")
    for name, default in (
        ("max_batch_size", 2048),
        ("max_input_len", 1024),
        ("max_seq_len", None),
        ("max_beam_width", 1),
        ("max_num_tokens", 8192),
        ("opt_num_tokens", None),
    ):
        text = "the model's maximum positions" if name == "max_seq_len" else default
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {text}")
    cache = "rollout.name=trtllm_engine needs continuous; default: that of TensorRT-LLM, paged"
    parser.add_argument("--kv_cache_type", choices=("continuous", "paged", "disabled"), help=cache)
    parser.add_argument("--logits_dtype", choices=("float16", "float32"), help="default: that of config.json")
    parser.add_argument("--profiling_verbosity", choices=("layer_names_only", "detailed", "none"))
    parser.add_argument("--input_timing_cache", help="timing cache of an earlier build, which speeds up this one")
    parser.add_argument("--output_timing_cache")
    parser.add_argument("--gather_context_logits", action="store_true")
    parser.add_argument("--gather_generation_logits", action="store_true", help="rollout.name=trtllm_engine needs none")
    parser.add_argument("--strip_plan", action="store_true", help="omit the weights; refit before use")
    parser.add_argument("--deep", action="store_true", help="also compare the copies of replicated tensors")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="check everything, print the plan, stop")
    return parser.parse_args(arguments)


def plan(given: argparse.Namespace) -> dict[str, Any]:
    """Checks everything that does not need TensorRT-LLM.

    Returns:
        The plan as JSON: the checkpoint, the build config's fields, bytes.

    Raises:
        UserError: The checkpoint is incomplete, the limits are invalid, the output folder is not empty, or the disk is
            too small.
    """
    with closing(TrtllmSource(given.checkpoint_dir)) as source:
        source.check(deep=given.deep)
        summary = {key: value for key, value in source.describe().items() if key != "tensors"}
        ranks, positions = source.config.mapping.world_size, source.arch.max_position_embeddings
        gpus_per_node = source.config.gpus_per_node
    limits = Limits(
        max_batch_size=given.max_batch_size,
        max_input_len=given.max_input_len,
        max_seq_len=positions if given.max_seq_len is None else given.max_seq_len,
        max_beam_width=given.max_beam_width,
        max_num_tokens=given.max_num_tokens,
        opt_num_tokens=given.opt_num_tokens,
    )
    limits.check(positions)
    output = given.output_dir
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output_dir '{output}' exists and is not an empty folder. Choose another one.")
    if given.input_timing_cache is not None and not Path(given.input_timing_cache).is_file():
        raise UserError(f"--input_timing_cache '{given.input_timing_cache}' is not a file.")
    here = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.is_dir())
    needed = 0 if given.strip_plan else summary["num_bytes"]
    free = shutil.disk_usage(here).free
    if free < needed:
        raise UserError(f"'{here}' has {free} bytes free; the engines need about {needed}, the size of the weights.")
    options = {
        name: getattr(given, name)
        for name in ("kv_cache_type", "profiling_verbosity", "input_timing_cache", "output_timing_cache")
        if getattr(given, name) is not None
    }
    return {
        "checkpoint": {"folder": str(given.checkpoint_dir), **summary},
        "engines": [str(output / f"rank{rank}.engine") for rank in range(ranks)],
        "gpus_per_node": gpus_per_node,
        "logits_dtype": given.logits_dtype,
        "free_bytes": free,
        "build_config": {
            **{name: value for name, value in asdict(limits).items() if value is not None},
            **options,
            "gather_context_logits": given.gather_context_logits,
            "gather_generation_logits": given.gather_generation_logits,
            "use_strip_plan": given.strip_plan,
            "use_refit": True,
        },
    }


def communicator(ranks: int) -> Any:
    """Returns MPI's world communicator if a launcher started several processes, else None.

    Raises:
        UserError: The number of processes is neither 1 nor the number of ranks.
        MissingError: mpi4py is missing.
    """
    size = next((int(os.environ[name]) for name in _MPI_SIZES if os.environ.get(name, "").isdigit()), 1)
    if size == 1:
        return None
    if size != ranks:
        raise UserError(
            f"MPI started {size} processes; the checkpoint has {ranks} ranks. Start {ranks} processes, or one."
        )
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingError(
            f"mpi4py is not installed ({error}); several processes need it. Start one process."
        ) from error
    return MPI.COMM_WORLD


def load_tensorrt_llm() -> Any:
    """Imports tensorrt_llm.

    Raises:
        MissingError: It is not installed, or has no TensorRT backend.
    """
    first, end = (".".join(map(str, version)) for version in VERSIONS)
    try:
        import tensorrt_llm
    except ImportError as error:
        raise MissingError(
            f"TensorRT-LLM is not installed ({error}); the checkpoint and the limits are valid. Run this on a machine "
            f"with a GPU and tensorrt_llm >= {first}, < {end}, for example in NVIDIA's release containers."
        ) from error
    version = str(tensorrt_llm.__version__)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        raise MissingError(f"tensorrt_llm is {version}; its TensorRT backend is in versions >= {first}, < {end}.")
    return tensorrt_llm


def build_rank(planned: dict[str, Any], rank: int, folder: Path) -> None:
    """Builds the engine of one rank on this process's GPU into `folder`, as `trtllm-build` does."""
    import torch
    from tensorrt_llm.builder import BuildConfig, build
    from tensorrt_llm.models import MODEL_MAP, PretrainedConfig

    if torch.cuda.is_available():
        torch.cuda.set_device(rank % planned["gpus_per_node"] % torch.cuda.device_count())
    checkpoint = planned["checkpoint"]["folder"]
    config = PretrainedConfig.from_json_file(os.path.join(checkpoint, "config.json"))
    if planned["logits_dtype"] is not None:
        config.logits_dtype = planned["logits_dtype"]
    config.set_rank(rank)
    model = MODEL_MAP[config.architecture].from_checkpoint(checkpoint, config=config)
    engine = build(model, BuildConfig(**planned["build_config"]))
    if engine is None:
        raise RuntimeError(f"TensorRT built no engine for {rank_file(rank)}; see its log")
    engine.save(str(folder))


def run(given: argparse.Namespace) -> None:
    """Plans, and builds the engines of this process."""
    planned = plan(given)
    ranks = len(planned["engines"])
    world = communicator(ranks)
    own = range(ranks) if world is None else range(world.Get_rank(), world.Get_rank() + 1)
    if given.dry_run:
        if 0 in own:
            print(json.dumps(planned, indent=2))
        return
    load_tensorrt_llm()
    partial = given.output_dir.with_name(given.output_dir.name + ".partial")
    if 0 in own:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if world is not None:
        world.Barrier()
    for rank in own:
        build_rank(planned, rank, partial)
        print(f"rank {rank} of {ranks}: built", flush=True)
    if world is not None:
        world.Barrier()
    if 0 in own:
        if given.output_dir.is_dir():
            given.output_dir.rmdir()
        partial.rename(given.output_dir)
        print(f"engines of {ranks} ranks in '{given.output_dir}'")


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; prints errors as one line and returns the exit status."""
    given = parse(arguments)
    try:
        run(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISSING
    return 0


if __name__ == "__main__":
    sys.exit(main())
