"""Leases that have to be renewed."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.waiting import until


def outlast_a_lease(session: psycopg.Connection[Any], table: str) -> None:
    """Return once the lease of the rows of a table would be over, had it not been renewed since this was called."""
    session.autocommit = True
    first = session.execute(f"SELECT min(lease_expires_at) FROM {table}").fetchone()
    assert first is not None
    assert first[0] is not None, "nothing is leased"
    until(lambda: session.execute("SELECT now() > %s", first).fetchone() == (True,), "a lease is over")
