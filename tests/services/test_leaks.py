"""No error that leaves a service takes a value along, at whatever line it happens; nor do the log and the database."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from kfs_credentials import services
from kfs_credentials.crypto import Credentials
from kfs_credentials.errors import CredentialsRejected, KfsCredentialsError, SecretStoreError
from kfs_credentials.models import KnowledgeSpace, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.leaks.canary import CANARY, CREDENTIALS, OTHER_CANARY, hits
from tests.leaks.frames import everything_shown, leaks_at_each_line
from tests.management.rows import table_contents
from tests.services.conftest import TENANT, create, execute, trigger

pytestmark = pytest.mark.django_db(transaction=True)

FILES = ["services.py", "arguments.py", "ledger.py", "transactions.py", "sql/__init__.py"]
OTHER = {"access_token": OTHER_CANARY}

Run = Callable[[], object]
Prepare = Callable[[KnowledgeSpace], Run]


def accept(credentials: Credentials) -> None:
    credentials.reveal()


def of_create(space: KnowledgeSpace) -> Run:
    return lambda: create(space, CREDENTIALS, validate=accept)


def of_create_from_metadata(space: KnowledgeSpace) -> Run:
    return lambda: create(space, None, metadata={"title": "Handbook", "credentials": CREDENTIALS})


def of_resolve(space: KnowledgeSpace) -> Run:
    source = create(space, CREDENTIALS)
    return lambda: services.resolve_credentials(tenant=TENANT, source_id=source.pk)


def of_resolve_in_clear(space: KnowledgeSpace) -> Run:
    source = SourceFactory.create(knowledge_space=space, credentials=CREDENTIALS)
    return lambda: services.resolve_credentials(tenant=TENANT, source_id=source.pk)


def of_rotate(space: KnowledgeSpace) -> Run:
    source = create(space, CREDENTIALS)
    return lambda: services.rotate_credentials(
        tenant=TENANT, source_id=source.pk, credentials=OTHER, validate=accept, expected_version=1
    )


def of_rotate_in_clear(space: KnowledgeSpace) -> Run:
    source = SourceFactory.create(knowledge_space=space, credentials=CREDENTIALS)
    return lambda: services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=OTHER)


def of_revoke(space: KnowledgeSpace) -> Run:
    source = SourceFactory.create(knowledge_space=space, credentials=CREDENTIALS)
    return lambda: services.revoke_credentials(tenant=TENANT, source_id=source.pk)


def of_delete(space: KnowledgeSpace) -> Run:
    source = SourceFactory.create(knowledge_space=space, credentials=CREDENTIALS)
    return lambda: services.delete_source(tenant=TENANT, source_id=source.pk)


PREPARE: list[Prepare] = [
    of_create,
    of_create_from_metadata,
    of_resolve,
    of_resolve_in_clear,
    of_rotate,
    of_rotate_in_clear,
    of_revoke,
    of_delete,
]


@pytest.mark.parametrize("prepare", PREPARE, ids=lambda prepare: prepare.__name__)
def test_whatever_happens_at_whatever_line(
    prepare: Prepare, space: KnowledgeSpace, store: EncryptedStore, caplog: pytest.LogCaptureFixture
) -> None:
    leaks_at_each_line(lambda: prepare(space), FILES, caplog)


# What is raised by others, on the way.


def quoting(*_: Any, **__: Any) -> Any:
    raise RuntimeError(f"401 for {CANARY}", CREDENTIALS) from ValueError(CANARY)


@pytest.fixture(params=["the validator", "the store", "the database"])
def caught(
    request: pytest.FixtureRequest, space: KnowledgeSpace, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Run], KfsCredentialsError]]:
    """Return a function that expects an error of ours of a service, and let something foreign fail in it."""

    def expect(run: Run) -> KfsCredentialsError:
        with pytest.raises(KfsCredentialsError) as caught:
            run()
        return caught.value

    if request.param == "the store":
        monkeypatch.setattr(store, "_put_many", quoting)
    if request.param == "the database":
        with trigger("INSERT OR UPDATE", f"RAISE 'canary {CANARY}: %', NEW.metadata::text;"):
            yield expect
    else:
        yield expect


def test_what_others_raise_is_left_behind(
    caught: Callable[[Run], KfsCredentialsError],
    request: pytest.FixtureRequest,
    space: KnowledgeSpace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    validate = quoting if request.node.callspec.params["caught"] == "the validator" else accept
    with caplog.at_level(logging.DEBUG):
        error = caught(lambda: create(space, CREDENTIALS, validate=validate))
    texts = list(everything_shown(error))
    assert list(hits("\n".join([caplog.text, error.code, *texts]))) == []
    assert (error.__cause__, error.__context__) == (None, None)
    if validate is quoting:
        assert isinstance(error, CredentialsRejected)


def test_the_walk_sees_what_it_has_to() -> None:
    """So that the tests above mean something: a value that nobody hides is found."""
    with pytest.raises(SecretStoreError) as caught:
        raise SecretStoreError(CANARY)
    assert list(hits("\n".join(everything_shown(caught.value))))


# What the database is told.


@pytest.mark.parametrize("prepare", PREPARE, ids=lambda prepare: prepare.__name__)
def test_no_statement_carries_a_value(prepare: Prepare, space: KnowledgeSpace, store: EncryptedStore) -> None:
    """As text or as parameter: databases log both."""
    run = prepare(space)
    sent: list[str] = []

    def note(execute_it: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        sent.append(f"{sql} {parameters!r}")
        return execute_it(sql, parameters, many, context)

    with connection.execute_wrapper(note), CaptureQueriesContext(connection) as queries:
        run()
    texts = [*sent, *(query["sql"] for query in queries.captured_queries)]
    assert texts
    assert list(hits("\n".join(texts))) == []


def test_no_column_keeps_a_value(space: KnowledgeSpace, store: EncryptedStore) -> None:
    source: Any = create(space, None, metadata={"credentials": CREDENTIALS})
    source = services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=OTHER)
    services.revoke_credentials(tenant=TENANT, source_id=source.pk)
    legacy = SourceFactory.create(knowledge_space=space, credentials=CREDENTIALS)
    services.rotate_credentials(tenant=TENANT, source_id=legacy.pk, credentials=OTHER)
    assert list(hits("\n".join(row for rows in table_contents().values() for row in rows))) == []


def test_what_is_returned_shows_no_value(space: KnowledgeSpace, store: EncryptedStore) -> None:
    source = create(space, CREDENTIALS)
    execute("""UPDATE sources SET metadata = metadata || '{"title": "x"}'""")
    rotated = services.rotate_credentials(tenant=TENANT, source_id=source.pk, credentials=OTHER)
    shown = [repr(rotated), str(vars(rotated)), repr(services.resolve_credentials(tenant=TENANT, source_id=source.pk))]
    assert list(hits("\n".join(shown))) == []
    assert isinstance(rotated, Source)
