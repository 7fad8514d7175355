"""Packing of batches into microbatches, and their forward and backward passes through Megatron's pipeline schedules.

All tokens of a sequence except the last are inputs of the model: the last is scored but predicts nothing.

Shapes: as in `mrl/types.py`, and I packed inputs: the sequences' tokens without the last of each; D computed rows.

Losses arrive normalised by global counts, so nothing here or in Megatron may scale them: `calculate_per_token_loss` is
on and the reported number of tokens is 0, which Megatron interprets as "do not divide".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.algorithms.base import required
from mrl.algorithms.functional.logprobs import Distribution
from mrl.config.megatron_fields.fp8 import smallest_row_unit
from mrl.data.packing import pack_microbatches
from mrl.data.shared_prefix import each_token, shared_prefixes
from mrl.distributed.collectives import all_reduce_
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.attention import PackedSequences, pack, pack_compiled, sliding_window
from mrl.megatron.context_parallel import context_targets
from mrl.megatron.distillation_targets import DistillationSpec, DistillationTargets
from mrl.megatron.microbatch import (
    PackedMicrobatch,
    RowLayout,
    input_mask,
    lay_out,
    lay_out_by_sequence,
    scored_tokens,
    shard_for_cp,
    shard_targets,
)
from mrl.megatron.model import Targets
from mrl.megatron.pipeline_comm import messages
from mrl.megatron.router import Routing, packed_routing
from mrl.megatron.routing_record import RoutingRecorder
from mrl.megatron.te_attention import pack_for_te, pack_shared_for_te
from mrl.types import RolloutBatch

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(*scores of the last stage for each response token, microbatch) -> (loss sum, detached metrics)."""


