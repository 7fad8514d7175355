"""The chunks wrapped for data parallelism: gradient buffers, and weights of which a rank updates only its part.

Owns what mrl and `megatron.ddp` tell Megatron's DistributedDataParallel, and when every rank has the weights whole:
with `overlap_param_gather` an update leaves each rank its own part, the next forward of an update gathers the rest
module by module, and whoever reads weights before that has them gathered at once (`Replicas.gather`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from mrl.config.config import Config
from mrl.config.megatron_fields.defaults import ddp_defaults, overlaps_gradients
from mrl.distributed import shared_memory
from mrl.megatron.config_passthrough import check_te, given_to, objects
from mrl.megatron.model import ScoringModel


class Replicas:
    """This rank's chunks as replicas of those of other data-parallel ranks.

    Attributes:
        chunks: Wrapped where they are trained, by virtual stage.
    """

    def __init__(self, chunks: list[ScoringModel], config: Config, *, te: bool, trained: bool = True) -> None:
        """Collective over the job: wraps the chunks.

        Args:
            chunks: By virtual stage.
            config: The model's.
            te: Its layers are TransformerEngine's.
            trained: False: there are no gradients, and nothing is wrapped.

        Raises:
            UserError: Megatron refuses what `megatron.ddp` says.
        """
        self._partial = False
        self.chunks: list[Any] = list(chunks)
        if not trained:
            return
        given = config.megatron.ddp
        check_te("ddp", given, te=te)
        own = {
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": config.actor.use_distributed_optimizer,
            "overlap_grad_reduce": overlaps_gradients(config.actor, te=te),
            **ddp_defaults(config.actor, config.megatron, te=te),
        }
        with given_to("ddp", given):
            self._settings = DistributedDataParallelConfig(**{**own, **objects("ddp", given)})
            kind = _Alone if not te and _is_alone(self._settings) else DistributedDataParallel
            self.chunks = [kind(chunk.config, self._settings, chunk) for chunk in chunks]
        self._set_functions(chunks[0].config)

    def _set_functions(self, config: Any) -> None:
        """What Megatron's schedule calls: the end of a backward, and where communication starts."""
        config.finalize_model_grads_func = finalize_model_grads
        if self._settings.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.chunks])
        if self._settings.overlap_param_gather and self._settings.align_param_gather:
            config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in self.chunks])

    def updated(self) -> None:
        """Must be called after an optimizer step."""
        self._partial = bool(self._settings.overlap_param_gather)

    def gather(self) -> None:
        """Collective over data-parallel after an update: the weights are whole on every rank."""
        if self._partial:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self._partial = False

    def zero_gradients(self) -> None:
        """Before every update."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def share(self) -> None:
        """Puts the weights into memory in which other ranks of the host read them, where they are in the host's memory.

        Comes before the optimizer, whose parts look into them.
        """
        if dist.get_world_size() > 1:
            shared_memory.share(self._weights())

    def _weights(self) -> Iterator[Tensor]:
        """Parameters, and the buffers in which Megatron may have put them."""
        for chunk in self.chunks:
            yield from chunk.parameters()
            if isinstance(chunk, DistributedDataParallel):
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    views = (buffer.param_data, *(bucket.param_data for bucket in buffer.buckets))
                    yield from (view for view in views if view is not None)

    def gradients(self) -> Iterator[Tensor]:
        """The buffers; of a model that is not trained there are none."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))


class _Alone(DistributedDataParallel):  # type: ignore[misc]  # megatron.core has no types
    """Where no other rank has weights of this one: collectives would copy its buffers, only to write the same back."""

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """The sum over one rank is there already."""

    def start_param_sync(self, *unused: Any, **options: Any) -> None:
        """The weights are whole already."""


def _is_alone(settings: DistributedDataParallelConfig) -> bool:
    """Whether Megatron's exchange would only copy; where it is told to, it also looks for what is not finite."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks = max(dense.size(), parallel_state.get_expert_data_parallel_group().size())
    more = settings.overlap_grad_reduce or settings.overlap_param_gather
    return ranks == 1 and not (more or settings.check_for_nan_in_grad or settings.check_for_large_grads)


def _one_or_all(functions: list[Any]) -> Any:
    """Megatron's schedules take a function for one chunk, a list for several."""
    return functions if len(functions) > 1 else functions[0]
