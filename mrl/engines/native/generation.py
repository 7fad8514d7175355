"""Generation loop of one call: prefill, sample first tokens, decode, retire finished rows, until nothing is left.

Every rank of a replica runs it on the same logits and so makes the same decisions; only the model communicates.

Shapes: B running rows, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor

from mrl.algorithms.functional.sampling import stream_key
from mrl.engines._kept_tokens import add_step
from mrl.engines._multiturn_base import SequenceKey
from mrl.engines.base import SamplingConfig
from mrl.engines.native.decode_state import DecodeState
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.linear_attention import prefill_states
from mrl.engines.native.model import Decoder
from mrl.engines.native.paused_sequences import RowCopy
from mrl.engines.native.sampler import TokenSampler
from mrl.engines.native.scheduler import PrefillGroup, RunningSample, Scheduler, prefill_chunks
from mrl.engines.native.speculation import Drafted, Speculation
from mrl.engines.native.stopping import Stopping
from mrl.errors import UserError
from mrl.types import Rollout

INVALID_LOGITS = 2
"""Status of a row whose logits are not a distribution: the log-probability of its token is NaN or -inf."""


class Generation:
    """Generation loop of one call.

    Args:
        model: Decoder that computes hidden states and logits.
        cache: KV cache with as many rows as the scheduler fills.
        rows: Decode state of these rows.
        decode_step: Computes logits [B, V] after the newest tokens of the first rows from (batch, length).
        scheduler: Assigns sequences to rows.
        sampling: Sampling distribution and seed.
        stopping: Stop condition of responses.
        max_prefill_tokens: Most prompt tokens in one forward.
        abandoned: Returns whether an abort was requested; polled between forwards.
        speculation: Drafts tokens; None: a step samples one token per row.
        on_sampled: See `RolloutEngine.on_sampled`.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        cache: KVCache,
        rows: DecodeState,
        decode_step: Callable[[int, int], Tensor],
        scheduler: Scheduler,
        sampling: SamplingConfig,
        stopping: Stopping,
        max_prefill_tokens: int,
        abandoned: Callable[[], bool],
        speculation: Speculation | None = None,
        on_sampled: Callable[[int, Sequence[int]], object] = lambda num_tokens, finished_uids: None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._rows = rows
        self._decode_step = decode_step
        self._scheduler = scheduler
        self._sampling = sampling
        self._sampler = TokenSampler(sampling, model.operations)
        self._stopping = stopping
        self._chunks = partial(prefill_chunks, max_tokens=max_prefill_tokens, max_row_tokens=cache.most_tokens)
        self._abandoned = abandoned
        self._speculation = speculation
        self._on_sampled = on_sampled
        self._num_steps = 0
        self._finished: dict[SequenceKey, Rollout] = {}
        names = ("prefill_tokens", "decode_steps", "decode_tokens", "prefill_s", "decode_s", "max_running")
        self.stats: dict[str, float] = dict.fromkeys(names, 0.0)
        if speculation is not None:
            self.stats |= {"drafted_tokens": 0.0, "accepted_tokens": 0.0}

    def run(self, policy_version: int) -> list[Rollout]:
        """Returns all rollouts, ordered by prompt, then sample index; after an abort request the finished ones."""
        self._advance(policy_version, math.inf)
        return [self._finished[key] for key in sorted(self._finished)]

    def _advance(self, policy_version: int, num_steps: float) -> bool:
        """Samples until all is done or `num_steps` decode steps were made; returns whether an abort was requested."""
        scheduler, stats = self._scheduler, self.stats
        last = self._num_steps + num_steps
        abandoned = self._abandoned()
        while not self._done and self._num_steps < last and not abandoned:
            groups = self._admit()
            began = time.perf_counter()
            if groups:
                self._prefill(groups)
            rows, moves = scheduler.start(groups, self._num_steps)
            for (source, length), copies in groupby(moves, key=lambda move: (move.source, move.length)):
                first, *more = (move.target for move in copies)  # consecutive rows, since samples start in order
                self._cache.copy_row(source, first, length, 1 + len(more))
            self._begin(rows, policy_version)
            prefilled = time.perf_counter()
            stats["prefill_s"] += prefilled - began
            stats["max_running"] = max(stats["max_running"], len(scheduler.running))
            ended: list[int] = []
            while scheduler.running and not ended and self._num_steps < last and not abandoned:
                ended = self._decode()
                abandoned = self._abandoned()
            self._begin(self._retire(ended, policy_version), policy_version)
            stats["decode_s"] += time.perf_counter() - prefilled
        return abandoned

    @property
    def _done(self) -> bool:
        return self._scheduler.done

    def _admit(self) -> list[PrefillGroup]:
        """Returns the prompts to prefill next, into the rows after the running ones."""
        return self._scheduler.admit()

    def _prefill(self, groups: Sequence[PrefillGroup]) -> None:
        """Fills the cache with the prompts and stores the hidden state after the last token of each."""
        first_row = len(self._scheduler.running)
        starts = [group.cached for group in groups]
        for chunks in self._chunks([group.prompt_len for group in groups], first_row, starts=starts):
            ids = [groups[chunk.row - first_row].prompt.prompt_ids[chunk.start : chunk.stop] for chunk in chunks]
            tokens_P = torch.tensor([token for part in ids for token in part], device=self._rows.tokens_S.device)
            attention = self._model.operations.prefill_attention(self._cache, chunks)
            ends = accumulate(chunk.stop - chunk.start for chunk in chunks)
            complete = {
                end - 1: groups[chunk.row - first_row]
                for end, chunk in zip(ends, chunks, strict=True)
                if chunk.stop == groups[chunk.row - first_row].prompt_len
            }
            wanted_N = torch.tensor(list(complete), dtype=torch.int64, device=tokens_P.device)
            routed_PLK = None
            if self._rows.routed_SLK is not None:
                routed_PLK = self._rows.routed_SLK.new_empty(tokens_P.numel(), *self._rows.routed_SLK.shape[1:])
            states = prefill_states(self._cache, chunks)
            hidden_NH = self._model.forward(tokens_P, attention.positions_P, attention, wanted_N, routed_PLK, states)
            if routed_PLK is not None:
                parts = torch.split(routed_PLK.cpu(), [chunk.stop - chunk.start for chunk in chunks])
                for chunk, part in zip(chunks, parts, strict=True):
                    groups[chunk.row - first_row].routed.append(part)
            self.stats["prefill_tokens"] += tokens_P.numel()
            for group, hidden_H in zip(complete.values(), hidden_NH.unbind(), strict=True):
                group.hidden_H = hidden_H

    def _begin(self, rows: Sequence[int], policy_version: int) -> None:
        """Samples the first token of new samples in the given rows; a row that ends with it takes the next sample."""
        while rows:
            samples = [self._scheduler.running[row] for row in rows]
            index = self._place(rows, samples)
            hidden_BH = torch.stack([s.group.hidden_H for s in samples if s.group.hidden_H is not None])
            ended = self._take(index, self._model.logits(hidden_BH))
            self._on_sampled(len(rows), ())
            rows = self._retire([rows[i] for i in ended], policy_version)

    def _place(self, rows: Sequence[int], samples: Sequence[RunningSample]) -> Tensor:
        """Initializes the rows of new samples; returns their index."""
        if self._speculation is not None:
            for row, sample in zip(rows, samples, strict=True):
                self._speculation.history.begin(row, self._family(sample), sample.key[1], *sample.group.token_history)
        return self._rows.begin(
            rows,
            [sample.group.prompt_len for sample in samples],
            [stream_key(self._sampling.seed, s.group.prompt.uid, s.sample_index) for s in samples],
            [sample.group.room for sample in samples],
        )

    def _family(self, sample: RunningSample) -> int:
        """Returns the key of the samples whose tokens are searched for this one's drafts."""
        return sample.group.prompt.uid

    def _decode(self) -> list[int]:
        """Samples one token for every running row, or more with drafts; returns the rows that ended."""
        batch = len(self._scheduler.running)
        if self._model.operations.are_compiled:  # their attention reads shared prompt slots once
            self._cache.set_shared_prefixes(self._scheduler.shared_prefixes())
        if self._speculation is not None:
            drafted = self._speculation.draft(self._rows, batch)
            if drafted is not None:
                return self._verify(self._speculation, drafted)
        logits_BV = self._decode_step(batch, self._scheduler.longest(self._num_steps))
        self._count(batch)
        ended = self._take(slice(0, batch), logits_BV)
        if self._speculation is not None:
            self._speculation.update_rates(self._rows.tokens_S[:batch].numpy())
        return ended

    def _count(self, num_tokens: int) -> None:
        self._num_steps += 1
        self.stats["decode_steps"] += 1
        self.stats["decode_tokens"] += num_tokens
        self._on_sampled(num_tokens, ())

    def _verify(self, speculation: Speculation, drafted: Drafted) -> list[int]:
        """Samples every running row's next token, and accepts its drafts up to the first that differs."""
        rows, running = self._rows, self._scheduler.running
        logits_PV, routed_PLK = speculation.forward(drafted)
        rows_P, offsets_P = torch.from_numpy(drafted.rows_P), torch.from_numpy(drafted.offsets_P)
        counts_P = rows.counts_S[rows_P] + offsets_P
        tokens_P, logprobs_P, kept = self._sampler.sample(logits_PV, rows.keys_S[rows_P], counts_P)
        rows.store_candidates(rows_P, offsets_P, tokens_P, logprobs_P, routed_PLK)
        ended_P = self._stopping.is_finished(tokens_P, counts_P + 1, rows.rooms_S[rows_P]).numpy()
        broken_P = ~logprobs_P.isfinite().numpy()
        right_P = drafted.matches(tokens_P.numpy())
        taken_B = drafted.leading(right_P & ~ended_P & ~broken_P) + 1
        ended_B = ended_P[drafted.firsts_B[:-1] + taken_B - 1]
        if self._stopping.has_strings:
            for row, most in enumerate(taken_B.tolist()):
                hits = (count for count in range(1, most + 1) if self._stopping.ends_with_stop_string(rows, row, count))
                hit = next(hits, None)
                if hit is not None:
                    taken_B[row], ended_B[row] = hit, True
        rows.accept(torch.from_numpy(taken_B))
        broken_B = broken_P[drafted.firsts_B[:-1] + taken_B - 1]
        if broken_B.any():
            self._refuse(broken_B.nonzero()[0].tolist())
        used_P = drafted.offsets_P < taken_B[drafted.rows_P]
        if kept is not None:
            where = torch.from_numpy(used_P)
            rows_kept = [running[row].kept_tokens for row in drafted.rows_P[used_P].tolist()]
            add_step(kept[0][where], kept[1][where], rows_kept)
        for sample, taken in zip(running, taken_B.tolist(), strict=True):
            sample.ahead += taken - 1
        speculation.record_outcome(drafted, tokens_P.numpy(), taken_B)
        self._count(int(taken_B.sum()))
        self.stats["drafted_tokens"] += drafted.num_drafted
        self.stats["accepted_tokens"] += int(taken_B.sum()) - taken_B.size
        ended: list[int] = ended_B.nonzero()[0].tolist()
        return ended

    def _take(self, index: Tensor | slice, logits_BV: Tensor) -> list[int]:
        """Samples the next token of the given rows; returns the indices of those that ended.

        Raises:
            UserError: Logits of a row are not finite; the message names the prompt.
        """
        rows = self._rows
        tokens_B, logprobs_B, kept = self._sampler.sample(logits_BV, rows.keys_S[index], rows.counts_S[index])
        rows.append(index, tokens_B, logprobs_B)
        # one transfer to the host per step; 0: continues, 1: ended, 2: logits are not a distribution
        ended_B = self._stopping.is_finished(rows.tokens_S[index], rows.counts_S[index], rows.rooms_S[index])
        status = torch.where(logprobs_B > -math.inf, ended_B, INVALID_LOGITS).tolist()  # false for NaN
        where = list(range(len(status))) if isinstance(index, slice) else index.tolist()
        if INVALID_LOGITS in status:
            self._refuse([where[i] for i, value in enumerate(status) if value == INVALID_LOGITS])
        if kept is not None:
            add_step(*kept, [self._scheduler.running[row].kept_tokens for row in where])
        if self._speculation is not None:
            self._speculation.history.add(np.array(where), 0, tokens_B.numpy(), 1)
        ended = [i for i, value in enumerate(status) if value]
        if self._stopping.has_strings:
            ended = [
                i for i, value in enumerate(status) if value or self._stopping.ends_with_stop_string(rows, where[i])
            ]
        return ended

    def _refuse(self, rows: Sequence[int]) -> None:
        sample = self._scheduler.running[rows[0]]
        prompt = sample.group.prompt
        raise UserError(
            f"the logits are not finite for prompt {prompt.source or prompt.uid}, sample {sample.sample_index}, "
            f"response token {int(self._rows.counts_S[rows[0]]) - 1} ({len(rows)} of the running sequences); "
            "the weights are broken. Check actor/grad_norm in metrics.jsonl: lower actor.lr, or resume from an earlier "
            "checkpoint; if no step was trained, check the files of model.path."
        )

    def _retire(self, ended: Iterable[int], policy_version: int) -> list[int]:
        """Converts ended rows to rollouts and closes the gaps; returns the rows in which a sample starts."""
        samples = {row: self._scheduler.running[row] for row in ended}
        waiting = self._end(dict(zip(samples, self._rollouts(list(samples), policy_version), strict=True)))
        self._on_sampled(0, [sample.group.prompt.uid for row, sample in samples.items() if row not in waiting])
        if self._speculation is not None:
            for row in samples:
                self._speculation.history.end(row)
        started, moves = self._scheduler.retire(samples, self._num_steps, waiting)
        for move in moves:
            self._move(move)
        return started

    def _end(self, rollouts: Mapping[int, Rollout]) -> dict[int, SequenceKey]:
        """Stores the rollouts of ended rows; returns the rows whose sequences continue later."""
        for row, rollout in rollouts.items():
            self._finished[self._scheduler.running[row].key] = rollout
        return {}

    def _move(self, move: RowCopy) -> None:
        self._cache.copy_row(move.source, move.target, move.length)
        self._rows.move(move.source, move.target)
        if self._speculation is not None:
            self._speculation.history.move(move.source, move.target)

    def _rollouts(self, rows: Sequence[int], policy_version: int) -> list[Rollout]:
        """Returns the current tokens of the samples in these rows as rollouts."""
        running = [self._scheduler.running[row] for row in rows]
        said = self._rows.tokens_and_logprobs(rows)
        return [self._rollout(*each, policy_version) for each in zip(rows, running, said, strict=True)]

    def _rollout(
        self, row: int, sample: RunningSample, said: tuple[list[int], list[float]], policy_version: int
    ) -> Rollout:
        response, logprobs = said
        rollout = Rollout(
            prompt=sample.group.prompt,
            sample_index=sample.sample_index,
            response_ids=response,
            rollout_logprobs=logprobs,
            finish_reason=self._stopping.reason(response),
            policy_version=policy_version,
            routed_experts=torch.cat([*sample.group.routed, self._rows.routed(row)]) if sample.group.routed else None,
        )
        if self._sampling.return_kept_tokens:
            sample.kept_tokens.attach_to(rollout)
        return rollout
