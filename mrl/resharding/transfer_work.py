"""What a rank has delivered of a transfer, and what went wrong first."""

from __future__ import annotations

from collections.abc import Callable


class Work:
    """Sums of what was delivered, and the first failure, after which nothing more is tried."""

    def __init__(self) -> None:
        self.total = 0
        self.error: Exception | None = None

    def attempt(self, action: Callable[..., object], *args: object) -> None:
        """Adds what `action` returns, if that is a sum."""
        if self.error is None:
            try:
                found = action(*args)
                self.total += found if isinstance(found, int) else 0
            except Exception as caught:  # noqa: BLE001 - the other ranks must hear of any failure
                self.error = caught
