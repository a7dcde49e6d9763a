"""Short transactions of our own, and what a database error means.

Every transaction that moves a row runs READ COMMITTED whatever the database's default (a check after a lock would read
the old snapshot otherwise), waits for locks only so long, and is ended by the server if this process freezes in it.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import DatabaseError, DataError, InterfaceError, OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from kfs_credentials.conf import settings
from kfs_credentials.errors import ImproperlyPrepared

IDLE_IN_TRANSACTION_TIMEOUT = 30.0
"""Seconds after which the server ends a transaction of ours that does nothing: its process is frozen or gone."""

# Every statement here finds at most a batch of rows by their keys. The planner does not know: it has no statistics of
# jsonb_typeof(), and none at all of tables that were empty a minute ago, and then reads a whole table for each batch.
SET_UP = """
SELECT set_config('lock_timeout', %s, true), set_config('idle_in_transaction_session_timeout', %s, true),
  CASE current_setting('synchronous_commit') WHEN 'off' THEN set_config('synchronous_commit', 'on', true) END,
  set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
  set_config('enable_hashjoin', 'off', true), set_config('enable_mergejoin', 'off', true),
  set_config('enable_material', 'off', true),
  set_config('jit', 'off', true)
"""


def refuse_transaction(using: str) -> None:
    """Raise `ImproperlyPrepared` if a transaction is open on alias `using` or autocommit is off."""
    connection = connections[using]
    if connection.in_atomic_block or not connection.get_autocommit():
        raise ImproperlyPrepared(
            "This needs transactions of its own. Call it outside of atomic() and with autocommit on "
            f"(DATABASES['{using}'] must set neither ATOMIC_REQUESTS around it nor AUTOCOMMIT False; in a test, use "
            "TransactionTestCase)."
        )


@contextmanager
def short_transaction(using: str) -> Iterator[BaseDatabaseWrapper]:
    """Open a transaction of our own on alias `using`; yields the connection.

    Raises `ImproperlyPrepared` if a transaction is open already or autocommit is off: then nothing would be
    committed on its own, which is what every step here depends on.
    """
    refuse_transaction(using)
    connection = connections[using]
    with transaction.atomic(using=using, durable=True):
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
            # Transaction-local throughout: behind a pooler the session is somebody else's next. A reservation that
            # is not on disk when its object is would leave an object that nothing knows of.
            cursor.execute(
                SET_UP, [f"{max(1, settings.LOCK_TIMEOUT * 1000):.0f}ms", f"{IDLE_IN_TRANSACTION_TIMEOUT * 1000:.0f}ms"]
            )
        yield connection


@contextmanager
def joined_transaction(using: str) -> Iterator[None]:
    """Join the transaction that is open on alias `using`, by a savepoint, or open a short one of our own."""
    connection = connections[using]
    if connection.in_atomic_block or not connection.get_autocommit():
        with transaction.atomic(using=using):
            yield
    else:
        with short_transaction(using):
            yield


class Fault(enum.Enum):
    """What a database error is about, and so what to do next."""

    DATA = "data"  # one row of the statement: find it, and go on without it
    TOO_MUCH = "too much"  # the statement took too long: try it with fewer rows
    PASSING = "passing"  # the connection, a deadlock, a lock, a restart: the whole transaction again
    REFUSED = "refused"  # permissions, missing tables: a person has to look


# By SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html
DATA = ("22", "23", "44", "P0", "21000", "54000")
TOO_MUCH = ("57014", "25P04", "53200", "53400", "54")
PASSING = ("08", "40", "53", "55006", "55P03", "57", "25", "58", "XX")


def fault(error: DatabaseError | InterfaceError) -> Fault:
    """Return what `error` is about. Only its SQLSTATE is looked at: its text may hold a row."""
    state: str | None = getattr(error.__cause__, "sqlstate", None)
    if state is None:
        # No answer from the server: the connection is gone or was never made, or psycopg refused a value itself.
        if isinstance(error, OperationalError | InterfaceError):
            return Fault.PASSING
        return Fault.DATA if isinstance(error, DataError) else Fault.REFUSED
    if state.startswith(DATA):
        return Fault.DATA
    if state.startswith(TOO_MUCH):
        return Fault.TOO_MUCH
    if state.startswith(PASSING):
        return Fault.PASSING
    return Fault.REFUSED


TRIES = 6
"""How often a transaction is tried at once, where the database may have been busy."""


def pause_before_try(failures: int) -> float:
    """Return the seconds to wait before a transaction is tried again, after so many failures."""
    return jittered(min(0.05 * 2**failures, 1.0))


def jittered(seconds: float) -> float:
    """Return a delay that is cut short at random, so that those who failed together do not return together."""
    return seconds * random.uniform(0.5, 1.0)  # noqa: S311 - no secret


def describe(error: DatabaseError | InterfaceError) -> str:
    """Return a short description that quotes nothing of the server's message."""
    state: str | None = getattr(error.__cause__, "sqlstate", None)
    kind = type(error.__cause__ or error).__name__
    return f"{kind}, SQLSTATE {state}" if state else f"{kind}, no connection"
