"""The actor's weights into the rollout engine, in place, all or nothing.

Owns `Refit`: one plan made at start, run before every rollout. The engine refuses to generate from the first byte to
the last check; a failure on any rank raises on all, and the engine stays shut until a whole refit has passed.

Steps of a refit: `begin_update` -> local copies and rounds of messages, each with its checksum (`transfer.py`) -> the
engine's own checksum of all it stores must equal the sum of what it was given -> all ranks agree -> `finish_update`.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config import CheckpointEngineConfig
from mrl.distributed.collectives import from_rank, together
from mrl.engines.base import RolloutEngine, WeightSlice
from mrl.refit.transfer import Arrival, Transfer
from mrl.weights.layout import Layout
from mrl.weights.plan import Plan, make_plan
from mrl.weights.tensors import DTYPES, check_tensors

MIB = 1 << 20


class Refit:
    """Callable; one object per rank for the whole run.

    Attributes:
        plan: Copies of all ranks and their cost.
    """

    def __init__(
        self,
        source_layout: Layout,
        sources: Mapping[str, Tensor],
        engine: RolloutEngine,
        config: CheckpointEngineConfig,
    ) -> None:
        """Collective over the job: exchanges layouts and makes the plan.

        Args:
            source_layout: What this rank of the actor holds.
            sources: Its tensors, by the names of the layout; read at every refit.
            engine: This rank's part of its replica.
            config: Size of the staging buffers.

        Raises:
            RuntimeError: Tensors and layout disagree, or the actor's layouts do not hold what the engines need.
        """
        rank = dist.get_rank()
        with together():
            check_tensors(source_layout, sources)
        target_layout = engine.layout()
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        self.plan: Plan = make_plan(
            gather_layouts(source_layout),
            gather_layouts(target_layout),
            host_of=lambda other: hosts.index(hosts[other]),
        )
        bucket_bytes = config.update_weights_bucket_megabytes * MIB
        dtypes = {name: stored.dtype for name, stored in target_layout.items()}
        self._transfer = Transfer(self.plan.copies, sources, dtypes, rank=rank, bucket_bytes=bucket_bytes)
        self._engine = engine
        self._target_layout = target_layout

    def __call__(self, policy_version: int) -> dict[str, float]:
        """Collective over the job: the engine holds the actor's weights and generates under `policy_version`.

        Returns:
            `cost`, and refit/gb_per_s: local and moved bytes over this rank's time from the first byte to the last
            check, the engine's own work in `finish_update` left out.

        Raises:
            RuntimeError: On every rank, where any rank failed; the message names the rank and the tensor. The engine
                refuses to generate until a refit has passed.
        """
        start = time.perf_counter()
        with together():
            self._engine.begin_update()
            self._engine.update_weights(self._zero_padding())
        given = self._transfer.run(self._write)
        with together():
            self._compare(given)
        elapsed = time.perf_counter() - start
        try:
            with together():
                self._engine.finish_update(policy_version)
        except Exception:
            self._engine.begin_update()  # this rank's engine may have opened
            raise
        rate = (self.plan.bytes_local + self.plan.bytes_moved) / elapsed / 1e9
        return {**self.cost(), "refit/gb_per_s": rate}

    def cost(self) -> dict[str, float]:
        """Bytes of any refit, over all ranks: copied inside ranks, sent between them, the least that must be sent."""
        return {
            "refit/bytes_local": float(self.plan.bytes_local),
            "refit/bytes_moved": float(self.plan.bytes_moved),
            "refit/bytes_lower_bound": float(self.plan.lower_bound_bytes),
        }

    def _compare(self, given: int) -> None:
        stored = self._engine.checksum()
        if stored != given:
            raise RuntimeError(
                f"the engine's weights add up to {stored:016x}, what it was given to {given:016x}: a write was lost, "
                "or something else wrote"
            )

    def _write(self, arrivals: Sequence[Arrival]) -> None:
        self._engine.update_weights([WeightSlice(item.name, item.region, item.data) for item in arrivals])

    def _zero_padding(self) -> list[WeightSlice]:
        """Padded rows hold zeros, so that they add nothing to the checksum."""
        return [
            WeightSlice(name, region, torch.zeros([stop - start for start, stop in region], dtype=DTYPES[stored.dtype]))
            for name, stored in self._target_layout.items()
            for region in stored.padding
        ]


def gather_layouts(layout: Layout) -> dict[int, Layout]:
    """Collective over the job: every rank's layout; equal ones are sent once and become one object."""
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    shared: dict[str, Layout] = {}
    for rank, found in enumerate(digests):
        if found not in shared:
            sent = from_rank(rank, layout if found == digest else None)
            shared[found] = layout if sent is None else sent
    return {rank: shared[found] for rank, found in enumerate(digests)}