class ForwardBackward:
    """Splits batches into microbatches and runs them through the model chunks of this rank.

    Attributes:
        share_prefixes: True if a prefix shared by several sequences is computed once; may be changed between batches.
        replay: True if tokens are routed to the experts in the batch's `routed_experts_P`.
        distillation: Teachers' output weights for batches with `teacher_B` and `teacher_states_R`; None: no comparison.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroups,
        device: torch.device,
        *,
        max_tokens: int,
        te: bool,
        share_prefixes: bool = True,
        num_experts: int = 0,
        layers: Sequence[int] = (),
        equal_lengths: bool = False,
        replay: bool = False,
        compiled: bool = False,
        row_unit: int | None = None,
        conv_kernel: int | None = None,
    ) -> None:
        """Stores the chunks and settings.

        Args:
            chunks: Model chunks of this rank by virtual stage, wrapped for data parallelism or not.
            groups: Process groups of the layout.
            device: Device of the chunks.
            max_tokens: Token budget of a microbatch.
            te: True if attention is TransformerEngine's.
            share_prefixes: True if a prefix shared by several sequences is computed once.
            num_experts: Experts per layer; 0 for a dense model.
            layers: Layers with experts of this rank's pipeline stage, to which `routed_experts_P` refers.
            equal_lengths: True if microbatches are padded to the same length on all data-parallel ranks.
            replay: True if tokens are routed to the experts in the batch's `routed_experts_P`; may be changed between
                batches.
            compiled: True if attention uses the compiled CPU kernels.
            row_unit: Divisor of a microbatch's number of rows; None: the smallest that the layout allows.
            conv_kernel: Tokens that the convolution of linear attention reads; None: no layer has linear attention.
        """
        self._chunks, self._groups, self._device = list(chunks), groups, device
        self._max_tokens, self._te, self.share_prefixes = max_tokens, te, share_prefixes
        self._num_experts, self._layers = num_experts, layers
        self._equal_lengths, self.replay, self._compiled = equal_lengths, replay, compiled
        self._row_unit = smallest_row_unit(groups.grid) if row_unit is None else row_unit
        self._conv_kernel = conv_kernel
        config: Any = self._chunks[0].config
        self._window = sliding_window(config)
        self.distillation: DistillationSpec | None = None

    def microbatches(
        self, batch: RolloutBatch, distribution: Distribution | None, *, keep_groups_together: bool = False
    ) -> list[PackedMicrobatch]:
        """Collective over data-parallel: packs the batch into microbatches, the same number on every rank.

        Args:
            batch: Sequences of this data-parallel index; may be empty.
            distribution: Distribution under which tokens are scored; None: the final hidden states are returned.
            keep_groups_together: True if sequences with one `group_id_B` share a microbatch, maybe beyond its budget.
        """
        grid = self._groups.grid
        config: Any = self._chunks[0].config
        # the interleaved schedule needs a multiple of this
        multiple: int = config.microbatch_group_size_per_vp_stage if grid.vpp > 1 else 1
        groups = self._sample_groups(batch) if keep_groups_together else self._prompt_groups(batch)
        lens = [length for _, length in groups]
        packed = pack_microbatches(lens, self._max_tokens, multiple_of=multiple) or [[]]
        while True:  # a higher minimum may pack into still more microbatches: repeat until all ranks agree
            extremes = torch.tensor([len(packed), -len(packed)])
            all_reduce_(extremes, self._groups.dp, dist.ReduceOp.MAX)
            if extremes[0] == -extremes[1]:
                break
            packed = pack_microbatches(lens, self._max_tokens, at_least=int(extremes[0]), multiple_of=multiple)
        rows = [[row for item in items for row in groups[item][0]] for items in packed]
        microbatches = [self._microbatch(batch, each, distribution) for each in rows]
        if not self._equal_lengths:
            return microbatches
        longest = torch.tensor([micro.tokens.size(1) for micro in microbatches])
        all_reduce_(longest, self._groups.dp, dist.ReduceOp.MAX)
        return [
            self._microbatch(batch, each, distribution, most) for each, most in zip(rows, longest.tolist(), strict=True)
        ]

    def run(
        self,
        microbatches: list[PackedMicrobatch],
        loss: Loss,
        *,
        backward: bool,
        routing_recorder: RoutingRecorder | None = None,
    ) -> list[dict[str, Tensor]]:
        """Collective over the actor's replica: runs the forward pass, and the backward pass if requested.

        Args:
            microbatches: Microbatches of this data-parallel index.
            loss: Loss of a microbatch.
            backward: True if gradients are computed.
            routing_recorder: Recorder of the experts that tokens are routed to, for MoE models.

        Returns:
            On the last pipeline stage, for each microbatch the metrics of `loss` and its "scores" (detached, [n, R]);
            [] on other stages.
        """
        iterators = [iter(enumerate(microbatches)) for _ in self._chunks]
        interleaved = len(self._chunks) > 1

        def forward(
            data: Iterator[tuple[int, PackedMicrobatch]], chunk: torch.nn.Module
        ) -> tuple[Any, Callable[..., Any]]:
            index, micro = next(data)
            packed, kept = micro.packed, None
            if packed.routing is not None:  # moved late, so that it is on the device only during this microbatch
                if routing_recorder is not None:
                    kept = routing_recorder.allocate(micro.tokens.size(1), self._device)
                packed = replace(packed, routing=replace(packed.routing.to(self._device), chosen_nLK=kept))
            output = chunk(
                input_ids=micro.tokens,
                position_ids=micro.positions,
                attention_mask=None,
                labels=micro.targets,
                packed_seq_params=packed,
            )
            if routing_recorder is not None and kept is not None:
                routing_recorder.record(index, kept)
            return output, lambda scored: self._report(scored, index, micro, loss)

        lengths = [micro.tokens.size(1) for micro in microbatches]
        with messages(self._groups.pp, self._chunks[0].config, lengths) as given:
            reports: list[tuple[int, dict[str, Tensor]]] = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iterators if interleaved else iterators[0],
                model=self._chunks if interleaved else self._chunks[0],
                num_microbatches=len(microbatches),
                seq_length=max(lengths),
                micro_batch_size=1,
                forward_only=not backward,
                **given,
            )
        return [report for _, report in sorted(reports, key=lambda item: item[0])]

    @staticmethod
    def _report(scored: tuple[Tensor, ...], index: int, micro: PackedMicrobatch, loss: Loss) -> tuple[Any, ...]:
        value, metrics = loss(*scored, micro.batch)
        # the schedule may scale the loss in place, so the report must not share its memory
        report = {name: metric.detach().clone() for name, metric in metrics.items()}
        report["scores"] = torch.stack([scores_R.detach() for scores_R in scored])
        return value, torch.zeros((), dtype=torch.int, device=value.device), (index, report)

    def _prompt_groups(self, batch: RolloutBatch) -> list[tuple[list[int], int]]:
        """Returns groups of sequences with the same prompt that fit a microbatch, each with its number of inputs."""
        prompt_lens, response_lens = batch.prompt_lens_B.tolist(), batch.response_lens_B.tolist()
        if not self.share_prefixes:
            return [([row], sum(lens) - 1) for row, lens in enumerate(zip(prompt_lens, response_lens, strict=True))]
        size, raw = batch.tokens_P.element_size(), batch.tokens_P.numpy().tobytes()
        members: list[list[int]] = []
        lengths: list[int] = []
        group_of_prompt: dict[bytes, int] = {}
        start = 0
        for row, (prompt_len, response_len) in enumerate(zip(prompt_lens, response_lens, strict=True)):
            prompt = raw[size * start : size * (start + prompt_len)]
            start += prompt_len + response_len
            index = group_of_prompt.get(prompt)
            if index is not None and lengths[index] + response_len - 1 <= self._max_tokens:
                members[index].append(row)
                lengths[index] += response_len - 1
            else:
                group_of_prompt[prompt] = len(members)
                members.append([row])
                lengths.append(prompt_len + response_len - 1)
        return list(zip(members, lengths, strict=True))

    def _sample_groups(self, batch: RolloutBatch) -> list[tuple[list[int], int]]:
        """Returns the sequences of each `group_id_B`, with their number of inputs."""
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(batch.group_id_B.tolist()):
            groups.setdefault(group, []).append(row)
        return [
            (rows, sum(length for _, length in self._prompt_groups(batch.select(rows)))) for rows in groups.values()
        ]

    def _microbatch(
        self, batch: RolloutBatch, rows: list[int], distribution: Distribution | None, at_least: int = 0
    ) -> PackedMicrobatch:
        part = batch.select(rows)
        is_input_P = input_mask(part)
        inputs_I, lens = part.tokens_P[is_input_P], (part.seq_lens_B - 1).tolist()
        prefixes = shared_prefixes(inputs_I, lens) if self.share_prefixes else each_token(inputs_I.numel())
        grid = self._groups.grid
        # without shared tokens TransformerEngine computes attention its own way, with context parallelism by its ring
        unshared_te = self._te and prefixes.origin_D.numel() == inputs_I.numel()
        unshared_te &= grid.cp == 1 or self._window is None  # the ring has no sliding window
        if unshared_te and grid.cp > 1:
            layout = lay_out_by_sequence(lens, unit=smallest_row_unit(grid), total_unit=self._row_unit)
        else:
            computed = each_token(inputs_I.numel()) if unshared_te else prefixes
            layout = lay_out(lens, computed, unit=self._row_unit, at_least=at_least)
        tokens, positions, row_I = inputs_I.new_zeros(layout.count), layout.positions, layout.row_I
        tokens[row_I] = inputs_I
        routing = self._routing(part, layout, is_input_P)
        targets = Targets(*scored_tokens(part, layout), distribution, part.kept_tokens_R, None, self._compared(part))
        if grid.cp > 1:
            shard = shard_for_cp(layout, targets.rows_R, grid.cp, self._groups.coords.cp)
            tokens, positions, row_I = tokens[shard.rows], positions[shard.rows], shard.row_I
            routing = None if routing is None else routing.select(shard.rows)
            context = context_targets(self._groups.cp, shard.owner_R, self._device)
            targets = shard_targets(targets, shard, context)
        packed = self._packed(layout, unshared_te=unshared_te)
        packed.routing = routing
        return PackedMicrobatch(
            rows,
            _to_device(replace(part, routed_experts_P=None, kept_tokens_R=None, teacher_states_R=None), self._device),
            tokens[None].to(self._device),
            positions[None].to(self._device),
            packed,
            replace(targets, rows_R=targets.rows_R.to(self._device), tokens_R=targets.tokens_R.to(self._device)),
            row_I,
        )

    def _routing(self, part: RolloutBatch, layout: RowLayout, is_input_P: Tensor) -> Routing | None:
        """Returns the input of the routers, None for a dense model."""
        if not self._num_experts:
            return None
        chosen_P = part.routed_experts_P if self.replay else None
        chosen_I = None if chosen_P is None else chosen_P[is_input_P]
        return packed_routing(layout.row_I, layout.count, chosen_I, self._layers, num_experts=self._num_experts)

    def _compared(self, part: RolloutBatch) -> DistillationTargets | None:
        if self.distillation is None:
            return None
        teacher_B, states_R = required(part.teacher_B, "teacher_B"), required(part.teacher_states_R, "teacher_states_R")
        return DistillationTargets(self.distillation, teacher_B[part.sequence_R], states_R)

    def _packed(self, layout: RowLayout, *, unshared_te: bool) -> PackedSequences:
        """Returns the packing for the attention in use."""
        group = self._groups.cp if self._groups.grid.cp > 1 else None
        if unshared_te:
            return pack_for_te(layout.lens, self._device)
        if self._te:
            return pack_shared_for_te(layout.lens, layout.prefixes, self._device, group)
        if self._compiled:
            return pack_compiled(layout.lens, layout.prefixes, group)
        config: Any = self._chunks[0].config
        return pack(
            layout.lens,
            layout.prefixes,
            self._device,
            group,
            dtype=config.params_dtype,
            window=self._window,
            conv_kernel=self._conv_kernel,
        )


def _to_device(batch: RolloutBatch, device: torch.device) -> RolloutBatch:
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return replace(batch, **{name: value.to(device) for name, value in values.items() if value is not None})
