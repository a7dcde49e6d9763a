"""`reencrypt_secrets` where store or database do not answer, or refuse, and where secrets are erased meanwhile."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from kfs_credentials.errors import BindingBroken, BindingProblem, StoreDenied, StoreUnavailable
from kfs_credentials.models import Round, SecretObject
from kfs_credentials.reencryption import Batch, Outcome, Reencryption
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.transactions import short_transaction
from tests.cleanup.rows import SECRET, add_secret, make_source, name_ref, ref_of
from tests.cuts import terminate
from tests.factories import SourceFactory
from tests.keys import NEW_ID, OLD_ID, Change, execute, noted, path_of, sealed
from tests.management.commands import Run
from tests.management.reencryptions import AGAIN, COMMAND, REMOVE, add_many, last_line
from tests.services.conftest import elsewhere, set_state

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

Files = Callable[[], list[Path]]


def before_replacing(store: EncryptedStore, patch: pytest.MonkeyPatch, *acts: Callable[[], object]) -> None:
    """Do these things, one before each of the next replacements, on a thread that waits for them."""
    real, left = store._replace_many, list(acts)

    def replace_many(addresses: Any, **options: Any) -> Any:
        if left:
            elsewhere(left.pop(0))
        return real(addresses, **options)

    patch.setattr(store, "_replace_many", replace_many)


def raising(error: Exception) -> Callable[[], object]:
    """Return a function that raises this."""

    def fail() -> None:
        raise error

    return fail


def test_a_store_that_was_unavailable_is_waited_for(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    kfs_settings: Change,
) -> None:
    """It goes on by itself."""
    add_many(store, 4)
    new_first()
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0.01, BATCH_SIZE=2)
    before_replacing(store, monkeypatch, lambda: None, *[raising(StoreUnavailable("away"))] * 3)
    outcome = run(COMMAND)
    assert (outcome.code, last_line(outcome)) == (0, f"4 rewritten, 0 skipped, 0 failed in T s. {REMOVE}")


def test_a_store_that_denies_access_ends_it(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was done before is noted, and nothing counts as failed."""
    add_many(store, 4)
    new_first()
    before_replacing(store, monkeypatch, lambda: None, raising(StoreDenied("no access")))
    outcome = run(COMMAND, "--batch-size", 2)
    assert outcome.code == 4
    assert last_line(outcome) == (
        "2 rewritten, 0 skipped, 0 failed in T s. Ended early: no access. When it may go on, run "
        f"`manage.py resume_credential_workers`, then {AGAIN}."
    )
    assert noted() == {NEW_ID: 2, OLD_ID: 2}
    assert Round.objects.get(pk=Round.REENCRYPTION).lease_token is None


def test_a_store_that_is_away_at_the_start(run: Run, new_first: Callable[[], None], secrets_directory: Path) -> None:
    """Nothing is touched, no key is closed."""
    new_first()
    shutil.rmtree(secrets_directory)
    outcome = run(COMMAND)
    assert outcome.code == 1
    assert f"the directory for secrets does not exist: {secrets_directory}" in outcome.err
    assert not Round.objects.exists()


