"""`reencrypt_secrets` once more: what says that it is needed, what the next run finds, and one that is too late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials import keys, reencryption
from kfs_credentials.actor import operating_system_user
from kfs_credentials.errors import LeaseLost
from kfs_credentials.models import ClosedKey, Event, EventKind, Round, SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.reencryption import Reencryption
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import add_secret, known, make_source, name_ref, ref_of
from tests.factories import SourceFactory
from tests.keys import NEW, NEW_ID, OLD, OLD_ID, Change, execute, path_of, sealed
from tests.management.commands import Run
from tests.management.reencryptions import AGAIN, COMMAND, REMOVE, last_line

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]


def as_the_node_service(store: EncryptedStore, kfs_settings: Change) -> LedgerRow:
    """Let a source have a secret under the old key, of which nothing is noted; return the ledger's row."""
    source = SourceFactory.create(bare=True)
    kfs_settings(KEYS=[OLD, NEW])
    row = add_secret(store, source, "active")
    name_ref(source, row.credential_ref)
    kfs_settings(KEYS=[NEW, OLD])
    SecretObject.objects.filter(pk=row.credential_ref).delete()
    return row


# What came into use meanwhile.


def test_what_came_into_use_behind_it_says_run_again(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    kfs_settings: Change,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No key may go then: any may be the one of it. The next run finds out, and moves it."""
    make_source()
    new_first()
    late: list[LedgerRow] = []
    real = Reencryption.reseal_probes

    def reseal_probes(steps: Reencryption) -> bool:
        late.append(as_the_node_service(store, kfs_settings))
        return real(steps)

    with monkeypatch.context() as patch:
        patch.setattr(Reencryption, "reseal_probes", reseal_probes)
        outcome = run(COMMAND)
    assert outcome.code == 4
    assert last_line(outcome) == (
        "1 rewritten, 0 skipped, 0 failed in T s. 1 ref came into use meanwhile under a key that is not known "
        f"(the Node service notes none): remove no key, and run {AGAIN} once more."
    )
    outcome = run(COMMAND)
    assert (outcome.code, last_line(outcome)) == (0, f"1 rewritten, 1 skipped, 0 failed in T s. {REMOVE}")
    assert known(late[0].credential_ref).key_id == NEW_ID


def test_the_status_points_here(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], kfs_settings: Change
) -> None:
    """It is something to look at: whoever removes a key looks there first."""
    new_first()
    as_the_node_service(store, kfs_settings)
    outcome = run("credential_status", "--check")
    assert outcome.code == 3
    assert outcome.last_line == (
        f"Nothing is left to move. To look at: 1 ref in use under keys that are not known ({AGAIN} finds out: until "
        "then, remove no key)."
    )


@pytest.mark.parametrize("state", ["deleting", "deleted"])
def test_what_a_source_names_is_moved_though_it_is_being_erased(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    kfs_settings: Change,
    files: Callable[[], list[Path]],
    state: str,
) -> None:
    """An old writer has brought it back: the cleanup makes a copy of it, and with the old key gone it still can."""
    source = make_source()
    row = add_secret(store, source, state)
    SecretObject.objects.filter(pk=row.credential_ref).update(key_id=OLD_ID)
    name_ref(source, row.credential_ref)
    new_first()
    outcome = run(COMMAND)
    assert (outcome.code, last_line(outcome)) == (0, f"2 rewritten, 0 skipped, 0 failed in T s. {REMOVE}")
    assert sealed(files()) == {NEW_ID: 2}
    assert known(row.credential_ref).key_id == NEW_ID
    kfs_settings(KEYS=[NEW])
    assert "1 source rescued by a copy" in run("run_secret_cleanup", "--due").out
    assert ref_of(source) != row.credential_ref


def test_what_a_source_names_and_is_erased_is_no_failure(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], secrets_directory: Path
) -> None:
    """There is nothing to move any more."""
    source = make_source()
    row = add_secret(store, source, "deleted")
    path_of(secrets_directory, row.credential_ref).unlink()
    name_ref(source, row.credential_ref)
    new_first()
    outcome = run(COMMAND)
    assert outcome.code == 0
    assert last_line(outcome) == f"1 rewritten, 0 skipped, 0 failed, 1 to be erased, with no object in T s. {REMOVE}"


# What the next run finds.


def test_one_missing_object_is_no_false_alarm_for_the_next_run(
    run: Run, new_first: Callable[[], None], secrets_directory: Path
) -> None:
    """What the first one has moved was found by that: the store is the right one."""
    sources = [make_source() for _ in range(3)]
    path_of(secrets_directory, ref_of(sources[0])).unlink()
    new_first()
    for counts in ("2 rewritten, 0 skipped, 1 failed", "0 rewritten, 2 skipped, 1 failed"):
        outcome = run(COMMAND)
        assert outcome.code == 3
        assert last_line(outcome).startswith(f"{counts} in T s. 1 stay as they are: ")


# A run that comes too late.


@pytest.fixture
def frozen(
    run: Run, new_first: Callable[[], None], kfs_settings: Change, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Reencryption], None]:
    """Return a function that begins a run, and freezes it before it closes the keys, while a later one is made.

    The later one goes back to the old key.
    """
    make_source()
    new_first()
    real = keys.close_keys

    def close_keys(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.setattr(reencryption, "close_keys", real)
        execute("UPDATE kfs_credentials_round SET lease_expires_at = now() - interval '1 second'")
        kfs_settings(KEYS=[OLD, NEW])
        assert run(COMMAND).code == 0
        kfs_settings(KEYS=[NEW, OLD])
        real(*arguments, **keywords)

    def begin(steps: Reencryption) -> None:
        monkeypatch.setattr(reencryption, "close_keys", close_keys)
        steps.begin()

    return begin


def test_a_run_that_wakes_up_too_late_closes_and_opens_nothing(frozen: Callable[[Reencryption], None]) -> None:
    """Neither at once nor when it tries again: the keys are as the later run wants them."""
    steps = Reencryption(using="default", worker="frozen", lease=60.0, by="tests")
    with pytest.raises(LeaseLost, match="another run has begun"):
        frozen(steps)
    assert ClosedKey.objects.values_list("key_id", flat=True).get() == NEW_ID
    with pytest.raises(LeaseLost):
        steps.begin()
    assert ClosedKey.objects.values_list("key_id", flat=True).get() == NEW_ID
    assert Round.objects.get(pk=Round.REENCRYPTION).lease_token is None


# Who has done it.


def test_who_has_closed_and_moved(run: Run, new_first: Callable[[], None]) -> None:
    """Events say who has run the command, as those of all commands do; the closed key, by whose decision."""
    make_source()
    new_first()
    user = operating_system_user()
    assert run(COMMAND).code == 0
    assert ClosedKey.objects.values_list("key_id", "closed_by").get() == (OLD_ID, user)
    kinds = [EventKind.KEY_CLOSED, EventKind.REENCRYPTED]
    events = Event.objects.filter(kind__in=kinds).order_by("id").values_list("kind", "actor")
    assert list(events) == [(kind, f"command:{user}") for kind in kinds]
