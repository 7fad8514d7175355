"""Fixture of an acceptance run's checks: a training job whose engine can be synced, woken and sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from acceptance.result import Spec
from mrl.config.config import load
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.engines.base import SamplingConfig
from mrl.resharding.fp8 import block_grids
from mrl.resharding.quantizer import Quantizer
from mrl.resharding.random_init import random_init
from mrl.resharding.regions import slices
from mrl.trainer import weight_sync_check
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.trainer import Trainer
from mrl.types import Prompt, Rollout


class Bench:
    """A job whose actor has the weights of `model.path`.

    Attributes:
        folder: Output folder of the engine, shared by its sessions.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        """Loads the initial weights.

        Args:
            trainer: Started job without weights.
            folder: Existing output folder.
        """
        self.trainer, self.folder = trainer, folder
        trainer.weights.load_initial()

    @property
    def tolerance(self) -> float:
        """Tolerance of the weight-sync self-test, nats."""
        return weight_sync_check.tolerance_of(self.trainer.device)

    def refit(self) -> None:
        """Syncs the actor's weights into the engine, even if the engine already has them."""
        self.trainer.state.policy_version += 1
        self.trainer.sync_weights_if_stale()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        """Samples with the engine awake."""
        with raise_on_all_ranks(), self.trainer.rollout_worker.awake() as engine:
            return engine.generate(prompts, sampling)

    def greedy_responses(self) -> list[Rollout]:
        """Returns greedy responses to the prompts of the weight-sync self-test."""
        return weight_sync_check.sample_responses(self.generate, self.trainer.arch, self.trainer.config.rollout)

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Gives the actor random weights inside the block."""
        trainer = self.trainer
        with self._restored():
            random_init(
                trainer.arch, trainer.actor.layout(), trainer.actor.named_tensors(), seed=trainer.config.run.seed + 1
            )
            yield

    @contextmanager
    def rounded_weights(self) -> Iterator[None]:
        """Rounds the actor's weights as `rollout.quantization` does inside the block."""
        trainer = self.trainer
        layout, grids = trainer.actor.layout(), block_grids(trainer.arch, trainer.config.rollout.quantization)
        with self._restored() as tensors:
            quantizer = Quantizer(layout, tensors, grids, trainer.device)
            quantizer.compute_scales()
            for name, stored in layout.items():
                for piece in stored.pieces:
                    if piece.hf_name in grids:
                        values = tensors[name].detach()[slices(piece.dst)]
                        values.copy_(quantizer.roundtrip(piece.hf_name, piece.src, values))
            yield

    @contextmanager
    def _restored(self) -> Iterator[dict[str, Tensor]]:
        """Restores the actor's tensors when the block ends."""
        tensors = self.trainer.actor.named_tensors()
        kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        try:
            yield tensors
        finally:
            for name, tensor in self.trainer.actor.named_tensors().items():
                tensor.detach().copy_(kept[name])

    def used(self) -> int:
        """Returns the bytes of the device in use by all processes; 0 on a CPU."""
        if self.trainer.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.trainer.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.trainer.device)
        return total - free


@contextmanager
def opened(spec: Spec) -> Iterator[Bench]:
    """Collective over the job: creates the fixture of a session."""
    with open_trainer(build_run_plan(load(spec.config, spec.overrides)), log=False) as trainer:
        yield Bench(trainer, Path(spec.folder))
