"""A row that a constraint rejects is quoted by the server, in its log and in the error: none of ours has credentials.

PostgreSQL quotes the row as it was to be. So whatever we write into `sources` takes the credentials out in the same
statement, or sees to it that the row is not quoted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.db import DatabaseError, connection

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.cleanup import Cleanup
from kfs_credentials.errors import MutationFailed
from kfs_credentials.in_clear import compared, keep_plaintext, keep_ref, read, scrub_same, wrap
from kfs_credentials.models import KnowledgeSpace, Source
from kfs_credentials.ref_operations import restore
from kfs_credentials.repairs import Repair
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.runs import sweep
from tests.factories import SourceFactory
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY, hits
from tests.ref_scenes import rows as of_refs
from tests.services.conftest import TENANT, create, execute

pytestmark = pytest.mark.django_db(transaction=True)

OTHER = {"access_token": OTHER_CANARY}
REJECTS = {
    "any row": "CHECK (false) NOT VALID",
    # What a host may add against old writers that bring credentials back; sources that have both are there already.
    "a ref beside credentials": "CHECK (credential_ref IS NULL OR NOT metadata ? 'credentials') NOT VALID",
}

Run = Callable[[], object]
Prepare = Callable[[KnowledgeSpace, EncryptedStore], Run]


def in_clear(space: KnowledgeSpace, credentials: Any = CREDENTIALS) -> Source:
    """Return a source with these in clear, and nothing else in metadata: of each column 64 characters are quoted."""
    return SourceFactory.create(knowledge_space=space, metadata={"credentials": credentials})


def both(space: KnowledgeSpace, value: dict[str, Any]) -> Source:
    """Return a source with a ref, and with this in clear beside it."""
    source = create(space, CREDENTIALS)
    execute(f"""UPDATE sources SET metadata = '{json.dumps({"credentials": value})}' WHERE id = '{source.pk}'""")
    return source


def of_create(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    return lambda: create(space, None, metadata={"credentials": CREDENTIALS})


def of_rotate(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    source = in_clear(space)
    return lambda: services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=OTHER)


def of_rotate_what_is_unsupported(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    source = in_clear(space, CANARY)
    return lambda: services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=OTHER)


def of_rotate_where_both_are(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    source = both(space, OTHER)
    return lambda: services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=OTHER)


def of_revoke(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    source = both(space, OTHER)
    return lambda: services.revoke_credentials(tenant=TENANT, source_id=source.pk)


def of_activate(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    in_clear(space)
    steps = Backfill(using="default", store=store, worker="tests", lease=60.0)
    batch = steps.discover(10)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    return lambda: steps.settle(batch)


def of_scrub_same(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    found = [one for one, _ in compared("default", [both(space, CREDENTIALS).pk])]
    return lambda: scrub_same("default", found)


def of_keep_ref(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    ((found,),) = read("default", [both(space, OTHER).pk])
    return lambda: keep_ref("default", found)


def of_keep_plaintext(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    ((found,),) = read("default", [both(space, OTHER).pk])
    return lambda: keep_plaintext("default", found)


def of_wrap(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    ((found,),) = read("default", [in_clear(space, [CANARY]).pk])
    return lambda: wrap("default", found, "token")


def of_rescue(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    """A stale save of a whole row: of a ref that is being erased, and of credentials in clear."""
    source = both(space, OTHER)
    execute("UPDATE source_secret_lifecycle_refs SET state = 'retired', delete_attempts = 1, next_delete_at = now()")
    steps = Cleanup(using="default", worker="tests", lease=60.0)
    ref = Source.objects.values_list("credential_ref", flat=True).get(pk=source.pk)
    assert ref is not None
    return lambda: steps.repair(ref)


def of_restore(space: KnowledgeSpace, store: EncryptedStore) -> Run:
    """An older ref came back, and with it credentials in clear; a person chooses the newer one."""
    source = create(space, CREDENTIALS)
    older = source.credential_ref
    newer = services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=OTHER).credential_ref
    assert newer is not None
    metadata = json.dumps({"credentials": CREDENTIALS})
    execute(f"UPDATE sources SET credential_ref = '{older}', metadata = '{metadata}' WHERE id = '{source.pk}'")
    assert sweep(Cleanup(using="default", worker="tests", lease=60.0))[1] == {Repair.REINSTATED: 1}
    return lambda: restore("default", of_refs(newer))


WRITES: list[Prepare] = [
    of_create,
    of_rotate,
    of_rotate_what_is_unsupported,
    of_rotate_where_both_are,
    of_revoke,
    of_activate,
    of_scrub_same,
    of_keep_ref,
    of_keep_plaintext,
    of_wrap,
    of_rescue,
    of_restore,
]
KEEP_WHAT_IS_IN_CLEAR = (of_rescue, of_restore)


@contextmanager
def constraint(definition: str, table: str = "sources") -> Iterator[None]:
    execute(f"ALTER TABLE {table} ADD CONSTRAINT kfs_tests_rejects {definition}")
    yield
    execute(f"ALTER TABLE {table} DROP CONSTRAINT kfs_tests_rejects")


@contextmanager
def errors_noted() -> Iterator[list[str]]:
    """Note all that the server says of an error; its log has the same."""
    noted: list[str] = []

    def note(execute_it: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        try:
            return execute_it(sql, parameters, many, context)
        except DatabaseError as error:
            server: Any = error.__cause__
            names = (name for name in dir(server.diag) if not name.startswith("_"))
            noted.append(f"{error} {[getattr(server.diag, name) for name in names]}")
            raise

    with connection.execute_wrapper(note):
        yield noted


@pytest.mark.parametrize("prepare", WRITES, ids=lambda prepare: prepare.__name__)
def test_no_row_that_is_rejected_is_quoted_with_credentials(
    prepare: Prepare, space: KnowledgeSpace, store: EncryptedStore
) -> None:
    run = prepare(space, store)
    with constraint(REJECTS["any row"]), errors_noted() as noted, suppress(MutationFailed, DatabaseError):
        run()
    assert any("kfs_tests_rejects" in text for text in noted), "and the constraint's name is told"
    quoted = any("Failing row contains" in text for text in noted)
    assert quoted == (prepare not in KEEP_WHAT_IS_IN_CLEAR)
    assert list(hits("\n".join(noted))) == []


TABLES = {
    "source_secret_lifecycle_refs": 10,
    "source_credential_backfills": 1,
    "kfs_credentials_secret_object": 8,
    "kfs_credentials_event": 12,
}
"""How many of the writes above write into each."""


@pytest.mark.parametrize("table", TABLES)
def test_no_row_of_our_tables_has_anything_to_quote(table: str, space: KnowledgeSpace, store: EncryptedStore) -> None:
    """Whatever constraint rejects one, and whatever statement writes it."""
    rejected = 0
    for prepare in WRITES:
        run = prepare(space, store)
        with constraint(REJECTS["any row"], table), errors_noted() as noted, suppress(MutationFailed, DatabaseError):
            run()
        rejected += any("Failing row contains" in text for text in noted)
        assert list(hits("\n".join(noted))) == [], prepare.__name__
        execute("DELETE FROM sources")
        execute("DELETE FROM source_secret_lifecycle_refs")
    assert rejected == TABLES[table]


@pytest.mark.parametrize("prepare", KEEP_WHAT_IS_IN_CLEAR, ids=lambda prepare: prepare.__name__)
def test_what_keeps_credentials_in_clear_fails_without_a_word_of_them(
    prepare: Prepare, space: KnowledgeSpace, store: EncryptedStore
) -> None:
    run = prepare(space, store)
    with constraint(REJECTS["a ref beside credentials"]), errors_noted() as noted:
        try:
            assert run() is Repair.REFUSED
        except DatabaseError as error:
            noted.append(repr(error.__cause__))
    assert noted
    assert all("23514" in text or "CheckViolation" in text for text in noted)
    assert list(hits("\n".join(noted))) == []


@pytest.mark.parametrize("prepare", KEEP_WHAT_IS_IN_CLEAR, ids=lambda prepare: prepare.__name__)
def test_without_such_a_constraint_it_is_done(prepare: Prepare, space: KnowledgeSpace, store: EncryptedStore) -> None:
    result: Any = prepare(space, store)()
    assert result is Repair.RESCUED or result.done == 1


def test_a_row_is_quoted_where_somebody_else_writes_it(space: KnowledgeSpace) -> None:
    """So that the tests above mean something."""
    in_clear(space)
    with constraint(REJECTS["any row"]), errors_noted() as noted, suppress(DatabaseError):
        execute("UPDATE sources SET version = version + 1")
    assert list(hits("\n".join(noted)))
