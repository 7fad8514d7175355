"""Interface of a reward function.

A user's reward is any importable function with this signature (or verl's or TRL's, see `_signatures.py`), named
"package.module:function" or "path/to/file.py:function" in the config. It always runs in a worker process. If it has an
attribute `check_kwargs`, that is called like `CHECK` below.

A built-in reward is a file in this folder that defines `REWARD`, the function, and optionally:

- `IN_PROCESS = True`: it is fast and cannot hang on any response, so it runs without a worker process;
- `CHECK`: called with the config's kwargs before the run; raises ValueError for a value that cannot work;
- `LIMIT_S`: default of its kwarg `limit_s`, which must be below `reward.time_limit_s`;
- `ASKS = True`: `REWARD` is a class that queries an endpoint, such as `judge.py`; it scores many samples concurrently,
  in a thread.

`scorer.py` calls the functions under time limits. The functions and `_worker.py` import no torch, so that a worker
starts as fast as Python does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class RewardFunction(Protocol):
    """Function that scores one response.

    An exception that it raises is reported with the sample, whose score then is `reward.error_value`.
    """

    def __call__(
        self, *, prompt: str, response: str, answer: str | None, extra: dict[str, Any], **kwargs: Any
    ) -> float | Mapping[str, Any]:
        """Returns the reward of one response.

        Args:
            prompt: Text of the prompt.
            response: Text of the response, without its end token; of an episode, the last turn's.
            answer: Ground truth; None if the data row has none.
            extra: Other columns of the data row, "response_length" (tokens) and "finish_reason".
            kwargs: `reward.functions[].kwargs` of the config.

        Returns:
            A finite number. Or, as verl's functions return, a mapping with the number under "score": other numbers in
            it become evaluation metrics, and `maj@n` votes over "pred", the answer extracted from the response.
        """
        ...
