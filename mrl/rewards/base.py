"""The interface of a reward function.

A reward is a file in this folder that defines

- `REWARD`, the function, and perhaps
- `IN_PROCESS = True`, where it is quick and cannot hang whatever the model writes, so that it needs no worker process;
- `CHECK`, called with the config's kwargs before a run begins, which raises ValueError for a value that cannot work;
- `LIMIT_S`, the default of its kwarg `limit_s`, which has to be below `reward.time_limit_s`;
- `ASKS = True`, where `REWARD` is a class that asks an endpoint, as `judge.py`'s: many samples at a time, in a thread;

or any importable function of the same signature, named "package.module:function", which always runs in a worker; its
attribute `check_kwargs`, where it has one, is called as `CHECK` is.
Nothing here runs model output. Scoring with time limits is in `scorer.py`. This folder's functions and `_worker.py`
import no torch: a worker starts in the time that Python takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RewardFunction(Protocol):
    """Scores one response.

    `prompt` and `response` are text, `answer` is the ground truth (None where the data has none), `extra` holds the
    other columns of the data row and the keys "response_length" (tokens) and "finish_reason"; keyword arguments come
    from the config's `kwargs`. The response comes without its end token. Returns a finite number, or like verl's
    functions a mapping with the number under "score": other numbers in it become held-out metrics, and "pred", the
    answer that the function read in the response, is what `maj@n` votes over. What it raises is reported with the
    sample.
    """

    def __call__(
        self, *, prompt: str, response: str, answer: str | None, extra: dict[str, Any], **kwargs: Any
    ) -> float | Mapping[str, Any]:
        """The reward of one response."""
        ...
