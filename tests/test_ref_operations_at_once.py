"""Decisions about refs that others move, hold or decide about at the same moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psycopg
import pytest
from django.db import connection, transaction

from kfs_credentials import sql
from kfs_credentials.crypto import new_ref
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.ref_operations import RefResult, discard, restore
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.invariants import check_invariants
from tests.management.commands import Admin, dsn
from tests.management.rows import table_contents
from tests.ref_scenes import (
    DECISIONS,
    NEW,
    OLD,
    Decide,
    displaced,
    execute,
    parked,
    row_of,
    rows,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("store")]

every_decision = pytest.mark.parametrize("decide", DECISIONS.values(), ids=DECISIONS)


@pytest.fixture
def impatient(kfs_settings: Callable[..., None]) -> Iterator[None]:
    """Whoever waits for a lock here waits until the statement is cancelled, which no decision expects."""
    kfs_settings(LOCK_TIMEOUT=600)
    database = connection.settings_dict["NAME"]
    execute(f"ALTER DATABASE {database} SET statement_timeout = '5s'")
    connection.close()
    yield
    execute(f"ALTER DATABASE {database} RESET statement_timeout")
    connection.close()


@pytest.fixture
def somebody() -> Iterator[Admin]:
    """A session of somebody else, with a transaction open from its first statement on."""
    with psycopg.connect(dsn()) as session:
        yield session
        session.rollback()


SCENES: dict[str, Callable[[], str]] = {
    "erase_again": parked,
    "abandon": parked,
    "restore": lambda: displaced().other,
    "discard": lambda: displaced().other,
}
every_scene = pytest.mark.parametrize("decision", SCENES)


@every_scene
def test_a_row_that_was_changed_since_it_was_seen(decision: str) -> None:
    ref = SCENES[decision]()
    row = row_of(ref)
    before = table_contents()
    stale = [(row.pk, row.row_version - 1)]
    assert DECISIONS[decision]("default", stale) == RefResult(changed=1)
    assert table_contents() == before
    assert DECISIONS[decision]("default", [(row.pk, None)]) == RefResult(done=1), "None takes any version"


@every_scene
@pytest.mark.usefixtures("impatient")
def test_a_row_that_somebody_has_locked_is_not_waited_for(decision: str, somebody: Admin) -> None:
    ref = SCENES[decision]()
    before = table_contents()
    somebody.execute("SELECT FROM source_secret_lifecycle_refs WHERE credential_ref = %s FOR UPDATE", [ref])
    assert DECISIONS[decision]("default", rows(ref)) == RefResult(changed=1)
    assert table_contents() == before


@pytest.mark.parametrize(
    "lock",
    [
        "SELECT FROM sources FOR NO KEY UPDATE",
        "SELECT FROM source_secret_lifecycle_refs WHERE state = 'active' FOR NO KEY UPDATE",
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_source_and_a_named_ref_that_somebody_has_locked_are_not_waited_for(lock: str, somebody: Admin) -> None:
    pair = displaced()
    before = table_contents()
    somebody.execute(lock)
    assert restore("default", rows(pair.other)) == RefResult(changed=1)
    assert table_contents() == before
    somebody.rollback()
    assert restore("default", rows(pair.other)) == RefResult(done=1)


def test_a_source_is_locked_before_it_is_looked_at(somebody: Admin) -> None:
    """From there on nobody moves it to another space, where the ref could not be read."""
    pair = displaced()
    held: list[str] = []

    def look(execute: Any, statement: str, parameters: Any, many: bool, context: Any) -> Any:
        if '"attention"' in statement and not held:
            with pytest.raises(psycopg.errors.LockNotAvailable):
                somebody.execute("SELECT FROM sources FOR NO KEY UPDATE NOWAIT")
            held.append(statement)
            somebody.rollback()
        return execute(statement, parameters, many, context)

    with connection.execute_wrapper(look):
        assert restore("default", rows(pair.other)) == RefResult(done=1)
    assert held


def test_a_source_that_names_yet_another_ref_by_then(somebody: Admin) -> None:
    """Which rows come before the source's lock is found out without one; what was found has to be true still."""
    pair = displaced()
    changed: list[dict[str, list[str]]] = []

    def change(execute: Any, statement: str, parameters: Any, many: bool, context: Any) -> Any:
        result = execute(statement, parameters, many, context)
        if statement == sql.read("services/find") and not changed:
            somebody.execute("UPDATE sources SET credential_ref = %s", [new_ref()])
            somebody.commit()
            changed.append(table_contents())
        return result

    with connection.execute_wrapper(change):
        assert restore("default", rows(pair.other)) == RefResult(changed=1)
    assert changed == [table_contents()]


@every_scene
def test_two_operators_at_once(decision: str) -> None:
    """Both have seen the same row: one of them decides, whoever it is."""
    chosen = rows(SCENES[decision]())
    both = Barrier(2)

    def operator(_: int) -> RefResult:
        try:
            both.wait(60)
            return DECISIONS[decision]("default", chosen)
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as operators:
        first, second = operators.map(operator, range(2))
    assert first + second == RefResult(done=1, changed=1)


def test_one_restores_and_one_discards_the_same_ref(store: EncryptedStore) -> None:
    pair = displaced()
    chosen = rows(pair.other)
    both = Barrier(2)

    def operator(decide: Decide) -> RefResult:
        try:
            both.wait(60)
            return decide("default", chosen)
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as operators:
        restored, discarded = operators.map(operator, [restore, discard])
    assert restored + discarded == RefResult(done=1, changed=1)
    assert pair.credentials() == (NEW if restored.done else OLD)
    assert check_invariants("default", store) == []


@every_decision
def test_decisions_need_transactions_of_their_own(decide: Decide) -> None:
    ref = parked()
    with transaction.atomic(), pytest.raises(ImproperlyPrepared, match="Call it outside of atomic"):
        decide("default", rows(ref))
