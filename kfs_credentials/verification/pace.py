"""So many secrets a second, and no more."""

from __future__ import annotations

import time


class Pace:
    """Holds a rate over a whole run: a batch that took long is made up for by a shorter wait after it.

    `rate`: secrets a second, None for as many as there are.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.started = time.monotonic()
        self.done = 0

    def batch(self, most: int) -> int:
        """Return how many to take at a time: no more than a second's worth, so that nothing comes in bursts."""
        return most if self.rate is None else max(1, min(most, int(self.rate)))

    def keep(self, number: int) -> None:
        """Wait until `number` more are due."""
        if self.rate is None:
            return
        self.done += number
        ahead = self.started + self.done / self.rate - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
