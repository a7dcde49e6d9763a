"""What is refused for good, by the database or by the file system, stops nobody else, and a person is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials import services
from kfs_credentials.cleanup import Cleanup, Outcome
from kfs_credentials.cleanup_worker import CleanupWorker
from kfs_credentials.crypto import object_name
from kfs_credentials.errors import StoreFull, StoreUnavailable
from kfs_credentials.models import Attention, RefState, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.repairs import Repair
from kfs_credentials.status import read_cleanup_left
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from kfs_credentials.worker import End
from tests.cleanup.rows import (
    PAST,
    add_secret,
    bare_source,
    in_database,
    known,
    make_due,
    make_source,
    name_ref,
    of_ref,
    ref_of,
    reread,
)
from tests.cleanup.runs import Change, erase, sweep

pytestmark = pytest.mark.django_db(transaction=True)

REFUSE = {"with an error": "RAISE EXCEPTION 'made up'", "silently": "RETURN NULL"}


@pytest.fixture(params=REFUSE)
def refused(request: pytest.FixtureRequest, transactional_db: None) -> Iterator[None]:
    """A function for a trigger of the host that lets nobody change a source."""
    then = REFUSE[request.param]
    in_database(f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN {then}; END$$")
    yield
    in_database("DROP FUNCTION refuse() CASCADE")


def add_claimed(store: EncryptedStore) -> LedgerRow:
    """Make a source that names a ref which was claimed for erasure, and has to get a copy."""
    source = bare_source()
    row = add_secret(store, source, "retired, due")
    SecretObject.objects.filter(pk=row.credential_ref).update(first_claimed_at=PAST)
    name_ref(source, row.credential_ref)
    return row


def test_a_source_that_cannot_be_changed_is_a_finding_and_stops_no_run(
    refused: None, store: EncryptedStore, kfs_settings: Change
) -> None:
    kfs_settings(LATE_WRITE_HORIZON=0, BATCH_SIZE=2)
    stuck = add_claimed(store)
    others = [add_secret(store) for _ in range(5)]
    in_database(
        "CREATE TRIGGER refuse BEFORE UPDATE OF credential_ref ON sources FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    worker = CleanupWorker(
        Cleanup(using="default", worker="tests", lease=60),
        next_move_in=lambda: read_cleanup_left("default"),
        batch_size=2,
        due_only=True,
    )
    summary = worker.run()
    assert (summary.end, summary.outcomes[Outcome.CONFIRMED]) == (End.DRAINED, 5)
    assert summary.repairs == {Repair.REFUSED: 1}
    assert {reread(row).state for row in others} == {RefState.DELETED}
    after = reread(stuck)
    assert (after.state, after.next_delete_at) == (RefState.RETIRED, None)
    assert known(stuck.credential_ref).attention == Attention.UNREADABLE
    # One copy, which is taken back like any other reservation that came to nothing.
    assert LedgerRow.objects.filter(state=RefState.STAGED).count() == 1


def test_files_that_cannot_be_removed_are_parked_and_the_others_are_erased(
    steps: Cleanup, store: EncryptedStore, secrets_directory: Path, kfs_settings: Change
) -> None:
    """Also when they come due again, and nothing else is."""
    kfs_settings(PARK_AFTER=2, RETRY_BASE=0)
    *bad, one, two = [add_secret(store) for _ in range(4)]
    for row in bad:
        path = secrets_directory / object_name(row.credential_ref)
        path.unlink()
        (path / "full").mkdir(parents=True)  # EISDIR, as EPERM would be for an immutable file
    assert erase(steps) == {Outcome.RETRY: 2, Outcome.ERASED: 2}
    assert {reread(row).state for row in (one, two)} == {RefState.DELETED}
    make_due(*(row.credential_ref for row in bad))
    assert erase(steps) == {Outcome.PARKED: 2}
    assert {known(row.credential_ref).attention for row in bad} == {Attention.ERASURE_FAILS}


@pytest.mark.parametrize("number", [1, 2])
def test_if_nothing_can_be_written_either_it_is_the_store_that_does_not_work(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    rows = [add_secret(store) for _ in range(number)]

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("unlink", "fsync"):
        monkeypatch.setattr(f"kfs_credentials.stores.directory.os.{call}", broken)
    with pytest.raises(StoreUnavailable, match="the file system of the secrets does not work now"):
        erase(steps)
    assert {reread(row).delete_attempts for row in rows} == {0}


@pytest.mark.parametrize("trouble", ["cannot be removed", "takes room to be removed"])
def test_room_is_made_by_whichever_object_can_be_erased(
    steps: Cleanup, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """A full store, and what is tried first cannot go."""
    rows = sorted((add_secret(store) for _ in range(3)), key=lambda row: row.pk)
    bad = Path(object_name(rows[0].credential_ref)).name
    full = [True]
    unlink, write = os.unlink, os.write

    def unlink_some(path: str, **options: Any) -> None:
        if path == bad and (full or trouble == "cannot be removed"):
            number = errno.EPERM if trouble == "cannot be removed" else errno.ENOSPC
            raise OSError(number, os.strerror(number))
        unlink(path, **options)
        if path.endswith(".enc"):
            full.clear()

    def write_some(*arguments: Any) -> int:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr("kfs_credentials.stores.directory.os.unlink", unlink_some)
    monkeypatch.setattr("kfs_credentials.stores.directory.os.write", write_some)
    monkeypatch.setattr(DurableFileStorage, "remove_many", all_or_nothing)
    stuck = trouble == "cannot be removed"
    assert erase(steps) == ({Outcome.RETRY: 1, Outcome.ERASED: 2} if stuck else {Outcome.ERASED: 3})
    assert reread(rows[0]).delete_attempts == stuck
    assert {known(row.credential_ref).receipt for row in rows[1:]} == {"erased"}


real_remove_many = DurableFileStorage.remove_many


def all_or_nothing(self: DurableFileStorage, *arguments: Any, **options: Any) -> Any:
    """Raise that there is no room, as a storage may that writes when it erases, in the place of one file's error."""
    outcomes = real_remove_many(self, *arguments, **options)
    if any("ENOSPC" in str(outcome) for outcome in outcomes):
        raise StoreFull("no room")
    return outcomes


