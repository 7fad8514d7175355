"""Data-parallel wrappers of the chunks: gradient buffers and sharded weights.

With `overlap_param_gather` each rank updates only its shard of the weights; the next update's forward gathers them
module by module, and code that reads weights before that gathers them at once (`DataParallelChunks.gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from mrl.config.config import Config
from mrl.config.megatron_fields.defaults import ddp_defaults, overlaps_gradients
from mrl.distributed import shared_memory
from mrl.megatron.config_passthrough import check_te, explain_errors, megatron_values
from mrl.megatron.model import ScoringModel


class DataParallelChunks:
    """This rank's chunks, wrapped in Megatron's DistributedDataParallel.

    Attributes:
        chunks: Chunks by virtual stage, wrapped if they are trained.
    """

    def __init__(
        self,
        chunks: list[ScoringModel],
        config: Config,
        *,
        te: bool,
        trained: bool = True,
        after_backward: Callable[[], None] | None = None,
    ) -> None:
        """Collective over the job: wraps the chunks.

        Args:
            chunks: Chunks by virtual stage.
            config: Config of the model.
            te: True if the layers are TransformerEngine's.
            trained: True if the model is trained; if not, there are no gradients and nothing is wrapped.
            after_backward: Called after Megatron has reduced the gradients of a backward; None: nothing to do.

        Raises:
            UserError: Megatron rejects the fields of `megatron.ddp`.
        """
        self._sharded = False
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
        with explain_errors("ddp", given):
            self._settings = DistributedDataParallelConfig(**{**own, **megatron_values("ddp", given)})
            wrapper = _SingleRankDDP if not te and _is_single_rank(self._settings) else DistributedDataParallel
            self.chunks = [wrapper(chunk.config, self._settings, chunk) for chunk in chunks]
        self._set_functions(chunks[0].config, after_backward)

    def _set_functions(self, config: Any, after_backward: Callable[[], None] | None) -> None:
        """Sets the hooks that Megatron's schedule calls at the end of a backward and to start communication."""

        def finalize(*args: Any, **options: Any) -> None:
            finalize_model_grads(*args, **options)
            if after_backward is not None:
                after_backward()

        config.finalize_model_grads_func = finalize
        if self._settings.overlap_grad_reduce:
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.chunks])
        if self._settings.overlap_param_gather and self._settings.align_param_gather:
            config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in self.chunks])

    def mark_updated(self) -> None:
        """Records that the weights are sharded; must be called after an optimizer step."""
        self._sharded = bool(self._settings.overlap_param_gather)

    def gather(self) -> None:
        """Collective over data-parallel after an update: gathers the full weights on every rank."""
        if self._sharded:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self._sharded = False

    def zero_gradients(self) -> None:
        """Zeroes the gradient buffers, before every update."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def share_memory(self) -> None:
        """Moves CPU weights into shared memory, which other ranks of the host read.

        Must be called before the optimizer is created, as its shards are views of the weights.
        """
        if dist.get_world_size() > 1:
            shared_memory.share(self._weights())

    def _weights(self) -> Iterator[Tensor]:
        """Yields the parameters, and the buffers in which Megatron may have placed them."""
        for chunk in self.chunks:
            yield from chunk.parameters()
            if isinstance(chunk, DistributedDataParallel):
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    views = (buffer.param_data, *(bucket.param_data for bucket in buffer.buckets))
                    yield from (view for view in views if view is not None)

    def gradients(self) -> Iterator[Tensor]:
        """Yields the gradient buffers; none for a model that is not trained."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))


class _SingleRankDDP(DistributedDataParallel):  # type: ignore[misc]  # megatron.core has no types
    """DistributedDataParallel of a single rank, without the collectives, which would only copy buffers."""

    def finish_grad_sync(self, *unused: Any, **options: Any) -> None:
        """Does nothing: the sum over one rank is already there."""

    def start_param_sync(self, *unused: Any, **options: Any) -> None:
        """Does nothing: the weights are complete."""


def _is_single_rank(settings: DistributedDataParallelConfig) -> bool:
    """Returns whether Megatron's collectives would only copy; with gradient checks enabled they do more."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks = max(dense.size(), parallel_state.get_expert_data_parallel_group().size())
    has_extra_work = settings.overlap_grad_reduce or settings.overlap_param_gather
    return ranks == 1 and not (has_extra_work or settings.check_for_nan_in_grad or settings.check_for_large_grads)


def _one_or_all(functions: list[Any]) -> Any:
    """Returns the function for one chunk, or the list for several, as Megatron's schedules expect."""
    return functions if len(functions) > 1 else functions[0]
