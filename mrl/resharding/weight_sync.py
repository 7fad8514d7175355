"""Weight sync: copies the actor's weights into the rollout engine, in place, all or nothing.

`WeightSync` makes one plan at start and executes it before every rollout. A rank may have the actor, the engine, or
both: with separate trainer and rollout ranks, the former send and the latter receive. The engine refuses to generate
from the first byte to the last check. A failure on any rank raises on all ranks, and the engine refuses to generate
until a weight sync has succeeded.

Steps: `begin_update` -> with FP8, the scales of all weights (`quantizer.py`) -> copies and rounds of messages, in which
the checksum of each part at its source must equal that of the part written into the engine (`transfer.py`) -> agreement
of all ranks -> `finish_update`.

Checksums are computed while bytes are copied, without an additional pass over memory. They do not detect a later write
to the same memory, for example through another tensor with the same storage. Therefore the engine's own checksum of its
stored weights is also compared with the sum of the sent ones: at the first sync, at the first one after a failure or
after the engine released its weights, and in every sync for an engine that stages the slices and applies them in
`finish_update`.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.config import CheckpointEngineConfig
from mrl.distributed.collectives import any_rank, broadcast_object, raise_on_all_ranks
from mrl.resharding.checksum import MODULUS
from mrl.resharding.copy_op import num_bytes
from mrl.resharding.dtypes import DTYPES, check_tensors
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.fp8 import Grids, is_scale_table, matrix_of
from mrl.resharding.layout import Layout
from mrl.resharding.plan import TransferPlan, make_plan
from mrl.resharding.quantizer import Quantizer
from mrl.resharding.transfer import Transfer, deliver
from mrl.resharding.weight_slice import WeightReceiver, WeightSlice

MIB = 1 << 20


class WeightSync:
    """Weight sync of one rank; one object for the entire run, called before every rollout.

    Attributes:
        plan: Copies of all ranks and their cost.
    """

    def __init__(
        self,
        source_layout: Layout,
        sources: Mapping[str, Tensor],
        engine: WeightReceiver,
        config: CheckpointEngineConfig,
        grids: Grids | None = None,
    ) -> None:
        """Collective over the job: exchanges layouts and makes the plan.

        Args:
            source_layout: Layout of this rank's part of the actor; empty on a rank that does not train.
            sources: Tensors of the actor by the names of the layout; read at every sync.
            engine: This rank's part of its rollout replica.
            config: Size of the staging buffers.
            grids: Block grids of the matrices that are quantized to FP8 before they are sent; the engine must store
                them in FP8, with scales. None: no quantization.

        Raises:
            RuntimeError: Tensors and layout disagree, the actor's layouts lack elements that the engines need, or the
                engine does not store in FP8 exactly the quantized matrices.
        """
        rank, grids = dist.get_rank(), grids or {}
        target_layout = engine.layout()
        with raise_on_all_ranks():
            check_tensors(source_layout, sources)
            _check_quantized(target_layout, grids)
        self._scales = {name: stored for name, stored in target_layout.items() if is_scale_table(stored)}
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        self.plan: TransferPlan = make_plan(
            gather_layouts(source_layout),
            gather_layouts({name: stored for name, stored in target_layout.items() if name not in self._scales}),
            host_of=lambda other: hosts.index(hosts[other]),
        )
        bucket_bytes = config.update_weights_bucket_megabytes * MIB
        dtypes = {name: stored.dtype for name, stored in target_layout.items()}
        device = next((tensor.device for tensor in sources.values()), engine.spec.device)
        self._quantizer = Quantizer(source_layout, sources, grids, device) if grids else None
        self._transfer = Transfer(
            self.plan.copies,
            sources,
            dtypes,
            rank=rank,
            bucket_bytes=bucket_bytes,
            quantize=self._quantizer.quantize if self._quantizer else None,
            device=device,
        )
        self._scale_bytes = 0
        if grids:
            counts: list[int] = [0] * dist.get_world_size()
            dist.all_gather_object(counts, sum(map(num_bytes, self._scales.values())))
            self._scale_bytes = sum(counts)
        self._engine = engine
        self._target_layout = target_layout
        self._verified = False

    def __call__(self, policy_version: int) -> dict[str, float]:
        """Collective over the job: copies the actor's weights into the engine, which then serves `policy_version`.

        Returns:
            `cost`, and refit/gb_per_s: local and moved bytes per second of this rank's time from the first byte to the
                last
            check; the engine's own work in `finish_update` is not included.

        Raises:
            RuntimeError: Any rank failed; raised on every rank, naming the rank and the tensor. The engine refuses to
                generate until a weight sync has succeeded.
        """
        start = time.perf_counter()
        verified = self._verified and self._engine.policy_version >= 0
        self._verified = False
        with raise_on_all_ranks():
            self._engine.begin_update()
            self._engine.update_weights(self._zero_padding())
        if self._quantizer is not None:
            self._quantizer.compute_scales()
        self._transfer.run(self._engine.update_weights, partial(self._verify, verified=verified))
        elapsed = time.perf_counter() - start
        try:
            with raise_on_all_ranks():
                self._engine.finish_update(policy_version)
        except Exception:
            self._engine.begin_update()  # this rank's engine may already accept requests
            raise
        self._verified = True
        rate = (self.plan.bytes_local + self.plan.bytes_moved) / elapsed / 1e9
        return {**self.cost(), "refit/gb_per_s": rate}

    def free_buffers(self) -> None:
        """Releases the staging buffers, on all ranks of the job before the next sync, which allocates them again."""
        self._transfer.free_buffers()

    def cost(self) -> dict[str, float]:
        """Returns the bytes of one weight sync over all ranks: copied inside ranks, sent, and at least to be sent.

        With FP8 also refit/bytes_scales, which every rank computes and writes itself.
        """
        found = {
            "refit/bytes_local": float(self.plan.bytes_local),
            "refit/bytes_moved": float(self.plan.bytes_moved),
            "refit/bytes_lower_bound": float(self.plan.lower_bound_bytes),
        }
        return found if self._quantizer is None else {**found, "refit/bytes_scales": float(self._scale_bytes)}

    def _verify(self, given: int, *, verified: bool) -> None:
        """Writes the scales (with FP8); compares the engine's checksum with `given` unless all writes were checked."""
        if self._quantizer is not None:
            given = (given + self._write_scales(self._quantizer)) % MODULUS
        if verified and self._transfer.all_written:
            return
        stored = self._engine.checksum()
        if stored != given:
            raise RuntimeError(
                f"checksum mismatch after weight sync: sent {given:016x}, the engine stores {stored:016x}; a write was "
                "dropped or overwritten"
            )

    def _write_scales(self, quantizer: Quantizer) -> int:
        """Writes the engine's tables of scales; returns the sum of their bits."""
        items = [
            WeightSlice(name, piece.dst, quantizer.scales(matrix_of(piece), piece.src))
            for name, stored in self._scales.items()
            for piece in stored.pieces
        ]
        total, _ = deliver(items, self._engine.update_weights, "scales")
        return total

    def _zero_padding(self) -> list[WeightSlice]:
        """Returns zeros for padded rows, so that they add nothing to the checksum."""
        return [
            WeightSlice(name, region, torch.zeros([stop - start for start, stop in region], dtype=DTYPES[stored.dtype]))
            for name, stored in self._target_layout.items()
            for region in stored.padding
        ]


