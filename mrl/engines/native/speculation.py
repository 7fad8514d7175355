"""Speculative decoding: chooses how many tokens to draft, so that the expected gain exceeds the cost of a longer step.

The decision depends on tokens, on counts of accepted drafts, and on constant costs (`decode_cost_model`): all ranks of
a replica decide alike, and a run that uses the first finished responses is reproducible. Drafts that are not fed are
compared with the sampled token too, so that the acceptance rate is known without feeding any.

Shapes: B decoding rows, K most drafted tokens of a row, P fed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mrl.config.config import SpeculativeConfig
from mrl.engines.native.cpu_ops import Compiled
from mrl.engines.native.decode_cost_model import Costs
from mrl.engines.native.decode_state import DecodeState
from mrl.engines.native.ngram_history import History, Ints

PRIOR = 0.5
"""Acceptance rate assumed before a draft was compared."""

PRIOR_TRIES = 8
"""Drafted tokens that the assumed rate counts as. In a text without repetition, a row compares a few tokens in a
hundred: a prior that counts as 64 would pay for longer steps until its end."""

WINDOW = 64
"""Drafted tokens over which the acceptance rate is averaged, recent ones with more weight."""

MARGIN = 1.05
"""Minimum ratio of expected tokens per cost, of a step with drafts to a step without."""


@dataclass(frozen=True)
class Drafted:
    """Tokens that a step feeds: each row's newest token, followed by its drafts.

    Attributes:
        rows_P: Row of each token.
        offsets_P: 0 for the newest token, then 1, 2 ...
        firsts_B: Index of each row's newest token, and P at the end.
        tokens_P: Token ids.
    """

    rows_P: Ints
    offsets_P: Ints
    firsts_B: Ints
    tokens_P: Ints

    @property
    def num_drafted(self) -> int:
        """Number of drafted tokens, over all rows."""
        return self.tokens_P.size - self.firsts_B.size + 1

    def matches(self, drawn_P: Ints) -> npt.NDArray[np.bool_]:
        """Returns after which tokens the row's next draft equals the sampled token, bool."""
        right = np.zeros(self.tokens_P.size, dtype=bool)
        right[:-1] = (drawn_P[:-1] == self.tokens_P[1:]) & (self.offsets_P[1:] > 0)
        return right

    def leading(self, holds_P: npt.NDArray[np.bool_]) -> Ints:
        """Returns the number of each row's leading tokens for which `holds_P` is True."""
        places = np.where(holds_P, self.tokens_P.size, self.offsets_P)
        found: Ints = np.minimum.reduceat(places, self.firsts_B[:-1])
        return found


