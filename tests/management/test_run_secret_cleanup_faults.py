"""`run_secret_cleanup` where store or database fail: last line and exit codes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from pytest_django import Settings

from kfs_credentials.cleanup_worker import CleanupSummary, CleanupWorker
from kfs_credentials.errors import SecretStoreError, StoreDenied, StoreUnavailable
from kfs_credentials.models import Pause
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import add_ref
from tests.management.cleanups import AGAIN, COMMAND, LOOK, last_line, secrets
from tests.management.commands import Admin, Run
from tests.management.rows import table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

Files = Callable[[], list[Path]]


@pytest.fixture(autouse=True)
def _at_once(kfs_settings: Any) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)


def test_the_directory_is_not_there(run: Run, secrets_directory: Path) -> None:
    row = add_ref()
    shutil.rmtree(secrets_directory)
    before = table_contents()
    message = f"the directory for secrets does not exist: {secrets_directory}."
    outcome = run("run_secret_cleanup")
    assert (outcome.code, outcome.out) == (1, "")
    assert f"(kfs_credentials.E004) KFS_CREDENTIALS['STORES']['default']: {message}" in outcome.err
    outcome = run("run_secret_cleanup", "--skip-checks")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"CommandError: {message}")
    assert table_contents() == before
    assert LedgerRow.objects.get().row_version == row.row_version


def test_there_is_no_key(run: Run, kfs_settings: Any) -> None:
    add_ref()
    kfs_settings(KEYS=[])
    before = table_contents()
    outcome = run("run_secret_cleanup")
    assert outcome.code == 1
    assert "(kfs_credentials.E002) KFS_CREDENTIALS['KEYS'] is empty" in outcome.err
    outcome = run("run_secret_cleanup", "--skip-checks")
    assert outcome.code == 1
    assert "KFS_CREDENTIALS['KEYS'] is empty: there is nothing to encrypt with" in outcome.err
    assert table_contents() == before


class FailingStore(EncryptedStore):
    """The real store, which from some erasure on answers as it is told."""

    error: Exception | None = None
    after = 0

    def check(self) -> None:
        if self.after == 0 and self.error is not None:
            raise self.error
        super().check()

    def _delete_many(self, addresses: Any, *, deadline: Any) -> Any:
        if type(self).after > 0:
            type(self).after -= 1
        elif self.error is not None:
            raise self.error
        return super()._delete_many(addresses, deadline=deadline)


@pytest.fixture
def fail(settings: Settings, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that lets the store raise an error, from the start or after some calls."""
    stores = settings.KFS_CREDENTIALS["STORES"]
    stores["default"] = {**stores["default"], "BACKEND": f"{FailingStore.__module__}.FailingStore"}
    settings.KFS_CREDENTIALS = {**settings.KFS_CREDENTIALS, "STORES": stores}

    def fail(error: Exception, after: int = 0) -> None:
        monkeypatch.setattr(FailingStore, "error", error)
        monkeypatch.setattr(FailingStore, "after", after)

    return fail


def test_the_store_is_out_of_reach_at_the_start(run: Run, fail: Callable[..., None]) -> None:
    add_ref()
    before = table_contents()
    fail(StoreUnavailable("the vault is sealed"))
    outcome = run("run_secret_cleanup", "--skip-checks")
    assert outcome.code == 5
    assert outcome.err == "CommandError: The secret store is out of reach: the vault is sealed\n"
    assert table_contents() == before


def test_the_store_refuses_in_the_middle(
    run: Run, store: EncryptedStore, fail: Callable[..., None], kfs_settings: Any
) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    secrets(store, 4)
    fail(StoreDenied("the token has expired"), after=1)
    outcome = run("run_secret_cleanup", "--batch-size", 2)
    assert outcome.code == 4
    assert last_line(outcome) == (
        "2 erased, 2 released in T s. Ended early: the token has expired. 4 left, and nothing counts as erased by "
        f"that. Put this right, run `manage.py resume_credential_workers`, then {AGAIN}."
    )
    assert Pause.objects.get().reason == "the secret store denies access"
    assert sorted(LedgerRow.objects.values_list("state", "delete_attempts")) == [
        *[("deleted", 0)] * 2,
        *[("retired", 0)] * 2,
    ]


def test_the_store_stays_out_of_reach(
    run: Run, store: EncryptedStore, fail: Callable[..., None], kfs_settings: Any
) -> None:
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0)
    secrets(store, 2)
    fail(StoreUnavailable("it does not answer"), after=1)
    outcome = run("run_secret_cleanup", "--batch-size", 1, "--lease", 0.2)
    assert outcome.code == 5
    assert re.fullmatch(
        r"1 erased, \d+ released in T s\. Ended early: the secret store is out of reach: it does not answer\. 2 left; "
        rf"{AGAIN} goes on\.",
        last_line(outcome),
    )


def test_one_ref_that_cannot_be_erased(
    run: Run, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, kfs_settings: Any
) -> None:
    kfs_settings(RETRY_BASE=0, PARK_AFTER=2)
    secrets(store, 1)
    monkeypatch.setattr(EncryptedStore, "_delete_many", lambda *_, **__: [SecretStoreError("canary")] * 1, raising=True)
    outcome = run("run_secret_cleanup", "--due")
    assert outcome.code == 3
    assert last_line(outcome) == (f"0 erased, 1 to retry, 1 parked in T s. {LOOK} shows what a person has to look at.")
    assert run("credential_status", "--check").code == 3


def test_nothing_moves_any_more(run: Run, admin: Admin, kfs_settings: Any) -> None:
    kfs_settings(RETRY_MAX=0, RETRY_BASE=0)
    row = add_ref()
    with admin.transaction():
        admin.execute("SELECT FROM source_secret_lifecycle_refs WHERE id = %s FOR UPDATE", [row.pk])
        outcome = run("run_secret_cleanup", "--lease", 0.1)
    assert outcome.code == 4
    assert last_line(outcome) == (
        f"0 erased in T s. Ended early: nothing has moved for 0.2 s. 1 left; {AGAIN} goes on."
    )


def test_the_database_refuses_in_the_middle(run: Run, admin: Admin) -> None:
    """What was done by then is said."""
    add_ref()
    admin.execute("ALTER TABLE kfs_credentials_secret_object RENAME TO kfs_tests_hidden")
    try:
        outcome = run("run_secret_cleanup")
    finally:
        admin.execute("ALTER TABLE kfs_tests_hidden RENAME TO kfs_credentials_secret_object")
    assert outcome.code == 1
    assert re.fullmatch(
        r"CommandError: 0 erased in [0-9.]+ s; then the database refused a statement of this worker \(.*\)\. .*\n",
        outcome.err,
    )


def test_the_database_goes_away_before_the_end(
    run: Run, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The counts are still told, and that what is left is not known."""
    secrets(store, 1)
    here = connection.settings_dict["HOST"]

    class Unplugged(CleanupWorker):
        def run(self) -> CleanupSummary:
            summary = super().run()
            connection.close()
            connection.settings_dict["HOST"] = str(tmp_path)
            return summary

    monkeypatch.setattr(f"{COMMAND}.CleanupWorker", Unplugged)
    try:
        outcome = run("run_secret_cleanup")
    finally:
        connection.settings_dict["HOST"] = here
    assert (outcome.code, outcome.err) == (5, "")
    assert last_line(outcome) == (
        "1 erased, 1 confirmed in T s. What is left is not known, since the database is out of reach. "
        f"Run {AGAIN} when it is back."
    )
