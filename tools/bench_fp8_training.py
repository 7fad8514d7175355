"""Measures the distance of engine and actor for each numerics of both: quickstart with an FP8 engine, on a CPU.

The native engine stores FP8 weights and multiplies them with unrounded activations. vLLM and TensorRT-LLM round
activations too, in blocks of 1 x 128; "rounded" rows show that, with the native engine's inputs rounded by this tool.

    python tools/bench_fp8_training.py --steps 20 --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from mrl.commands.cli import main as mrl
from mrl.engines.native.packed_linear import Linear
from mrl.megatron.cpu.fp8_emulation import rounded_to_fp8

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    "run.device=cpu",
    "run.num_threads=1",
    "rollout.quantization=fp8",
    "rollout.enforce_eager=true",  # compiled operations call no `Linear`
    "algorithm.rollout_correction.preset=decoupled_token_is",
)
ACTORS = {
    "unquantized": None,
    "blockwise": "{fp8: e4m3, fp8_recipe: blockwise}",
    "mxfp8": "{fp8: e4m3, fp8_recipe: mxfp8}",
    "tensorwise, hybrid": "{fp8: hybrid, fp8_recipe: tensorwise}",
}
METRICS = ("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/log_ppl_abs_diff", "rollout_corr/rollout_is_std")


def main() -> None:
    """Runs every pair and prints a table of the metrics' means over all steps, and over the seeds with their range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="values of run.seed")
    given = parser.parse_args()
    rows = []
    for activations in ("unrounded", "rounded"):
        for actor, fields in ACTORS.items():
            with tempfile.TemporaryDirectory() as folder, engine_inputs(rounded=activations == "rounded"):
                found = [measure(Path(folder) / str(seed), given.steps, seed, fields) for seed in given.seeds]
            rows.append(
                f"| {activations} | {actor} | {' | '.join(spread([run[name] for run in found]) for name in METRICS)} |"
            )
    print(f"| engine's activations | actor | {' | '.join(METRICS)} |")
    print("\n".join([f"|{'---|' * (2 + len(METRICS))}", *rows]))


def spread(values: list[float]) -> str:
    """Returns the mean of the seeds, and their range if there are several."""
    mean = f"{fmean(values):.2e}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2e} to {max(values):.2e})"


def measure(folder: Path, steps: int, seed: int, fields: str | None) -> dict[str, float]:
    """Trains for a few steps and returns the mean of each metric."""
    settings = [f"run.output_dir={folder}", f"train.num_steps={steps}", f"run.seed={seed}", *SETTINGS]
    if fields is not None:
        settings.append(f"megatron.transformer={fields}")
    if mrl(["train", str(ROOT / "configs" / "quickstart.yaml"), *settings]):
        raise SystemExit(1)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {name: fmean(row[name] for row in rows if name in row) for name in METRICS}


@contextmanager
def engine_inputs(*, rounded: bool) -> Iterator[None]:
    """Makes the native engine round the inputs of its FP8 layers."""
    exact = Linear.__call__

    def product(self: Linear, x_PI: Tensor) -> Tensor:
        if self._scales is not None:
            x_PI = rounded_to_fp8(x_PI, (1, 128), torch.float8_e4m3fn).to(x_PI.dtype)
        return exact(self, x_PI)

    Linear.__call__ = product if rounded else exact  # type: ignore[method-assign]
    try:
        yield
    finally:
        Linear.__call__ = exact  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
