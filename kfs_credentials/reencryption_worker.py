"""The loop around the steps of `reencrypt_secrets`: which step next, and when it is done."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from kfs_credentials.conf import settings
from kfs_credentials.errors import ImproperlyPrepared, KfsCredentialsError, LeaseLost, StoreUnavailable, WorkersPaused
from kfs_credentials.models import Source, WorkerRole
from kfs_credentials.reencryption import Batch, Object, Outcome, Page, Reencryption
from kfs_credentials.worker import LOOK_UP_EVERY, End, Summary, Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_NAMED = 1000
"""Failures that a summary keeps in mind. All are counted, and logged."""


@dataclass
class ReencryptionSummary(Summary):
    """How many of each outcome, besides; and of the objects that have to be there, how many there are."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Refs and reasons, the first `MOST_NAMED` of them."""
    expected: int = 0
    found: int = 0


class Part(NamedTuple):
    """What was settled of a batch in one transaction; or only looked at, since the lease is `lost`."""

    items: Sequence[Object]
    lost: LeaseLost | None


class ReencryptionWorker(Worker):
    """Seals everything anew under the first key, once through all refs, or until it is stopped.

    `progress` is called after each batch. `batch_size`: the most objects of one batch.
    """

    what = "objects"
    role = WorkerRole.REENCRYPT

    def __init__(
        self,
        steps: Reencryption,
        *,
        batch_size: int,
        progress: Callable[[ReencryptionSummary], None] = lambda _: None,
    ) -> None:
        super().__init__(steps, batch_size=batch_size)
        self.steps = steps
        self.progress = progress
        self.summary: ReencryptionSummary = ReencryptionSummary()

    def run(self) -> ReencryptionSummary:
        """Work until there is an end; return what was done and why it ended.

        Raises `ImproperlyPrepared` if another run is at work, or if objects have to be there and none of them is.
        """
        self._work()
        return self.summary

    def _run(self) -> None:
        completed = None
        try:
            if self._until_answered(self.steps.begin) and self._go_through():
                failed = self.summary.outcomes[Outcome.FAILED]
                completed = self._in_database(lambda: self.steps.complete(failed))
            else:
                self._end(End.INTERRUPTED, "interrupted by a signal")
        except LeaseLost as error:
            self._end(End.STUCK, str(error))
        except WorkersPaused as pause:
            self._refused(pause)
            self._end(End.PAUSED, str(pause))
        finally:
            if not completed:
                self._in_database(self.steps.abandon)

    def _go_through(self) -> bool:
        """Look at all refs, a page at a time; return whether that came to its end."""
        after = ""
        while True:
            page = self._until_answered(partial(self.steps.page, after))
            if page is None:
                return False
            self.summary.outcomes[Outcome.SKIPPED] += page.skipped
            self._in_database(self.steps.renew)
            if not self._look_at(page):
                return False
            if page.after is None:
                break
            after = page.after
        if not after and (expected := self._in_database(self._named)):
            self.summary.expected = expected
        # What an earlier run has moved was found by that.
        if self.summary.expected and not (self.summary.found or self.summary.outcomes[Outcome.SKIPPED]):
            raise ImproperlyPrepared(
                f"found 0 of {self.summary.expected:,}: the database has so many refs in use that are to be sealed "
                "anew, and the store holds an object for none of them. See whether this is the right database "
                "(--database), and KFS_CREDENTIALS['STORES'] the place of its secrets, prefix included."
            )
        # As the last of all: whoever has the first key only takes the store for a wrong one until then.
        return bool(self._until_answered(self.steps.reseal_probes))

    def _named(self) -> int:
        """Return how many sources name a ref, where the ledger has none."""
        return Source.objects.using(self.using).referenced().count()

    def _until_answered(self, work: Callable[[], T]) -> T | None:
        """Do `work`, for as long as it takes the database to answer; None if there is no waiting for it any more."""
        while (found := self._in_database(work)) is None:
            if self.stop or self._out_of_patience(database=False):
                return None
            self._idle(settings.POLL_INTERVAL)
        return found

    def _look_at(self, page: Page) -> bool:
        """Seal the objects of a page anew, in batches; return False if that is to stop."""
        left = page.objects
        while left:
            if self.stop.wait(self._pace.delay()):
                return False
            batch = self._batch(left)
            left = left[len(batch.items) :]
            self._pace.spend(len(batch.items))
            if not self._reseal(batch):
                return False
        return not self.stop

    def _batch(self, objects: Sequence[Object]) -> Batch:
        """Return as many of these as one batch may take, in rows and in bytes."""
        items: list[Object] = []
        size = 0
        for one in objects[: self._at_once]:
            size += one.size
            if items and size > settings.BATCH_BYTES:
                break
            items.append(one)
        return Batch(items)

    def _reseal(self, batch: Batch) -> bool:
        """Seal a batch anew; return False if that is to stop. Whatever ends this, what was erased stays erased."""
        try:
            is_answered = self._replace(batch)
        finally:
            settled = self._settle(batch)
        if is_answered:
            self._grow()
        self._tick()
        self.progress(self.summary)
        return is_answered and settled

    def _replace(self, batch: Batch) -> bool:
        """Wait for the stores, and for as long as they are unavailable; return False if asked to stop meanwhile."""
        while True:
            try:
                # Before the store is asked: the database may have been away, for longer than the lease.
                self._in_database(self.steps.renew)
                while batch.call is not None or self._start_replace(batch):
                    while batch.call is not None and not batch.call.wait(LOOK_UP_EVERY):
                        if self.stop.overdue:
                            self.steps.give_up(batch)
                            return False
                        self._renew(batch)
                    self.steps.finish_replace(batch)
            except StoreUnavailable as error:
                self._less_at_once(error, len(batch.asked))
                self._wait_for_store(error, lambda: self._renew(batch))
                if self.stop:
                    return False
            else:
                self._store_answered()
                return True

    def _start_replace(self, batch: Batch) -> bool:
        """Start the next store; return False if none is left to ask, or if there is no waiting for the database."""
        return bool((self._until_answered(lambda: [self.steps.start_replace(batch, self._store_size)]) or [False])[0])

    def _settle(self, batch: Batch) -> bool:
        """Note what became of a batch, and erase again what was erased meanwhile; return False if that is to stop.

        In smaller parts, if that takes longer than the server allows. Raises `LeaseLost` if another run has begun, once
        all of it was looked at: nothing is noted then, and what is back is erased again all the same.
        """
        left = batch.items
        lost: LeaseLost | None = None
        try:
            while left:
                part = self._until_answered(partial(self._settle_some, batch, left))
                if part is None:
                    break
                left = left[len(part.items) :]
                lost = part.lost
                if lost is None:
                    self._moved_at = time.monotonic()
                    self._count(part.items)
        finally:
            self._erase_again(batch)
            if left:
                logger.warning(
                    "it could not be looked up whether %d refs were erased while they were sealed anew: the cleanup's "
                    "patrol finds what is back",
                    len(left),
                )
        if lost is not None:
            raise lost
        return not left

    def _settle_some(self, batch: Batch, left: Sequence[Object]) -> Part:
        """Settle as many of these as one transaction may take by now; return them. `batch.back` gets what is back."""
        part = replace(batch, items=list(left[: self._size]), back=[])
        lost = None
        try:
            self.steps.settle(part)
        except LeaseLost as error:
            lost = error
        finally:
            known = {item.ref for item in batch.back}
            batch.back += [item for item in part.back if item.ref not in known]
        return Part(part.items, lost)

    def _count(self, items: Sequence[Object]) -> None:
        for item in items:
            self.summary.outcomes.update([] if item.outcome is None else [item.outcome])
            self.summary.expected += item.live
            self.summary.found += item.live and item.is_found
            if item.outcome is Outcome.FAILED:
                self._failed(item)

    def _failed(self, item: Object) -> None:
        reason = str(item.result)
        logger.error("ref %s of source %s cannot be sealed anew: %s", item.ref, item.source_id, reason)
        if len(self.summary.failures) < MOST_NAMED:
            self.summary.failures.append((item.ref, reason))

    def _erase_again(self, batch: Batch) -> None:
        while batch.back:
            count = len(batch.back)
            try:
                self.steps.erase_again(batch, self._store_size)
            except StoreUnavailable as error:
                self._less_at_once(error, min(count, self._store_size))
                if self.stop.overdue:
                    break
                self._wait_for_store(error, lambda: self._renew(batch))
            except KfsCredentialsError as error:
                logger.warning("the store refused an erasure: %s", error)
                break
            else:
                again = count - len(batch.back)
                logger.info("%d refs were erased while they were sealed anew: erased again", again)
        if batch.back:
            logger.warning(
                "%d refs were erased while they were sealed anew, and may be back: the cleanup erases them again",
                len(batch.back),
            )