def test_revoking_lets_go_of_a_displaced_ref_too(steps: Cleanup, store: EncryptedStore) -> None:
    source = make_source()
    older = ref_of(source)
    tenant = source.knowledge_space.tenant_id
    services.rotate_credentials(tenant=tenant, source_id=source.pk, credentials={"token": "newer"})
    newer = ref_of(source)
    name_ref(source, older)
    assert sweep(steps)[1] == {Repair.REINSTATED: 1}
    assert known(newer).attention == Attention.DISPLACED
    services.revoke_credentials(tenant=tenant, source_id=source.pk)
    assert {of_ref(ref).state for ref in (older, newer)} == {RefState.RETIRED}
    assert all(of_ref(ref).next_delete_at is not None for ref in (older, newer))
    assert known(newer).attention is None
    version = services.revoke_credentials(tenant=tenant, source_id=source.pk).version
    assert services.revoke_credentials(tenant=tenant, source_id=source.pk).version == version


def test_a_drain_that_has_something_parked_still_patrols_and_ends(store: EncryptedStore, kfs_settings: Change) -> None:
    row = add_secret(store, situation="retired", last_error_code="SOURCE_SECRET_NEEDS_ATTENTION")
    SecretObject.objects.filter(pk=row.credential_ref).update(attention=Attention.ERASURE_FAILS)
    assert read_cleanup_left("default") == (0, None)
    worker = CleanupWorker(
        Cleanup(using="default", worker="tests", lease=60),
        next_move_in=lambda: read_cleanup_left("default"),
        batch_size=10,
    )
    assert worker.run().end is End.DRAINED
    assert worker._patrol_over
    make_due(row.credential_ref)
    count, seconds = read_cleanup_left("default")
    assert (count, seconds is not None and seconds < 0) == (1, True)