class AdapterSync:
    """Weight sync into an engine that stores adapters beside the weights: the weights once, the adapters every time.

    Args:
        weights: Sync of the model's own weights.
        adapters: Sync of the adapters.
        engine: This rank's part of its rollout replica.
    """

    def __init__(self, weights: WeightSync, adapters: WeightSync, engine: WeightReceiver) -> None:
        self._weights, self._adapters, self._engine = weights, adapters, engine

    @property
    def plan(self) -> TransferPlan:
        """Copies of the adapters of all ranks and their cost."""
        return self._adapters.plan

    def __call__(self, policy_version: int) -> dict[str, float]:
        """Collective over the job: copies the adapters into the engine, and the weights if some engine lacks them.

        Returns:
            Metrics of the sync of the adapters, see `WeightSync`.

        Raises:
            RuntimeError: See `WeightSync`.
        """
        if any_rank(self._engine.policy_version < 0):
            self._weights(policy_version)
            self._weights.free_buffers()  # normally not needed again
        return self._adapters(policy_version)

    def cost(self) -> dict[str, float]:
        """Returns the bytes of one sync of the adapters over all ranks, see `WeightSync.cost`."""
        return self._adapters.cost()


def _check_quantized(layout: Layout, grids: Grids) -> None:
    """Raises RuntimeError unless the engine stores exactly the quantized matrices in FP8, with scales."""
    scaled = {matrix_of(piece) for stored in layout.values() if is_scale_table(stored) for piece in stored.pieces}
    for name, stored in layout.items():
        wanted = any(piece.hf_name in grids for piece in stored.pieces)
        if wanted != (stored.dtype == FP8) or (wanted and any(piece.hf_name not in scaled for piece in stored.pieces)):
            raise RuntimeError(
                f"the engine's layout and rollout.quantization disagree: the engine stores '{name}' as {stored.dtype}, "
                f"expected {'float8_e4m3fn with scales' if wanted else 'a dtype without quantization'}"
            )


def gather_layouts(layout: Layout) -> dict[int, Layout]:
    """Collective over the job: returns every rank's layout; equal layouts are sent once and become one object."""
    digest = hashlib.sha256(repr(layout).encode()).hexdigest()
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    shared: dict[str, Layout] = {}
    for rank, found in enumerate(digests):
        if found not in shared:
            sent = broadcast_object(rank, layout if found == digest else None)
            shared[found] = layout if sent is None else sent
    return {rank: shared[found] for rank, found in enumerate(digests)}
