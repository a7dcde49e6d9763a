"""The proxy does at a COMMIT what it says, and nothing to whom it lets pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from django.db import connection

from tests.torture.proxy import AFTERWARDS, CUTS, Fate, Proxy

COMMITTED = "SELECT count(*) FROM kfs_tests_proxied"


class Fates:
    """What happens to the COMMITs to come; and who was struck, and what the table held at that moment."""

    def __init__(self, fate: Fate) -> None:
        self.fate = fate
        self.struck: list[tuple[str, Fate]] = []

    def decide(self, name: str, is_commit: bool) -> Fate:
        return self.fate if is_commit else Fate.NOTHING

    def act(self, name: str, fate: Fate) -> None:
        self.struck.append((name, fate))


@pytest.fixture
def _table(transactional_db: None) -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE kfs_tests_proxied (n INT)")
        yield
        cursor.execute("DROP TABLE kfs_tests_proxied")


@contextmanager
def proxied(fates: Fates) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """Give a connection by way of the proxy."""
    connection.ensure_connection()
    parameters = connection.get_connection_params()
    path = f"{parameters['host']}/.s.PGSQL.{parameters['port']}"
    with Proxy(path, fates.decide, fates.act) as proxy:
        session = psycopg.connect(
            host="127.0.0.1",
            port=proxy.port,
            user=parameters["user"],
            dbname=parameters["dbname"],
            sslmode="disable",
            application_name="the one",
        )
        try:
            yield session
        finally:
            session.close()


def committed() -> int:
    with connection.cursor() as cursor:
        cursor.execute(COMMITTED)
        return int(cursor.fetchone()[0])


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize("fate", CUTS)
def test_a_connection_is_cut(fate: Fate) -> None:
    with proxied(Fates(fate)) as session:
        session.execute("INSERT INTO kfs_tests_proxied VALUES (1)")
        with pytest.raises(psycopg.OperationalError):
            session.commit()
    # The server has done what it was asked for, though nobody was told; or it was never asked.
    assert committed() == (1 if fate is Fate.CUT_AFTERWARDS else 0)


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize("fate", [fate for fate in Fate if fate not in CUTS])
def test_a_process_is_struck_and_told_all_the_same(fate: Fate) -> None:
    """Here it lives on, and finds its answer."""
    fates = Fates(fate)
    with proxied(fates) as session:
        session.execute("INSERT INTO kfs_tests_proxied VALUES (1)")
        assert fates.struck == []
        session.commit()
        assert session.execute("SELECT 1").fetchone() == (1,)
    assert committed() == 1
    assert fates.struck == ([] if fate is Fate.NOTHING else [("the one", fate)])


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize("fate", AFTERWARDS)
def test_what_happens_afterwards_happens_when_it_is_committed(fate: Fate) -> None:
    seen: list[int] = []
    connection.ensure_connection()
    way = {key: connection.get_connection_params()[key] for key in ("host", "port", "user", "dbname")}

    class Looking(Fates):
        def act(self, name: str, fate: Fate) -> None:
            with psycopg.connect(**way) as session:
                row = session.execute(COMMITTED).fetchone()
                seen.append(row[0] if row else -1)

    fates = Looking(fate)
    with proxied(fates) as session:
        session.execute("INSERT INTO kfs_tests_proxied VALUES (1)")
        if fate is Fate.CUT_AFTERWARDS:
            with pytest.raises(psycopg.OperationalError):
                session.commit()
            seen.append(committed())
        else:
            session.commit()
    assert seen == [1]