def test_a_connection_that_is_lost_in_the_middle(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    """The whole transaction is tried again."""
    add_many(store, 4)
    new_first()
    ours: Any = connections["default"]
    before_replacing(store, monkeypatch, lambda: None, lambda: terminate(ours))
    outcome = run(COMMAND, "--batch-size", 2)
    assert (outcome.code, last_line(outcome)) == (0, f"4 rewritten, 0 skipped, 0 failed in T s. {REMOVE}")
    assert sealed(files()) == noted() == {NEW_ID: 4}


@pytest.mark.parametrize("state", ["deleting", "deleted"])
def test_what_a_source_names_by_a_stale_save_is_never_erased_again(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    files: Files,
) -> None:
    """It was claimed for erasure meanwhile: the next sweep makes a copy of it, since it can still be read."""
    source = make_source()
    row = add_secret(store, source, "retired")
    new_first()
    before_replacing(store, monkeypatch, lambda: set_state(row.credential_ref, state))
    name_ref(source, row.credential_ref)
    assert last_line(run(COMMAND)).startswith("2 rewritten, 0 skipped, 0 failed in T s.")
    assert sealed(files()) == {NEW_ID: 2}


@pytest.mark.parametrize("state", ["deleting", "deleted"])
def test_what_is_claimed_for_erasure_meanwhile_is_erased_again(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    secrets_directory: Path,
) -> None:
    """The eraser may have been there before it was replaced."""
    kept, row = make_source(), add_secret(store, None, "retired")
    SecretObject.objects.filter(pk=row.credential_ref).update(key_id=OLD_ID)
    new_first()
    before_replacing(store, monkeypatch, lambda: set_state(row.credential_ref, state))
    outcome = run(COMMAND)
    assert outcome.code == 0
    assert last_line(outcome).startswith("1 rewritten, 0 skipped, 0 failed, 1 erased meanwhile in T s.")
    assert path_of(secrets_directory, ref_of(kept)).exists()
    assert not path_of(secrets_directory, row.credential_ref).exists()
    assert SecretObject.objects.get(pk=row.credential_ref).key_id == OLD_ID


def test_what_was_erased_meanwhile_is_erased_again_in_all_parts_of_a_batch_whose_lease_is_lost(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    files: Files,
) -> None:
    """Another run has begun, and this one settles in smaller parts: it notes nothing of any, and looks at each."""
    rows = [add_secret(store, None, "retired") for _ in range(5)]
    refs = [row.credential_ref for row in rows]
    SecretObject.objects.filter(pk__in=refs).update(key_id=OLD_ID)
    new_first()
    settle, sizes = Reencryption.settle, list[int]()

    def erase() -> None:
        for ref in refs:
            set_state(ref, "deleted")
        execute("UPDATE kfs_credentials_round SET lease_token = gen_random_uuid()")

    def slow_settle(steps: Reencryption, batch: Batch) -> Counter[Outcome]:
        sizes.append(len(batch.items))
        if len(sizes) == 1:
            with short_transaction("default"):
                execute("SET LOCAL statement_timeout = 1")
                execute("SELECT pg_sleep(60)")
        return settle(steps, batch)

    before_replacing(store, monkeypatch, erase)
    monkeypatch.setattr(Reencryption, "settle", slow_settle)
    outcome = run(COMMAND, "--batch-size", 5)
    assert (outcome.code, sizes) == (4, [5, 2, 2, 1])
    assert "Ended early: another run has begun" in outcome.last_line
    assert last_line(outcome).startswith("0 rewritten, 0 skipped, 0 failed")
    assert (files(), noted()) == ([], {OLD_ID: 5})


def test_whatever_ends_it_says_what_could_not_be_looked_up(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [add_secret(store, None, "retired") for _ in range(4)]
    SecretObject.objects.filter(pk__in=[row.credential_ref for row in rows]).update(key_id=OLD_ID)
    new_first()

    def refuse(steps: Reencryption, batch: Batch) -> Counter[Outcome]:
        raise BindingBroken(BindingProblem.OTHER, "somebody has bound it anew")

    monkeypatch.setattr(Reencryption, "settle", refuse)
    outcome = run(COMMAND, "--batch-size", 4)
    assert outcome.code != 0
    assert "it could not be looked up whether 4 refs were erased" in caplog.text


def test_nothing_of_a_secret_is_printed_or_logged(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    secrets_directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also not of one that is damaged."""
    caplog.set_level(logging.DEBUG)
    make_source()
    damaged = make_source()
    SourceFactory.create()
    path_of(secrets_directory, ref_of(damaged)).write_text('{"token": "made-up"}')
    new_first()
    outcome = run(COMMAND)
    assert outcome.code == 3
    value = re.escape(SECRET["token"])
    assert not re.search(value, outcome.out + outcome.err)
    # The tests' own statements are logged too: they write no secret.
    assert not re.search(value, caplog.text)


def test_a_store_that_hangs_when_it_is_asked_to_stop(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch, files: Files
) -> None:
    """It is waited for no longer, and what it does when it wakes up changes nothing."""
    make_source()
    new_first()
    monkeypatch.setattr("kfs_credentials.worker.STOP_WITHIN", 0.0)
    go_on, threads = threading.Event(), []
    real = store._replace_many

    def replace_many(addresses: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGTERM)
        go_on.wait()
        return real(addresses, **options)

    monkeypatch.setattr(store, "_replace_many", replace_many)
    outcome = run(COMMAND)
    assert (outcome.code, last_line(outcome)) == (
        4,
        f"0 rewritten, 0 skipped, 0 failed in T s. Ended early: interrupted by a signal. {AGAIN} goes on.",
    )
    go_on.set()
    threads[0].join()
    assert sealed(files()) == noted() == {OLD_ID: 1}
