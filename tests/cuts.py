"""Connections that the server ends at a COMMIT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.db import connections

from tests.management.commands import dsn
from tests.waiting import PATIENCE

Cut = Callable[..., None]


@pytest.fixture
def cut_at_commit(transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Cut:
    """Return a function that lets the server end our connection at the nth COMMIT from now on.

    `took_place`: right after it, so that the client never hears of it; else right before.
    """

    def cut(number: int, *, took_place: bool, using: str = "default") -> None:
        connection: Any = connections[using]
        real, count = connection._commit, 0

        def commit() -> None:
            nonlocal count
            count += 1
            if count != number or took_place:
                real()
            if count != number:
                return
            terminate(connection)
            with connection.wrap_database_errors:
                connection.connection.execute("COMMIT")

        monkeypatch.setattr(connection, "_commit", commit)

    return cut


def terminate(connection: Any) -> None:
    """End a connection on the server's side, and wait until it is over."""
    with psycopg.connect(dsn(), autocommit=True) as session:
        backend = connection.connection.info.backend_pid
        assert session.execute("SELECT pg_terminate_backend(%s, %s)", [backend, round(PATIENCE * 1000)]).fetchone() == (
            True,
        )
