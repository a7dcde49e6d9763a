"""`run_secret_cleanup`: options, last line and exit codes. How it works is in tests/cleanup."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials import services
from kfs_credentials.cleanup_worker import CleanupSummary, CleanupWorker
from kfs_credentials.conf import settings as ours
from kfs_credentials.models import RefState, Round, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import FUTURE, PAST, add_ref, add_secret, in_database, make_source, name_ref, ref_of
from tests.factories import SourceFactory, SpaceFactory
from tests.management.cleanups import AGAIN, COMMAND, DONE, LOOK, last_line, secrets
from tests.management.commands import Run
from tests.management.rows import directory_contents, give_ref, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

Files = Callable[[], list[Path]]


@pytest.fixture(autouse=True)
def _at_once(kfs_settings: Any) -> None:
    kfs_settings(ERASE_GRACE=0, LATE_WRITE_HORIZON=0)


def test_nothing_to_do(run: Run) -> None:
    SourceFactory.create()
    outcome = run("run_secret_cleanup")
    assert (outcome.code, outcome.err) == (0, "")
    assert last_line(outcome) == f"0 erased in T s. {DONE}"


def test_everything_is_erased_and_confirmed(run: Run, store: EncryptedStore, files: Files) -> None:
    kept = make_source()
    secrets(store, 3)
    outcome = run("run_secret_cleanup")
    assert (outcome.code, outcome.err) == (0, "")
    assert last_line(outcome) == f"3 erased, 3 confirmed in T s. {DONE}"
    assert len(files()) == 1
    assert services.resolve_credentials(tenant="tenant-a", source_id=kept.pk) == {"token": "made-up"}


def test_what_is_gone_is_found_first(run: Run, store: EncryptedStore, files: Files) -> None:
    in_database("DELETE FROM knowledge_spaces WHERE id = %s", make_source().knowledge_space_id)
    outcome = run("run_secret_cleanup")
    assert (outcome.code, last_line(outcome)) == (0, f"1 erased, 1 confirmed, 1 retired in T s. {DONE}")
    assert files() == []


def test_what_is_kept_for_a_person_is_not_counted_as_retired(run: Run, store: EncryptedStore, files: Files) -> None:
    """Set to NULL, rotated, and saved from a stale copy, all before a sweep: the newer ref waits."""
    source = make_source()
    older = ref_of(source)
    name_ref(source, None)
    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "newer"})
    name_ref(source, older)
    outcome = run("run_secret_cleanup", "--format", "json")
    assert (outcome.code, outcome.json["result"]["retired"], outcome.json["result"]["kept"]) == (3, 0, 1)
    assert len(files()) == 2


def test_only_what_is_due(run: Run, store: EncryptedStore, kfs_settings: Any) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    secrets(store, 3)
    secrets(store, 2, "retired")
    outcome = run("run_secret_cleanup", "--due")
    assert (outcome.code, outcome.err) == (0, "")
    assert last_line(outcome) == "3 erased in T s. 5 wait for their time."
    outcome = run("run_secret_cleanup", "--due")
    assert (outcome.code, last_line(outcome)) == (0, "0 erased in T s. 5 wait for their time.")


def test_what_comes_too_late_to_wait_for(run: Run, store: EncryptedStore, kfs_settings: Any) -> None:
    kfs_settings(LATE_WRITE_HORIZON=86_400)
    secrets(store, 2)
    outcome = run("run_secret_cleanup")
    assert outcome.code == 4
    assert re.fullmatch(
        rf"2 erased in T s\. Ended early: nothing of 2 is due for 86\d{{3}} s\. 2 left; {re.escape(AGAIN)} goes on\.",
        last_line(outcome),
    )


def test_the_limit(run: Run, store: EncryptedStore, kfs_settings: Any) -> None:
    kfs_settings(LATE_WRITE_HORIZON=600)
    secrets(store, 5)
    outcome = run("run_secret_cleanup", "--due", "--limit", 2)
    assert outcome.code == 4
    assert last_line(outcome) == (f"2 erased in T s. Ended early: the limit of 2 is reached. 5 left; {AGAIN} goes on.")
    # Just enough is enough.
    outcome = run("run_secret_cleanup", "--due", "--limit", 3)
    assert (outcome.code, last_line(outcome)) == (0, "3 erased in T s. 5 wait for their time.")


def test_tenant_and_space(run: Run, store: EncryptedStore, files: Files) -> None:
    spaces = [SpaceFactory.create(tenant_id=tenant) for tenant in ("tenant one", "tenant one", "tenant two")]
    for space in spaces:
        in_database("DELETE FROM sources WHERE id = %s", make_source(space).pk)
    for arguments in (["--space", spaces[0].pk], ["--tenant", "tenant one"]):
        outcome = run("run_secret_cleanup", *arguments)
        assert (outcome.code, last_line(outcome)) == (0, f"1 erased, 1 confirmed, 1 retired in T s. {DONE}")
    assert LedgerRow.objects.get(state=RefState.ACTIVE).tenant_id == "tenant two"
    assert len(files()) == 1
    # Nobody may rely on what has looked at one tenant only.
    assert not Round.objects.filter(completed_at__isnull=False).exists()


@pytest.mark.parametrize("due", [[], ["--due"]], ids=["", "--due"])
def test_the_hints_keep_to_the_tenant(run: Run, store: EncryptedStore, due: list[str]) -> None:
    SpaceFactory.create(tenant_id="tenant-a")
    secrets(store, 3)
    outcome = run("run_secret_cleanup", "--tenant", "tenant-a", "--limit", 1, *due)
    assert outcome.code == 4
    assert "`manage.py run_secret_cleanup --tenant tenant-a` goes on." in outcome.last_line


def test_the_options_go_before_the_settings_for_this_run_only(
    run: Run, kfs_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(BATCH_SIZE=7, LEASE=30)
    seen: list[tuple[Any, ...]] = []

    class Watched(CleanupWorker):
        def run(self) -> CleanupSummary:
            seen.append((ours.BATCH_SIZE, ours.LEASE, self.batch_size, self.steps.leases.seconds))
            return super().run()

    monkeypatch.setattr(f"{COMMAND}.CleanupWorker", Watched)
    assert run("run_secret_cleanup", "--batch-size", 5, "--lease", 1.5).code == 0
    assert run("run_secret_cleanup").code == 0
    assert seen == [(5, 1.5, 5, 1.5), (7, 30.0, 7, 30.0)]


def test_json_has_result_and_status_and_the_last_line_is_on_standard_error(run: Run, store: EncryptedStore) -> None:
    secrets(store, 2)
    in_database("DELETE FROM sources WHERE id = %s", make_source().pk)
    outcome = run("run_secret_cleanup", "--format", "json")
    assert outcome.code == 0
    assert outcome.json["result"] == {
        "erased": 3,
        "confirmed": 3,
        "to_retry": 0,
        "retained_by_the_store": 0,
        "parked": 0,
        "released": 0,
        "retired": 1,
        "kept": 0,
        "purged": 0,
        "lost": 0,
        "events_purged": 0,
        "unknown_objects": 0,
        "repairs": {
            "fine_by_now": 0,
            "later": 0,
            "brought_back": 0,
            "rescued_by_a_copy": 0,
            "registered": 0,
            "refused_by_the_database": 0,
            "unreadable": 0,
            "of_another_source": 0,
        },
        "end": "drained",
    }
    status = run("credential_status", "--format", "json").json
    then = outcome.json["status"]
    for rounds in (then["rounds"], status["rounds"]):
        assert rounds.pop("last_sweep_seconds") is not None
        assert rounds.pop("last_patrol_seconds") is not None
    assert {**then, "stores": {"default": None}} == status
    assert re.fullmatch(rf"3 erased, 3 confirmed, 1 retired in [0-9.]+ s\. {DONE}\n", outcome.err)


def test_plain_lines_of_progress_and_none_where_they_are_not_wanted(
    run: Run, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kfs_credentials.management.progress.LINE_EVERY", 0.0)
    secrets(store, 2)
    loud = run("run_secret_cleanup", "--batch-size", 2)
    first, second = loud.err.splitlines()
    assert re.fullmatch(r"0 of 2 \(0 a second\): 2 erased", first)
    assert re.fullmatch(r"2 of 2 \([0-9,]+ a second, about .* left\): 2 erased, 2 confirmed", second)
    secrets(store, 1)
    quiet = run("run_secret_cleanup", "-v", 0)
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.last_line.startswith("1 erased, 1 confirmed in ")


def test_a_watch_may_begin_before_its_tenant_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(CleanupWorker):
        def run(self) -> CleanupSummary:
            return self.summary

    monkeypatch.setattr(f"{COMMAND}.CleanupWorker", Ended)
    assert run("run_secret_cleanup", "--tenant", "tenant-new").code == 1
    assert run("run_secret_cleanup", "--tenant", "tenant-new", "--watch").code == 0


def test_watch_and_due_exclude_each_other(run: Run) -> None:
    outcome = run("run_secret_cleanup", "--watch", "--due")
    assert outcome.code == 1
    assert "error: argument --due: not allowed with argument --watch" in outcome.err


def test_the_help_says_when_what_is_erased(run: Run) -> None:
    out = " ".join(run("run_secret_cleanup", "--help").out.split())
    for sentence in (
        "Each is erased ERASE_GRACE after it was retired, and once more after LATE_WRITE_HORIZON",
        "A run begins with a sweep through all refs, and ends with a patrol through all objects in the store.",
        "--due end when nothing is due now, and wait for nothing",
        "--limit N erase at most N secrets, then end",
    ):
        assert sentence in out


# Dry run.


def test_the_dry_run_counts_what_is_due_now_and_later(run: Run, store: EncryptedStore) -> None:
    secrets(store, 2)
    secrets(store, 1, "retired")
    add_ref(None, "deleting")
    outcome = run("run_secret_cleanup", "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == f"2 refs due now, 2 later. Nothing was changed. Next: {AGAIN}.\n"
    as_json = run("run_secret_cleanup", "--dry-run", "--format", "json")
    assert as_json.err == outcome.out
    assert (as_json.json["ledger"]["overdue"], as_json.json["ledger"]["waiting"]) == (2, 2)


def test_the_dry_run_finds_nothing(run: Run) -> None:
    outcome = run("run_secret_cleanup", "--dry-run")
    assert (outcome.code, outcome.out) == (0, "0 refs due now, 0 later. Nothing was changed.\n")


def test_the_dry_run_touches_nothing(run: Run, store: EncryptedStore, secrets_directory: Path) -> None:
    secrets(store, 2)
    in_database("DELETE FROM sources WHERE id = %s", make_source().pk)
    give_ref(SourceFactory.create(bare=True), in_ledger=False)
    before = table_contents(), directory_contents(secrets_directory)
    run("run_secret_cleanup", "--dry-run")
    run("run_secret_cleanup", "--dry-run", "--format", "json")
    assert (table_contents(), directory_contents(secrets_directory)) == before


def test_the_dry_run_needs_neither_key_nor_store(run: Run, kfs_settings: Any, secrets_directory: Path) -> None:
    kfs_settings(KEYS=[])
    shutil.rmtree(secrets_directory)
    assert run("run_secret_cleanup", "--dry-run", "--skip-checks").code == 0


# What a person has to look at.


def test_a_source_whose_secret_is_lost(run: Run, store: EncryptedStore) -> None:
    give_ref(SourceFactory.create(bare=True), in_ledger=False)
    outcome = run("run_secret_cleanup")
    assert outcome.code == 3
    assert last_line(outcome) == (f"0 erased, 1 source unreadable in T s. {LOOK} shows what a person has to look at.")


def test_a_source_that_names_an_older_ref_again(run: Run, store: EncryptedStore, kfs_settings: Any) -> None:
    kfs_settings(ERASE_GRACE=600)
    source = make_source()
    old = ref_of(source)
    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "newer"})
    in_database("UPDATE sources SET credential_ref = %s", old)
    outcome = run("run_secret_cleanup")
    assert outcome.code == 3
    assert last_line(outcome) == (f"0 erased, 1 source brought back in T s. {LOOK} shows what a person has to look at.")
    assert Source.objects.get().credential_ref == old


def test_objects_that_nobody_knows(run: Run, store: EncryptedStore) -> None:
    add_secret(store)
    in_database("DELETE FROM source_secret_lifecycle_refs")
    in_database("DELETE FROM kfs_credentials_secret_object")
    outcome = run("run_secret_cleanup")
    assert outcome.code == 3
    assert last_line(outcome) == (f"0 erased, 1 unknown object in T s. {LOOK} shows what a person has to look at.")


def test_final_rows_are_purged_after_a_patrol(run: Run, store: EncryptedStore, kfs_settings: Any) -> None:
    kfs_settings(LEDGER_RETENTION=0)
    add_ref(None, "final", updated_at=PAST)
    outcome = run("run_secret_cleanup")
    assert (outcome.code, last_line(outcome)) == (0, f"0 erased, 1 purged in T s. {DONE}")
    assert LedgerRow.objects.count() == 0


def test_more_has_come_meanwhile(run: Run, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(CleanupWorker):
        def run(self) -> CleanupSummary:
            summary = super().run()
            add_ref()
            add_ref(next_delete_at=FUTURE)
            return summary

    monkeypatch.setattr(f"{COMMAND}.CleanupWorker", Late)
    outcome = run("run_secret_cleanup")
    assert outcome.code == 4
    assert last_line(outcome) == f"0 erased in T s. Since then more has come: 2 left. Run {AGAIN}."


def test_it_shows_no_value(run: Run, store: EncryptedStore) -> None:
    SourceFactory.create(credentials={"token": "canary"})
    in_database("DELETE FROM sources WHERE id = %s", make_source(secret={"token": "canary"}).pk)
    for arguments in (["--dry-run"], ["-v", 3, "--traceback"], ["--format", "json"]):
        outcome = run("run_secret_cleanup", *arguments)
        assert "canary" not in outcome.out + outcome.err
