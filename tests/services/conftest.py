"""What the tests of the services share: another session, and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connections

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Batch
from kfs_credentials.models import KnowledgeSpace, Source, SourceSecretLifecycleRef
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SpaceFactory
from tests.management.commands import dsn
from tests.waiting import PATIENCE

Other = psycopg.Connection[Any]
Files = Callable[[], list[Path]]
Change = Callable[..., None]

TENANT = "tenant-a"
OLD, NEW = {"token": "made-up-old"}, {"token": "made-up-new"}


@pytest.fixture
def other(transactional_db: None) -> Iterator[Other]:
    """A session of somebody else, with a transaction open from its first statement on."""
    with psycopg.connect(dsn()) as session:
        yield session
        session.rollback()


@pytest.fixture
def space(transactional_db: None) -> KnowledgeSpace:
    """A space of `TENANT`."""
    return SpaceFactory.create()


@pytest.fixture
def steps(store: EncryptedStore, transactional_db: None) -> Backfill:
    """The backfill's steps, for one worker."""
    return Backfill(using="default", store=store, worker="tests", lease=60.0)


@contextmanager
def before_statement(text: str, act: Callable[[], object], using: str = "default") -> Iterator[None]:
    """Do something once, right before the first statement of ours that has `text` in it."""
    done = False

    def wrapper(execute: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        nonlocal done
        if text in sql and not done:
            done = True
            act()
        return execute(sql, parameters, many, context)

    with connections[using].execute_wrapper(wrapper):
        yield
    assert done, f"no statement has {text!r}"


def elsewhere(work: Callable[[], object]) -> None:
    """Do something on a thread, and so on a connection, of its own, to its end; raises what it raises."""
    (outcome,) = together(work)
    if isinstance(outcome, BaseException):
        raise outcome


def together(*works: Callable[[], object]) -> list[Any]:
    """Do these on threads, each with connections of its own; return what each returned or raised."""
    outcomes: list[Any] = [None] * len(works)

    def run(place: int, work: Callable[[], object]) -> None:
        try:
            outcomes[place] = work()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            outcomes[place] = error
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread waits for ever"
    return outcomes


def meet_after_put(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, number: int = 2) -> None:
    """Let the next puts be over only when so many have been made."""
    real, barrier = store._put_many, threading.Barrier(number, timeout=PATIENCE)

    def put_many(entries: Any, *, deadline: Any) -> Any:
        outcomes = real(entries, deadline=deadline)
        barrier.wait()
        return outcomes

    monkeypatch.setattr(store, "_put_many", put_many)


def after_put(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, when the next put is made, before it is answered."""
    real = store._put_many

    def put_many(entries: Any, *, deadline: Any) -> Any:
        outcomes = real(entries, deadline=deadline)
        monkeypatch.setattr(store, "_put_many", real)
        elsewhere(act)
        return outcomes

    monkeypatch.setattr(store, "_put_many", put_many)


@contextmanager
def before_get(store: EncryptedStore, act: Callable[[], object]) -> Iterator[None]:
    """Do something once, right before the store reads what it is asked for next."""
    real = store._get_many
    done = False

    def get_many(addresses: Any, *, deadline: Any) -> Any:
        nonlocal done
        if not done:
            done = True
            elsewhere(act)
        return real(addresses, deadline=deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_get_many", get_many)
        yield
    assert done, "the store was not asked"


def put(steps: Backfill) -> Batch:
    """Discover what there is, and put it."""
    batch = steps.discover(10)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    return batch


def create(space: KnowledgeSpace, credentials: Mapping[str, Any] | None = OLD, **more: Any) -> Source:
    """Create a source by the service; `more`: other arguments of it."""
    given = {
        "tenant": TENANT,
        "space_id": space.pk,
        "type": "drive",
        "name": "A source",
        "uri": "https://files.example",
    }
    return services.create_source(**{**given, "credentials": credentials, **more})


def rotate(source: Source, credentials: Mapping[str, Any] = NEW, **more: Any) -> Source:
    """Rotate the credentials of a source by the service; `more`: other arguments of it."""
    given = {"tenant": TENANT, "source_id": source.pk, "credentials": credentials}
    return services.rotate_credentials(**{**given, **more})


def resolve(source: Source) -> dict[str, Any]:
    """Return the credentials of a source, in clear."""
    return services.resolve_credentials(tenant=TENANT, source_id=source.pk).reveal()


@pytest.fixture
def source(space: KnowledgeSpace, store: EncryptedStore) -> Source:
    """A source whose credentials are in the store."""
    return create(space)


@contextmanager
def trigger(event: str, body: str, *, deferred: bool = False) -> Iterator[None]:
    """Let the project have a trigger on `sources` until the block ends. `body`: in PL/pgSQL."""
    execute(f"CREATE FUNCTION kfs_tests_trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} END $$")
    kind, at_end = ("CONSTRAINT TRIGGER", "DEFERRABLE INITIALLY DEFERRED") if deferred else ("TRIGGER", "")
    execute(
        f"CREATE {kind} kfs_tests_trigger {'AFTER' if deferred else 'BEFORE'} {event} ON sources {at_end} "
        "FOR EACH ROW EXECUTE FUNCTION kfs_tests_trigger()"
    )
    try:
        yield
    finally:
        execute("DROP FUNCTION kfs_tests_trigger CASCADE")


@contextmanager
def being_deleted(target: Any) -> Iterator[None]:
    """Let a deletion of knowledge-fs be at work on a space or a source until the block ends."""
    execute("CREATE TABLE deletion_jobs (target_id UUID NOT NULL, active_slot INTEGER)")
    try:
        execute("INSERT INTO deletion_jobs VALUES (%s, 1)", target.pk)
        yield
    finally:
        execute("DROP TABLE deletion_jobs")


def set_state(ref: str | None, state: str) -> None:
    """Let a ref be in a state, as if the cleanup had brought it there."""
    lease = "'w', gen_random_uuid(), now(), now()" if state == "deleting" else "NULL, NULL, NULL, NULL"
    execute(
        "UPDATE source_secret_lifecycle_refs SET state = %s, deleted_at = CASE WHEN %s THEN now() END, "
        "next_delete_at = CASE WHEN %s THEN now() + interval '1 hour' END, "
        f"(worker_id, lease_token, lease_expires_at, heartbeat_at) = ({lease}) WHERE credential_ref = %s",
        state,
        state == "deleted",
        state == "retired",
        ref,
    )


def states() -> list[str]:
    """Return the states of all refs."""
    return sorted(SourceSecretLifecycleRef.objects.values_list("state", flat=True))


def row_of(ref: str | None) -> SourceSecretLifecycleRef:
    """Return the ledger row of a ref."""
    row: SourceSecretLifecycleRef = SourceSecretLifecycleRef.objects.get(credential_ref=ref)
    return row


def execute(statement: str, *parameters: Any) -> None:
    """Execute a statement as somebody else would: not through the models."""
    with connections["default"].cursor() as cursor:
        cursor.execute(statement, parameters or None)


def plaintext_left() -> int:
    """Return how many sources have credentials in clear."""
    return Source.objects.filter(metadata__has_key="credentials").count()
