"""Claim, renew, fence: what both state machines share.

A worker claims rows under one fresh token, which may cover a batch. Every later write of those rows is conditional
on the token and on a lease that has not run out by the *database's* clock, under a row lock. Rows that do not match
any more belong to somebody else now: the worker goes on with the others.

The worker also keeps a watch of its own, which only ever says "no longer yours" too early, never too late: it
counts from the moment before the claim was sent, on a clock that runs on while the process is stopped.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from django.db import models
from django.db.models import F, Func, Value
from django.db.models.expressions import Combinable, RawSQL
from django.db.models.functions import Now
from django.utils import translation
from django.utils.translation import gettext_lazy as _

from kfs_credentials import sql
from kfs_credentials.errors import LeaseLost
from kfs_credentials.transactions import short_transaction


def new_worker_name() -> str:
    """Return a name for this worker: host, process and a random part, since process ids come back."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(3)}"


@dataclass
class Lease:
    """One claim: a fresh token that covers `size` rows for `duration` seconds at a time."""

    worker: str
    duration: float
    size: int = 0
    token: uuid.UUID = field(default_factory=uuid.uuid4)
    confirmed_at: float = field(default_factory=time.monotonic)
    is_last: bool = False
    """The workers are paused: it is not renewed any more."""

    @property
    def worker_id(self) -> str:
        """The column `worker_id`: the worker's name and, after `#`, how many rows the claim covers.

        The number outlives a crash: the rows of a claim that ended badly are claimed again in smaller groups, and
        only a row that was leased alone is held responsible. See `LeasedQuerySet.with_leased_size`. It is 2 at least
        if the worker had others at work besides.
        """
        return f"{self.worker}#{self.size}"

    @property
    def remaining(self) -> float:
        """Seconds for which this worker may still believe in its lease."""
        return self.confirmed_at + self.duration - time.monotonic()

    @property
    def renewal_due(self) -> bool:
        """True once a third of the lease has passed since it was last confirmed."""
        return not self.is_last and self.remaining < self.duration * 2 / 3

    @property
    def is_ending(self) -> bool:
        """True once what is not done is to be given back, as the workers are paused, while there is time for it."""
        return self.is_last and self.remaining < self.duration / 4

    def check(self) -> None:
        """Raise `LeaseLost` if the lease may have run out. Call it before each store write and each commit."""
        if self.remaining <= 0:
            raise LeaseLost("the lease ran out before the work was done; another worker takes over")

    def confirmed(self, asked_at: float) -> None:
        """Note that the database granted the lease anew; `asked_at` is the monotonic time before it was asked."""
        self.confirmed_at = asked_at


def seconds_from_now(seconds: float) -> Combinable:
    """Return the database's time `seconds` from now."""
    return Now() + interval(seconds)


def interval(seconds: float) -> Combinable:
    """Return so many seconds, for the database to add to a time; in `sql/` it is `make_interval(secs => ...)`.

    Not a timedelta: psycopg writes its days as such, and a day has 23 or 25 hours where the session's time zone changes
    its clock. That of -60 s is a day less and almost a day more.
    """
    template = "make_interval(secs => %(expressions)s)"
    return Func(Value(float(seconds)), template=template, output_field=models.DurationField())


class LeasedQuerySet(models.QuerySet[Any]):
    """Which rows are leased, by whom, and whose lease has run out."""

    leased_state: ClassVar[str]
    state_field: ClassVar[str]

    def fenced(self, lease: Lease) -> Self:
        """Return the rows that are still this lease's. Every write of a leased row goes through this."""
        return self.leased().filter(lease_token=lease.token, lease_expires_at__gt=Now())

    def leased(self) -> Self:
        """Return the rows that some worker has claimed, whether or not its lease still holds."""
        return self.filter(**{self.state_field: self.leased_state})

    def expired(self) -> Self:
        """Return the rows whose worker let its lease run out: it died, froze, or was cut off."""
        return self.leased().filter(lease_expires_at__lte=Now())

    def with_leased_size(self) -> Self:
        """Annotate `leased_size`: how many rows the current claim covered when it was made; 1 if it does not say.

        The Node service does not say, and it claims one row at a time.
        """
        size = RawSQL("COALESCE(substring(worker_id from '#([0-9]{1,6})$')::int, 1)", ())
        return self.annotate(leased_size=models.ExpressionWrapper(size, models.IntegerField()))

    def free(self) -> Self:
        """Lock those of these rows that nobody else has locked, in id order, and return them. Waits for nobody."""
        ids = self.order_by("id").select_for_update(skip_locked=True, no_key=True, of=("self",))
        return self.filter(pk__in=list(ids.values_list("pk", flat=True)))

    def release(self) -> int:
        """Give these rows back, as if they had never been claimed."""
        raise NotImplementedError

    def renew(self, lease: Lease) -> int:
        """Extend the lease of every row that is still this lease's; return how many those are.

        Locks those rows, SKIP LOCKED: whoever has one of them locked decides about it, not this worker. `row_version`
        stays: a renewal is no move. If there were any, the caller tells the lease (`Lease.confirmed`) once this is
        committed: no answer is not a renewal.
        """
        return self.fenced(lease).free().update(lease_expires_at=seconds_from_now(lease.duration), heartbeat_at=Now())


