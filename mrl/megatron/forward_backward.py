"""Packing of batches into microbatches, and their forward and backward passes through Megatron's pipeline schedules.

All tokens of a sequence except the last are inputs of the model: the last is scored but predicts nothing.

Shapes: as in `mrl/types.py`, and I packed inputs: the sequences' tokens without the last of each; D computed rows.

Losses arrive normalised by global counts, so nothing here or in Megatron may scale them: `calculate_per_token_loss` is
on and the reported number of tokens is 0, which Megatron interprets as "do not divide".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.algorithms.base import required
from mrl.algorithms.functional.logprobs import Distribution
from mrl.data.packing import pack_microbatches
from mrl.data.shared_prefix import Prefixes, each_token, shared_prefixes
from mrl.distributed.collectives import reduce
from mrl.distributed.groups import ProcessGroups
from mrl.megatron.attention import PackedSequences, pack, pack_compiled
from mrl.megatron.context_parallel import context_targets, own_rows, own_rows_by_sequence
from mrl.megatron.distillation_targets import Compared, Comparison
from mrl.megatron.model import Targets
from mrl.megatron.pipeline_comm import messages
from mrl.megatron.router import packed_routing
from mrl.megatron.routing_record import RoutingRecorder
from mrl.megatron.te_attention import pack_for_te, pack_shared_for_te
from mrl.types import RolloutBatch

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""(*scores of the last stage for each response token, microbatch) -> (loss sum, detached metrics)."""


@dataclass(frozen=True)
class Microbatch:
    """The sequences of one forward pass, packed.

    Attributes:
        rows: Indices of the sequences in the batch; may be empty.
        batch: The selected sequences, on the device.
        tokens: Input tokens and padding [1, rows], or this rank's part of them; shared prefixes occur once.
        positions: Position of each of these tokens in its sequence, [1, rows].
        packed: Packing of the sequences for attention.
        targets: Tokens to score.
        row_I: Row in which each packed input is computed, among the concatenated rows of all context-parallel ranks; on
            the CPU.
    """

    rows: list[int]
    batch: RolloutBatch
    tokens: Tensor
    positions: Tensor
    packed: PackedSequences
    targets: Targets
    row_I: Tensor


@dataclass(frozen=True)
class _Laid:
    """The rows computed for a microbatch, before context parallelism splits them over ranks.

    Attributes:
        count: Number of rows, D.
        lens: Packed inputs of each sequence, padding included.
        prefixes: Sharing of inputs: which of them are computed.
        row_I: Row in which each packed input is computed.
        positions: Position of each row in its sequence.
    """

    count: int
    lens: list[int]
    prefixes: Prefixes
    row_I: Tensor
    positions: Tensor


