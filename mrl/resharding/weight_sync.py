"""The actor's weights into the rollout engine, in place, all or nothing.

Owns `Refit`: one plan made at start, run before every rollout. A rank may hold both sides or only one: where rollouts
have ranks of their own, those that train give and the others take. The engine refuses to generate from the first byte
to the last check; a failure on any rank raises on all, and the engine stays shut until a whole refit has passed.

Steps of a refit: `begin_update` -> with FP8 the scales of all weights (`quantizer.py`) -> copies and rounds of
messages; each part's checksum at its source must be that of what is written into the engine (`transfer.py`) -> all
ranks agree -> `finish_update`.

Sums are taken as bytes pass by, without a further pass over memory. They do not show whether a later write went to the
same place: tensors that share storage. So in the first refit, in the first after a failure or a release, and for an
engine that keeps slices for later, all that is stored is read back: the engine's own checksum of it must equal the sum
of what it was given, too.
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
from mrl.distributed.collectives import from_rank, together
from mrl.resharding.checksum import MODULUS
from mrl.resharding.copy_op import num_bytes
from mrl.resharding.dtypes import DTYPES, check_tensors
from mrl.resharding.fp8 import DTYPE as FP8
from mrl.resharding.fp8 import Grids, is_scale_table, matrix_of
from mrl.resharding.layout import Layout
from mrl.resharding.plan import Plan, make_plan
from mrl.resharding.quantizer import Quantizer
from mrl.resharding.sink import hand_over
from mrl.resharding.transfer import Transfer
from mrl.resharding.weight_slice import WeightReceiver, WeightSlice

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
        engine: WeightReceiver,
        config: CheckpointEngineConfig,
        grids: Grids | None = None,
    ) -> None:
        """Collective over the job: exchanges layouts and makes the plan.

        Args:
            source_layout: What this rank of the actor holds; nothing where it does not train.
            sources: Its tensors, by the names of the layout; read at every refit.
            engine: This rank's part of its replica.
            config: Size of the staging buffers.
            grids: Of the matrices that are quantised to FP8 on their way, which the engine must store so, with their
                scales; None: none.

        Raises:
            RuntimeError: Tensors and layout disagree, the actor's layouts do not hold what the engines need, or the
                engine does not store in FP8 what is quantised.
        """
        rank, grids = dist.get_rank(), grids or {}
        target_layout = engine.layout()
        with together():
            check_tensors(source_layout, sources)
            _check_quantized(target_layout, grids)
        self._scales = {name: stored for name, stored in target_layout.items() if is_scale_table(stored)}
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        self.plan: Plan = make_plan(
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
        self._proven = False

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
        proven = self._proven and self._engine.policy_version >= 0
        self._proven = False
        with together():
            self._engine.begin_update()
            self._engine.update_weights(self._zero_padding())
        if self._quantizer is not None:
            self._quantizer.measure()
        self._transfer.run(self._engine.update_weights, partial(self._prove, proven=proven))
        elapsed = time.perf_counter() - start
        try:
            with together():
                self._engine.finish_update(policy_version)
        except Exception:
            self._engine.begin_update()  # this rank's engine may have opened
            raise
        self._proven = True
        rate = (self.plan.bytes_local + self.plan.bytes_moved) / elapsed / 1e9
        return {**self.cost(), "refit/gb_per_s": rate}

    def cost(self) -> dict[str, float]:
        """Bytes of any refit, over all ranks: copied inside ranks, sent between them, the least that must be sent.

        With FP8 also refit/bytes_scales, which every rank writes by itself.
        """
        found = {
            "refit/bytes_local": float(self.plan.bytes_local),
            "refit/bytes_moved": float(self.plan.bytes_moved),
            "refit/bytes_lower_bound": float(self.plan.lower_bound_bytes),
        }
        return found if self._quantizer is None else {**found, "refit/bytes_scales": float(self._scale_bytes)}

    def _prove(self, given: int, *, proven: bool) -> None:
        """With FP8 the scales too; then reads the engine back, unless all was added up where it was written before."""
        if self._quantizer is not None:
            given = (given + self._write_scales(self._quantizer)) % MODULUS
        if proven and self._transfer.written:
            return
        stored = self._engine.checksum()
        if stored != given:
            raise RuntimeError(
                f"the engine's weights add up to {stored:016x}, what it was given to {given:016x}: a write was lost, "
                "or something else wrote"
            )

    def _write_scales(self, quantizer: Quantizer) -> int:
        """Fills the engine's tables; the sum of what it was given."""
        items = [
            WeightSlice(name, piece.dst, quantizer.scales(matrix_of(piece), piece.src))
            for name, stored in self._scales.items()
            for piece in stored.pieces
        ]
        total, _ = hand_over(items, self._engine.update_weights, "scales")
        return total

    def _zero_padding(self) -> list[WeightSlice]:
        """Padded rows hold zeros, so that they add nothing to the checksum."""
        return [
            WeightSlice(name, region, torch.zeros([stop - start for start, stop in region], dtype=DTYPES[stored.dtype]))
            for name, stored in self._target_layout.items()
            for region in stored.padding
        ]


def _check_quantized(layout: Layout, grids: Grids) -> None:
    """Raises RuntimeError unless an engine stores in FP8, with scales, what is quantised, and nothing else."""
    scaled = {matrix_of(piece) for stored in layout.values() if is_scale_table(stored) for piece in stored.pieces}
    for name, stored in layout.items():
        wanted = any(piece.hf_name in grids for piece in stored.pieces)
        if wanted != (stored.dtype == FP8) or (wanted and any(piece.hf_name not in scaled for piece in stored.pieces)):
            raise RuntimeError(
                f"the engine stores '{name}' as {stored.dtype}, and rollout.quantization has it "
                f"{'in float8_e4m3fn with scales' if wanted else 'without quantisation'}: the engine's layout and "
                "rollout.quantization disagree"
            )


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
