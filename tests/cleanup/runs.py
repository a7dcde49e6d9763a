"""Steps in a row, as a worker makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfs_credentials.cleanup import Cleanup, Erasure, Outcome, PatrolPosition
from kfs_credentials.repairs import Repair

Files = Callable[[], list[Path]]
Change = Callable[..., None]
NewSteps = Callable[..., Cleanup]
Outcomes = list[Any]


def claim(steps: Cleanup, limit: int = 100) -> Erasure:
    """Claim what is due: there is something."""
    erasure = steps.claim(limit)
    assert erasure is not None
    return erasure


def delete(steps: Cleanup, erasure: Erasure) -> None:
    """Let the stores erase a batch."""
    while steps.start_delete(erasure):
        steps.finish_delete(erasure)


def erase(steps: Cleanup, limit: int = 100) -> Counter[Outcome]:
    """Erase one batch of what is due; return how many of each outcome."""
    erasure = claim(steps, limit)
    delete(steps, erasure)
    return steps.settle(erasure)


def erase_all(steps: Cleanup, limit: int = 100) -> Counter[Outcome]:
    """Erase everything that is due now."""
    outcomes: Counter[Outcome] = Counter()
    while (erasure := steps.claim(limit)) is not None:
        delete(steps, erasure)
        outcomes += steps.settle(erasure)
    return outcomes


def sweep(steps: Cleanup, limit: int = 100) -> tuple[int, Counter[Repair]]:
    """Make one whole sweep; return how many refs it retired or kept, and what became of the sources that it found."""
    position = steps.begin_sweep(every=0)
    assert position is not None
    let_go, repairs = 0, Counter[Repair]()
    more = True
    while more:
        page = steps.sweep(position, limit)
        let_go += page.retired + page.kept
        repairs.update(map(steps.repair, page.to_repair))
        more = page.more
    steps.complete(position)
    return let_go, repairs


def patrol(steps: Cleanup, limit: int = 100) -> PatrolPosition:
    """Make one whole patrol of the default store; return what it found."""
    position = steps.begin_patrol("default", every=0)
    assert position is not None
    while steps.patrol(position, limit):
        pass
    steps.complete(position)
    return position