class ForwardBackward:
    """Splits batches into microbatches and runs them through the model chunks of this rank.

    Attributes:
        shares: Whether a prefix shared by several sequences is computed once; may be changed between batches.
        replay: Whether tokens are routed to the experts in the batch's `routed_experts_P`.
        comparison: Teachers' output weights for batches with `teacher_B` and `teacher_states_R`; None: no comparison.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroups,
        device: torch.device,
        *,
        max_tokens: int,
        te: bool,
        shares: bool = True,
        num_experts: int = 0,
        layers: Sequence[int] = (),
        equal_lengths: bool = False,
        replay: bool = False,
        compiled: bool = False,
    ) -> None:
        """Stores the chunks and settings.

        Args:
            chunks: Model chunks of this rank by virtual stage, wrapped for data parallelism or not.
            groups: Process groups of the layout.
            device: Device of the chunks.
            max_tokens: Token budget of a microbatch.
            te: Whether attention is TransformerEngine's.
            shares: Whether a prefix shared by several sequences is computed once.
            num_experts: Experts per layer; 0 for a dense model.
            layers: Layer indices of this rank's pipeline stage, to which `routed_experts_P` refers.
            equal_lengths: Whether microbatches are padded to the same length on all data-parallel ranks.
            replay: Whether tokens are routed to the experts in the batch's `routed_experts_P`; may be changed between
                batches.
            compiled: Whether attention uses the compiled CPU kernels.
        """
        self._chunks, self._groups, self._device = list(chunks), groups, device
        self._max_tokens, self._te, self.shares = max_tokens, te, shares
        self._num_experts, self._layers = num_experts, layers
        self._equal_lengths, self.replay, self._compiled = equal_lengths, replay, compiled
        self.comparison: Comparison | None = None

    def microbatches(
        self, batch: RolloutBatch, distribution: Distribution | None, *, whole_groups: bool = False
    ) -> list[Microbatch]:
        """Collective over data-parallel: packs the batch into microbatches, the same number on every rank.

        Args:
            batch: Sequences of this data-parallel index; may be empty.
            distribution: Distribution under which tokens are scored; None: the final hidden states are returned.
            whole_groups: Whether sequences with one `group_id_B` share a microbatch, even beyond the token budget.
        """
        grid = self._groups.grid
        config: Any = self._chunks[0].config
        # the interleaved schedule needs a multiple of this
        multiple: int = config.microbatch_group_size_per_vp_stage if grid.vpp > 1 else 1
        families = self._groups_of(batch) if whole_groups else self._families(batch)
        lens = [length for _, length in families]
        packed = pack_microbatches(lens, self._max_tokens, multiple_of=multiple) or [[]]
        while True:  # a higher minimum may pack into still more microbatches: repeat until all ranks agree
            extremes = torch.tensor([len(packed), -len(packed)])
            reduce(extremes, self._groups.dp, dist.ReduceOp.MAX)
            if extremes[0] == -extremes[1]:
                break
            packed = pack_microbatches(lens, self._max_tokens, at_least=int(extremes[0]), multiple_of=multiple)
        rows = [[row for item in items for row in families[item][0]] for items in packed]
        made = [self._microbatch(batch, each, distribution) for each in rows]
        if not self._equal_lengths:
            return made
        longest = torch.tensor([micro.tokens.size(1) for micro in made])
        reduce(longest, self._groups.dp, dist.ReduceOp.MAX)
        return [
            self._microbatch(batch, each, distribution, most) for each, most in zip(rows, longest.tolist(), strict=True)
        ]

    def run(
        self, microbatches: list[Microbatch], loss: Loss, *, backward: bool, choices: RoutingRecorder | None = None
    ) -> list[dict[str, Tensor]]:
        """Collective over the actor's replica: runs the forward pass, and the backward pass if requested.

        Args:
            microbatches: Microbatches of this data-parallel index.
            loss: Loss of a microbatch.
            backward: Whether gradients are computed.
            choices: Recorder of the experts that tokens are routed to, for MoE models.

        Returns:
            On the last pipeline stage, for each microbatch the metrics of `loss` and its "scores" (detached, [n, R]);
            [] on other stages.
        """
        iterators = [iter(enumerate(microbatches)) for _ in self._chunks]
        several = len(self._chunks) > 1

        def forward(data: Iterator[tuple[int, Microbatch]], chunk: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
            index, micro = next(data)
            packed, kept = micro.packed, None
            if packed.routing is not None:  # moved late, so that it is on the device only during this microbatch
                if choices is not None:
                    kept = choices.allocate(micro.tokens.size(1), self._device)
                packed = replace(packed, routing=replace(packed.routing.to(self._device), chosen_nLK=kept))
            output = chunk(
                input_ids=micro.tokens,
                position_ids=micro.positions,
                attention_mask=None,
                labels=micro.targets,
                packed_seq_params=packed,
            )
            if choices is not None and kept is not None:
                choices.record(index, kept)
            return output, lambda scored: self._report(scored, index, micro, loss)

        lengths = [micro.tokens.size(1) for micro in microbatches]
        with messages(self._groups.pp, self._chunks[0].config, lengths) as given:
            reports: list[tuple[int, dict[str, Tensor]]] = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iterators if several else iterators[0],
                model=self._chunks if several else self._chunks[0],
                num_microbatches=len(microbatches),
                seq_length=max(lengths),
                micro_batch_size=1,
                forward_only=not backward,
                **given,
            )
        return [report for _, report in sorted(reports, key=lambda item: item[0])]

    @staticmethod
    def _report(scored: tuple[Tensor, ...], index: int, micro: Microbatch, loss: Loss) -> tuple[Any, ...]:
        value, metrics = loss(*scored, micro.batch)
        # the schedule may scale the loss in place, so the report must not share its memory
        report = {name: metric.detach().clone() for name, metric in metrics.items()}
        report["scores"] = torch.stack([scores_R.detach() for scores_R in scored])
        return value, torch.zeros((), dtype=torch.int, device=value.device), (index, report)

    def _families(self, batch: RolloutBatch) -> list[tuple[list[int], int]]:
        """Returns groups of sequences with the same prompt that fit a microbatch, each with its number of inputs."""
        prompt_lens, response_lens = batch.prompt_lens_B.tolist(), batch.response_lens_B.tolist()
        if not self.shares:
            return [([row], sum(lens) - 1) for row, lens in enumerate(zip(prompt_lens, response_lens, strict=True))]
        size, raw = batch.tokens_P.element_size(), batch.tokens_P.numpy().tobytes()
        members: list[list[int]] = []
        lengths: list[int] = []
        newest: dict[bytes, int] = {}
        start = 0
        for row, (prompt_len, response_len) in enumerate(zip(prompt_lens, response_lens, strict=True)):
            prompt = raw[size * start : size * (start + prompt_len)]
            start += prompt_len + response_len
            index = newest.get(prompt)
            if index is not None and lengths[index] + response_len - 1 <= self._max_tokens:
                members[index].append(row)
                lengths[index] += response_len - 1
            else:
                newest[prompt] = len(members)
                members.append([row])
                lengths.append(prompt_len + response_len - 1)
        return list(zip(members, lengths, strict=True))

    def _groups_of(self, batch: RolloutBatch) -> list[tuple[list[int], int]]:
        """Returns the sequences of each `group_id_B`, with their number of inputs."""
        groups: dict[int, list[int]] = {}
        for row, group in enumerate(batch.group_id_B.tolist()):
            groups.setdefault(group, []).append(row)
        return [(rows, sum(length for _, length in self._families(batch.select(rows)))) for rows in groups.values()]

    def _microbatch(
        self, batch: RolloutBatch, rows: list[int], distribution: Distribution | None, at_least: int = 0
    ) -> Microbatch:
        part = batch.select(rows)
        is_input_P = torch.ones_like(part.tokens_P, dtype=torch.bool)
        is_input_P[part.seq_lens_B.cumsum(0) - 1] = False
        inputs_I, input_lens_B = part.tokens_P[is_input_P], part.seq_lens_B - 1
        lens = input_lens_B.tolist()
        total = sum(lens)
        prefixes = shared_prefixes(inputs_I, lens) if self.shares else each_token(total)
        grid = self._groups.grid
        # sequence parallelism shards the packed length, context parallelism cuts it into two runs for each rank
        unit = grid.tp * (2 * grid.cp if grid.cp > 1 else 1)
        plain = self._te and prefixes.origin_D.numel() == total  # TransformerEngine's own ways: its ring over ranks
        if plain and grid.cp > 1:
            laid = self._laid_by_sequence(lens, unit)
        else:
            laid = self._laid(lens, each_token(total) if plain else prefixes, unit, at_least)
        # response token i of a sequence is predicted at the position before it; the last inputs predict the response
        first = input_lens_B.cumsum(0) - part.response_lens_B
        before = part.response_lens_B.cumsum(0) - part.response_lens_B
        of_R = (first - before).repeat_interleave(part.response_lens_B) + torch.arange(part.response_mask_R.numel())
        # each sequence before has a token more than inputs
        rows_R, targets_R = laid.row_I[of_R], part.tokens_P[of_R + part.sequence_R + 1]
        tokens, positions = inputs_I.new_zeros(laid.count), laid.positions
        tokens[laid.row_I] = inputs_I
        routing = None
        if self._num_experts:
            chosen = part.routed_experts_P if self.replay else None
            chosen = None if chosen is None else chosen[is_input_P]
            routing = packed_routing(laid.row_I, laid.count, chosen, self._layers, num_experts=self._num_experts)
        packed = self._packed(laid, plain=plain)
        scores, row_I, support, compared = None, laid.row_I, part.support_R, self._compared(part)
        if grid.cp > 1:
            rows_of_ranks = torch.stack([self._own_rows(laid, rank, plain=plain) for rank in range(grid.cp)])
            owner, place = torch.empty(2, laid.count, dtype=torch.int64)
            owner[rows_of_ranks] = torch.arange(grid.cp)[:, None]
            place[rows_of_ranks.flatten()] = torch.arange(laid.count)
            own, row_I = rows_of_ranks[self._groups.coords.cp], place[row_I]
            tokens, positions = tokens[own], positions[own]
            routing = None if routing is None else routing.select(own)
            scores = context_targets(self._groups.cp, owner[rows_R], self._device)
            mine = owner[rows_R] == self._groups.coords.cp
            local = torch.empty(laid.count, dtype=torch.int64)
            local[own] = torch.arange(own.numel())
            rows_R, targets_R = local[rows_R[mine]], targets_R[mine]
            support = None if support is None else support.where(mine)
            compared = None if compared is None else compared.at(mine)
        packed.routing = routing
        return Microbatch(
            rows,
            _moved(replace(part, routed_experts_P=None, support_R=None, teacher_states_R=None), self._device),
            tokens[None].to(self._device),
            positions[None].to(self._device),
            packed,
            Targets(rows_R.to(self._device), targets_R.to(self._device), distribution, support, scores, compared),
            row_I,
        )

    def _compared(self, part: RolloutBatch) -> Compared | None:
        if self.comparison is None:
            return None
        teacher_B, states_R = required(part.teacher_B, "teacher_B"), required(part.teacher_states_R, "teacher_states_R")
        return Compared(self.comparison, teacher_B[part.sequence_R], states_R)

    def _packed(self, laid: _Laid, *, plain: bool) -> PackedSequences:
        group = self._groups.cp if self._groups.grid.cp > 1 else None
        if plain:
            return pack_for_te(laid.lens, self._device)
        if self._te:
            return pack_shared_for_te(laid.lens, laid.prefixes, self._device, group)
        if self._compiled:
            return pack_compiled(laid.lens, laid.prefixes, group)
        config: Any = self._chunks[0].config
        return pack(laid.lens, laid.prefixes, self._device, group, dtype=config.params_dtype)

    def _own_rows(self, laid: _Laid, rank: int, *, plain: bool) -> Tensor:
        size = self._groups.grid.cp
        return own_rows_by_sequence(laid.lens, size, rank) if plain else own_rows(laid.count, size, rank)

    @staticmethod
    def _laid(lens: list[int], prefixes: Prefixes, unit: int, at_least: int) -> _Laid:
        """Lays out the distinct inputs, then padding up to a multiple of `unit`, which is a sequence of its own."""
        distinct_P, origin_D = prefixes
        filling = max(-origin_D.numel() % unit, at_least - origin_D.numel(), 0 if lens else unit)
        count, end = origin_D.numel() + filling, sum(lens)
        all_lens = [*lens, filling] if filling else lens
        positions = _positions(all_lens)
        padded = Prefixes(
            torch.cat([distinct_P, torch.arange(count - filling, count)]),
            torch.cat([origin_D, torch.arange(end, end + filling)]),
        )
        return _Laid(count, all_lens, padded, distinct_P, positions[padded.origin_D])

    @staticmethod
    def _laid_by_sequence(lens: list[int], unit: int) -> _Laid:
        """Lays out all inputs, with each sequence padded to a multiple of `unit`, as TransformerEngine splits them."""
        padded = [-(-length // unit) * unit for length in lens] or [unit]
        starts = torch.tensor([0, *padded]).cumsum(0)
        row_I = starts[: len(lens)].repeat_interleave(torch.tensor(lens, dtype=torch.int64)) + _positions(lens)
        return _Laid(sum(padded), padded, each_token(sum(padded)), row_I, _positions(padded))


def _positions(lens: list[int]) -> Tensor:
    """Returns the position of each packed token in its sequence."""
    lens_B = torch.tensor(lens, dtype=torch.int64)
    return torch.arange(sum(lens)) - (lens_B.cumsum(0) - lens_B).repeat_interleave(lens_B)


def _moved(batch: RolloutBatch, device: torch.device) -> RolloutBatch:
    values = {item.name: getattr(batch, item.name) for item in fields(batch)}
    return replace(batch, **{name: value.to(device) for name, value in values.items() if value is not None})
