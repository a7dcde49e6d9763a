"""What a worker tells about itself: that it is at work, and what keeps it from working.

Neither is ever worth an error: where the database cannot be told, the worker goes on.
"""

from __future__ import annotations

import logging
import time

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections

from kfs_credentials import sql
from kfs_credentials.errors import ImproperlyPrepared, KfsCredentialsError
from kfs_credentials.models import Refusal, RefusalReason, Tick, WorkerRole
from kfs_credentials.signals import worker_refused, worker_ticked
from kfs_credentials.transactions import Fault, describe, fault, joined_transaction

logger = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two ticks of a worker, at least."""


class Ticker:
    """Tells that one worker is at work. Costs a statement a second at most."""

    def __init__(self, using: str, role: WorkerRole, worker: str) -> None:
        self.using = using
        self.role = role
        self.worker = worker
        self._next_at = 0.0

    def tick(self) -> None:
        """Note that this worker came to the end of a step, unless it has done so a moment ago; send `worker_ticked`.

        Outside of any transaction. Waits for no lock.
        """
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + EVERY
        try:
            sql.query(self.using, "audit/tick", role=self.role.value, worker=self.worker)
        except (DatabaseError, InterfaceError) as error:
            logger.info("a tick could not be written (%s)", describe(error))
            connections[self.using].close_if_unusable_or_obsolete()
            return
        worker_ticked.send_robust(Tick, using=self.using, role=self.role, worker=self.worker)


def refuse(using: str, role: WorkerRole, reason: RefusalReason) -> None:
    """Count that a worker of this role has refused to work, or waits; send `worker_refused`.

    Works inside a transaction too. Locks the one row that counts this, and waits for it for LOCK_TIMEOUT at most.
    """
    try:
        with joined_transaction(using):
            sql.query(using, "audit/refuse", role=role.value, reason=reason.value)
    except (DatabaseError, InterfaceError, ImproperlyPrepared) as error:
        what = str(error) if isinstance(error, ImproperlyPrepared) else describe(error)
        logger.info("a refusal could not be counted (%s)", what)
        if not connections[using].in_atomic_block:
            connections[using].close_if_unusable_or_obsolete()
    worker_refused.send_robust(Refusal, using=using, role=role, reason=reason)


def reason_of(error: BaseException) -> RefusalReason | None:
    """Return the class of what keeps a worker from working; None if this error is of no such class."""
    match error:
        case KfsCredentialsError(refusal=str(refusal)):
            return RefusalReason(refusal)
        case ImproperlyConfigured():
            return RefusalReason.MISCONFIGURED
        case DatabaseError() | InterfaceError():
            passing = fault(error) in (Fault.PASSING, Fault.TOO_MUCH)
            return RefusalReason.DATABASE_UNREACHABLE if passing else RefusalReason.DATABASE_REFUSED
        case _:
            return None