class Speculation:
    """Speculative decoding of one call.

    Args:
        config: `rollout.speculative` section.
        operations: Compiled operations that search the drafts.
        history: Token history of the call.
        costs: Costs of a step; their largest step limits the fed tokens.
        num_rows: Most rows that decode.
        forward: Computes logits [P, V] after each fed token, and their routing record or None.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        operations: Compiled,
        history: History,
        costs: Costs,
        num_rows: int,
        forward: Callable[[Drafted], tuple[Tensor, Tensor | None]],
    ) -> None:
        self.history = history
        self.forward = forward
        self._operations = operations
        self._costs = costs
        self._lookup = range(config.prompt_lookup_min, config.prompt_lookup_max + 1)
        self._drafts_SK = torch.zeros(num_rows, config.num_speculative_tokens, dtype=torch.int64)
        self._rates = np.full(self._lookup.stop, PRIOR)
        self._tries = np.full(self._lookup.stop, PRIOR_TRIES)
        self._found: tuple[Ints, Ints, Ints] | None = None

    def draft(self, rows: DecodeState, batch: int) -> Drafted | None:
        """Returns the tokens to feed for the first `batch` rows; None: only the newest tokens."""
        limits_B = rows.rooms_S[:batch] - rows.counts_S[:batch] - 1  # one more is drawn after the last
        drafts_BK = self._drafts_SK[:batch]
        counts, matched = self._operations.draft(
            self.history, self.history.slots(batch), limits_B, self._lookup, drafts_BK
        )
        counts_B, matched_B, drafts = counts.numpy(), matched.numpy(), drafts_BK.numpy()
        if not counts_B.any():
            self._found = None
            return None
        self._found = (counts_B, matched_B, drafts[:, 0].copy())
        chosen_B = self._chosen(counts_B, matched_B, rows.positions_S[:batch].numpy() + 1)
        if chosen_B is None:
            return None
        firsts_B = np.zeros(batch + 1, dtype=np.int64)
        np.cumsum(chosen_B + 1, out=firsts_B[1:])
        rows_P = np.repeat(np.arange(batch), chosen_B + 1)
        offsets_P = np.arange(rows_P.size) - firsts_B[rows_P]
        newest_P = rows.tokens_S.numpy()[rows_P]
        tokens_P = np.where(offsets_P > 0, drafts[rows_P, offsets_P - 1], newest_P)
        return Drafted(rows_P, offsets_P, firsts_B, tokens_P)

    def _chosen(self, counts_B: Ints, matched_B: Ints, lengths_B: Ints) -> Ints | None:
        """Returns the drafted tokens of each row, most likely first over all rows, as long as they pay; else None."""
        batch, most, steps = counts_B.size, self._drafts_SK.size(1), self._costs.steps
        there_KB = np.arange(most)[:, None] < counts_B
        places = np.flatnonzero(there_KB)
        room = min(places.size, steps.size - 1 - batch)
        if room < 1:
            return None
        likely_KB = np.multiply.accumulate(np.broadcast_to(self._rates[matched_B], (most, batch)), 0)
        likely = likely_KB.ravel()[places]
        order = np.argsort(-likely, kind="stable")[:room]
        rows = places[order] % batch
        slots = int(lengths_B.sum())
        alone = steps[batch] + self._costs.slot * slots
        longer = steps[batch + 1 : batch + 1 + room] + self._costs.slot * lengths_B[rows].cumsum()
        longer += self._costs.slot * slots + self._costs.drafts
        worth = (batch + likely[order].cumsum()) / longer
        best = int(worth.argmax())
        if worth[best] <= MARGIN * batch / alone:
            return None
        return np.bincount(rows[: best + 1], minlength=batch)

    def record_outcome(self, drafted: Drafted, drawn_P: Ints, taken_B: Ints) -> None:
        """Records the outcome of a step with drafts.

        Args:
            drafted: Tokens that were fed.
            drawn_P: Token sampled after each of them.
            taken_B: Tokens of each row that were accepted.
        """
        used_P = drafted.offsets_P < taken_B[drafted.rows_P]
        rows = drafted.rows_P[used_P]
        self.history.add(rows, drafted.offsets_P[used_P], drawn_P[used_P], taken_B[rows])
        fed_B = drafted.firsts_B[1:] - drafted.firsts_B[:-1] - 1
        self.update_rates(drawn_P[drafted.firsts_B[:-1]], fed_B, drafted.leading(drafted.matches(drawn_P)))

    def update_rates(self, first_B: Ints, fed_B: Ints | None = None, accepted_B: Ints | None = None) -> None:
        """Updates the acceptance rates after the last `draft`.

        Args:
            first_B: Next token of each row.
            fed_B: Drafted tokens of each row that were fed; None: none.
            accepted_B: Fed tokens of each row that were accepted.
        """
        if self._found is None:
            return
        (counts_B, matched_B, drafted_B), self._found = self._found, None
        hits_B = ((drafted_B == first_B) & (counts_B > 0)).astype(np.int64)
        tries_B = (counts_B > 0).astype(np.int64)
        if fed_B is not None and accepted_B is not None:
            hits_B = np.where(fed_B > 0, accepted_B, hits_B)
            tries_B = np.where(fed_B > 0, np.minimum(accepted_B + 1, fed_B), tries_B)
        hits, tries = (np.bincount(matched_B, each, self._rates.size) for each in (hits_B, tries_B))
        self._rates = (self._rates * self._tries + hits) / (self._tries + tries)
        self._tries = np.minimum(self._tries + tries, WINDOW)
