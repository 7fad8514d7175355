"""Expected response lengths for `mrl plan`, given or read from the metrics of an earlier run.

Times then follow from them. Memory is still checked at the full lengths, because a run must not end when all responses
of a step are long; only the number of sequences in a paged KV cache follows from the expected lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from mrl.checkpoint.io.jsonl_log import number, read_rows
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.commands.plan.memory import memory_by_stage, num_kv_rows
from mrl.config.config import Config
from mrl.engines._capabilities import memory_plan
from mrl.engines._memory_plan import Device
from mrl.errors import UserError
from mrl.trainer.run_plan import Resolved

READ_STEPS = 20
"""Number of last steps of a metrics file whose lengths are averaged."""
MEAN, MAX = "response_length/mean", "response_length/max"


@dataclass(frozen=True)
class ResponseLengths:
    """Response lengths of a step, tokens.

    Attributes:
        mean: Mean over all responses.
        longest: Longest response, on which the end of a step's sampling waits.
    """

    mean: float
    longest: int

    def at_mean(self, plan: Resolved) -> Resolved:
        """Returns the run as if every response had the mean length."""
        rollout = replace(plan.config.rollout, response_length=math.ceil(self.mean), max_model_len=None)
        return replace(plan, config=replace(plan.config, rollout=rollout))

    def decoded_rows(self, plan: Resolved, device: Device, full_rows: int) -> int:
        """Returns the number of sequences that a replica decodes concurrently.

        Args:
            plan: Resolved config of the run.
            device: Device of the ranks.
            full_rows: Same number at full lengths.
        """
        if not memory_plan(plan.config).has_paged_cache or not full_rows:
            return full_rows
        return max(full_rows, num_kv_rows(memory_by_stage(self.at_mean(plan), device)))


def expected_lengths(config: Config, mean: int | None, metrics: Path | None) -> ResponseLengths | None:
    """Returns the expected response lengths; None: every response has its full length.

    Args:
        config: Config of the run.
        mean: Mean response length, tokens; the longest response is then assumed to have `rollout.response_length`.
        metrics: metrics.jsonl of a run, or its run folder, instead of `mean`.

    Raises:
        UserError: The file has no response lengths, or the mean exceeds `rollout.response_length`.
    """
    limit = config.rollout.response_length
    if metrics is not None:
        found = _read_lengths(metrics)
        source = f"the mean response length in '{metrics}', {found.mean:.0f} tokens,"
    elif mean is not None:
        found = ResponseLengths(float(mean), limit)
        source = f"--expected-response-length={mean}"
    else:
        return None
    if found.mean > limit:
        raise UserError(
            f"{source} exceeds rollout.response_length={limit}, the longest that a response can be. Give a shorter "
            "length, or raise rollout.response_length."
        )
    return replace(found, longest=min(found.longest, limit))


def _read_lengths(given: Path) -> ResponseLengths:
    path = RunDir(given).metrics if given.is_dir() else given
    if not path.is_file():
        raise UserError(f"--metrics: '{path}' does not exist. Give the metrics.jsonl of a run, or its run folder.")
    pairs = [(number(row.get(MEAN)), number(row.get(MAX))) for row in read_rows(path) if row["phase"] == "train"]
    lengths = [(mean, most) for mean, most in pairs if mean and most and math.isfinite(mean + most) and mean > 0]
    if not lengths:
        raise UserError(
            f"--metrics: '{path}' has no training step with {MEAN} and {MAX}. Give the metrics of a run that samples, "
            "or --expected-response-length N."
        )
    last = lengths[-READ_STEPS:]
    return ResponseLengths(
        sum(mean for mean, _ in last) / len(last), math.ceil(sum(most for _, most in last) / len(last))
    )
