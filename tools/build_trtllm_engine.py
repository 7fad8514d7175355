r"""A TensorRT-LLM checkpoint (config.json and rank{N}.safetensors) -> TensorRT engines that can be refitted in place.

    python tools/build_trtllm_engine.py --checkpoint_dir ckpt --output_dir engines --max_batch_size 256 \
        --max_input_len 1024 --max_seq_len 4096 --kv_cache_type continuous
    mpirun -n 4 python tools/build_trtllm_engine.py --checkpoint_dir ckpt_tp4 --output_dir engines_tp4

Flags are trtllm-build's, which itself has none for refit. A single process builds the engines of all ranks one after
the other; under MPI there must be one process for each rank. Everything that can be wrong with the checkpoint, the
limits or the disk is said before tensorrt_llm is imported; --dry-run stops there and prints the plan. The engines
appear under their name when all of them are finished.

The folder is what `rollout.engine_dir` names; without one, preflight prints the command line that makes it.

Written for the TensorRT backend of TensorRT-LLM 1.2 (1.3 removed it), from its sources; not run with it.

Exit status: 0 done, 2 a mistake in what was given, 3 TensorRT-LLM or mpi4py is missing or of another version.
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
"""Exit status where a package is missing or of another version."""

VERSIONS = ((1, 2), (1, 3))
"""First version that is supported, first that is not any more."""

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


class MissingError(Exception):
    """A package is missing or of another version."""


@dataclass(frozen=True)
class Limits:
    """What an engine is built for; the names are those of `tensorrt_llm.BuildConfig`."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int
    max_num_tokens: int
    opt_num_tokens: int | None

    def check(self, max_positions: int) -> None:
        """Raises UserError where the limits contradict each other or the model."""
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise UserError(f"--{name} is {value}; expected a whole number above 0.")
        for small, large, why in (
            ("max_input_len", "max_seq_len", "a sequence is a prompt and its response"),
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
    """The command line."""
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
        text = "the model's positions" if name == "max_seq_len" else default
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {text}")
    cache = "rollout.name=trtllm_engine runs continuous; default: TensorRT-LLM's, which is paged"
    parser.add_argument("--kv_cache_type", choices=("continuous", "paged", "disabled"), help=cache)
    parser.add_argument("--logits_dtype", choices=("float16", "float32"), help="default: what config.json says")
    parser.add_argument("--profiling_verbosity", choices=("layer_names_only", "detailed", "none"))
    parser.add_argument("--input_timing_cache", help="a file of an earlier build, which becomes faster by it")
    parser.add_argument("--output_timing_cache")
    parser.add_argument("--gather_context_logits", action="store_true")
    parser.add_argument("--gather_generation_logits", action="store_true", help="rollout.name=trtllm_engine needs none")
    parser.add_argument("--strip_plan", action="store_true", help="leave the weights out; refit before use")
    parser.add_argument("--deep", action="store_true", help="also compare what the checkpoint holds more than once")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="check everything, print the plan, stop")
    return parser.parse_args(arguments)


def plan(given: argparse.Namespace) -> dict[str, Any]:
    """Checks everything that needs no TensorRT-LLM.

    Returns:
        The plan as JSON: the checkpoint, the build config's fields, bytes.

    Raises:
        UserError: The checkpoint is not whole, the limits do not fit, the output is in the way or the disk too small.
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
        raise UserError(f"--output_dir '{output}' is there already and not an empty folder. Choose another one.")
    if given.input_timing_cache is not None and not Path(given.input_timing_cache).is_file():
        raise UserError(f"--input_timing_cache '{given.input_timing_cache}' is not a file.")
    here = next(parent for parent in (output.absolute(), *output.absolute().parents) if parent.is_dir())
    needed = 0 if given.strip_plan else summary["num_bytes"]
    free = shutil.disk_usage(here).free
    if free < needed:
        raise UserError(f"'{here}' has {free} bytes left; the engines need about {needed}, as many as the weights.")
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
    """MPI's world where a launcher started more than one process, else None.

    Raises:
        UserError: There are neither one process nor as many as ranks.
        MissingError: mpi4py is missing.
    """
    size = next((int(os.environ[name]) for name in _MPI_SIZES if os.environ.get(name, "").isdigit()), 1)
    if size == 1:
        return None
    if size != ranks:
        raise UserError(
            f"MPI started {size} processes; the checkpoint has {ranks} ranks. Start {ranks}, or one for all."
        )
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingError(
            f"mpi4py is not installed ({error}); several processes need it. Start one process."
        ) from error
    return MPI.COMM_WORLD


def load_tensorrt_llm() -> Any:
    """The package.

    Raises:
        MissingError: It is not installed, or of a version without the TensorRT backend.
    """
    first, end = (".".join(map(str, version)) for version in VERSIONS)
    try:
        import tensorrt_llm
    except ImportError as error:
        raise MissingError(
            f"TensorRT-LLM is not installed ({error}); the checkpoint and the limits are in order. Run this where "
            f"tensorrt_llm >= {first}, < {end} and a GPU are, as in NVIDIA's release containers."
        ) from error
    version = str(tensorrt_llm.__version__)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        raise MissingError(f"tensorrt_llm is {version}; its TensorRT backend is in versions >= {first}, < {end}.")
    return tensorrt_llm


def build_rank(planned: dict[str, Any], rank: int, folder: Path) -> None:
    """Builds the engine of one rank on this process's GPU, into `folder`; as `trtllm-build` does."""
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
        raise RuntimeError(f"TensorRT built no engine for {rank_file(rank)}; its log says why")
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
    """Runs; mistakes and missing packages are one line."""
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
