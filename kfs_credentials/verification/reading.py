"""Short transactions that read, and what is done where the database was busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, connections

from kfs_credentials.transactions import TRIES, Fault, fault, pause_before_try, short_transaction

T = TypeVar("T")

PAGE = 2000
"""Rows that are looked at in one statement."""


@contextmanager
def reading(using: str) -> Iterator[None]:
    """Open a short transaction in which nothing can be written."""
    with short_transaction(using) as connection:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION READ ONLY")
        yield


class Pages:
    """How many rows to look at in one statement: fewer where that takes too long for the server, more again later."""

    def __init__(self, using: str, size: int = PAGE) -> None:
        self.using = using
        self.most = self.size = size

    def read(self, read: Callable[[int], T], *, only: Sized | None = None) -> T:
        """Return what `read` returns, which is given a number of rows; call it again where the database was busy.

        `only`: the rows to look at where they are known, be they many or few. Raises a database error where nothing
        helps.
        """
        failures = 0
        while True:
            try:
                with reading(self.using):
                    result = read(self.size if only is None else len(only))
            except (DatabaseError, InterfaceError) as error:
                meaning = fault(error)
                failures += 1
                if failures == TRIES or meaning not in (Fault.PASSING, Fault.TOO_MUCH):
                    raise
            else:
                self.size = min(self.most, self.size + max(1, self.size // 8))
                return result
            connections[self.using].close_if_unusable_or_obsolete()
            if meaning is Fault.TOO_MUCH:
                self.size = max(1, self.size // 2)
                if self.size > 1:
                    failures = 0
            time.sleep(pause_before_try(failures))