class Leases:
    """The leases of one worker on one table: how it takes them, and how it gives back what it will not finish.

    `rows` returns the queryset of the table. Not every commit is answered: rows of which this worker cannot know
    whether they are its own are given back before it takes more, rather than left to look like a crash.
    """

    def __init__(self, using: str, rows: Callable[[], LeasedQuerySet], *, worker: str, seconds: float) -> None:
        self.using = using
        self.rows = rows
        self.worker = worker
        self.seconds = seconds
        self._taking: Lease | None = None
        self._adrift: list[Lease] = []

    def new(self) -> Lease:
        """Return a new lease, to be written to rows by the caller's transaction; see `taken`."""
        if self._taking is not None:
            # The commit of the last one was not answered. If it took place, its rows are this worker's.
            self._adrift.append(self._taking)
            self._taking = None
        self._release_adrift()
        self._taking = Lease(self.worker, self.seconds)
        return self._taking

    def taken(self) -> None:
        """Note that the transaction of the last new lease was committed, or that it took no row."""
        self._taking = None

    def renew(self, lease: Lease) -> None:
        """Extend a lease if a third of it is over. Raises `LeaseLost` if nothing of it is left.

        While the workers are paused it is not extended: see `Lease.is_ending`.
        """
        if lease.renewal_due:
            asked_at = time.monotonic()
            with short_transaction(self.using):
                ((lease.is_last,),) = sql.query(self.using, "pause/is_paused")
                renewed = 0 if lease.is_last else self.rows().renew(lease)
            if renewed:
                lease.confirmed(asked_at)
            lease.check()

    def give_back(self, lease: Lease) -> int:
        """Release the rows of a lease; return how many were still this worker's.

        If the database does not answer, or somebody has a row locked, that is done before the next lease is taken.
        """
        self._adrift.append(lease)
        return self._release_adrift()

    def _release_adrift(self) -> int:
        released = 0
        for lease in list(self._adrift):
            with short_transaction(self.using):
                released += self.rows().fenced(lease).free().release()
                held = self.rows().fenced(lease).exists()
            # Rows that somebody has locked now are given back later; until then their lease says whose they are.
            if not held:
                self._adrift.remove(lease)
        return released


class ErrorCode(models.TextChoices):
    """`last_error_code` and what it tells an operator; the only texts that are ever written to a row."""

    @property
    def message(self) -> str:
        """The text in English, as it is written to the row whatever language this process speaks."""
        with translation.override(None):
            return str(self.label)


class LeasedRow(models.Model):
    """The columns that both leased tables have."""

    worker_id = models.TextField(_("worker"), null=True, blank=True)  # noqa: DJ001 - the seed's column
    lease_token = models.UUIDField(_("lease token"), null=True, blank=True)
    lease_expires_at = models.DateTimeField(_("lease expires at"), null=True, blank=True)
    heartbeat_at = models.DateTimeField(_("heartbeat at"), null=True, blank=True)
    row_version = models.IntegerField(_("row version"))
    last_error_code = models.TextField(_("last error code"), null=True, blank=True)  # noqa: DJ001 - the seed's column
    last_error_message = models.TextField(_("last error message"), null=True, blank=True)  # noqa: DJ001 - the seed's column
    created_at = models.DateTimeField(_("created at"))
    updated_at = models.DateTimeField(_("updated at"))

    # What giving a lease back writes, whatever the row becomes.
    RELEASED: ClassVar[dict[str, Any]] = {
        "worker_id": None,
        "lease_token": None,
        "lease_expires_at": None,
        "heartbeat_at": None,
        "row_version": F("row_version") + 1,
        "updated_at": Now(),
    }

    class Meta:
        abstract = True
