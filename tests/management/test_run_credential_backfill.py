"""`run_credential_backfill`: options, last line and exit codes. How it works is in tests/backfill."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from pytest_django import Settings

from kfs_credentials.backfill_worker import BackfillSummary, BackfillWorker
from kfs_credentials.conf import settings as ours
from kfs_credentials.crypto import Scope
from kfs_credentials.errors import StoreDenied, StoreUnavailable
from kfs_credentials.models import Pause, Source, SourceCredentialBackfill
from kfs_credentials.stores import Address
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import Admin, Outcome, Run
from tests.management.rows import JobFactory, directory_contents, give_ref, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

COMMAND = "kfs_credentials.management.commands.run_credential_backfill"
AGAIN = "`manage.py run_credential_backfill`"
LOOK = "`manage.py credential_status`"


def last_line(outcome: Outcome) -> str:
    """Return the last line, with what depends on the machine left out."""
    return re.sub(r"in [0-9.]+ s", "in T s", outcome.last_line)


def test_nothing_to_do(run: Run) -> None:
    SourceFactory.create(bare=True)
    outcome = run("run_credential_backfill")
    assert (outcome.code, outcome.err) == (0, "")
    assert last_line(outcome) == "0 moved in T s. Nothing is left to move or to look at."


def test_everything_is_moved(run: Run, store: EncryptedStore) -> None:
    sources = SourceFactory.create_batch(3)
    outcome = run("run_credential_backfill")
    assert (outcome.code, outcome.err) == (0, "")
    assert last_line(outcome) == "3 moved in T s. Nothing is left to move or to look at."
    for before in sources:
        source = Source.objects.get(pk=before.pk)
        assert source.metadata == {"title": "Handbook"}
        assert source.credential_ref is not None
        space = source.knowledge_space
        (secret,) = store.get_many([Address(Scope(space.tenant_id, space.pk, source.pk), source.credential_ref)])
        assert secret == before.metadata["credentials"]


def test_some_cannot_be_moved(run: Run) -> None:
    SourceFactory.create()
    SourceFactory.create(credentials={"bundle": "x" * 66_000})
    SourceFactory.create(credentials="token")
    outcome = run("run_credential_backfill")
    assert (outcome.code, outcome.err) == (3, "")
    assert last_line(outcome) == (
        f"1 moved, 1 failed in T s. Nothing more can be moved; {LOOK} shows what a person has to look at."
    )


def test_the_limit(run: Run) -> None:
    SourceFactory.create_batch(5)
    outcome = run("run_credential_backfill", "--limit", 2)
    assert outcome.code == 4
    assert last_line(outcome) == (
        f"2 moved in T s. Ended early: the limit of 2 is reached. 3 left, nothing lost; {AGAIN} goes on."
    )
    assert Source.objects.referenced().count() == 2
    # Just enough is enough.
    outcome = run("run_credential_backfill", "--limit", 3)
    assert outcome.code == 0
    assert last_line(outcome) == "3 moved in T s. Nothing is left to move or to look at."


def test_tenant_and_space(run: Run) -> None:
    here = SpaceFactory.create(tenant_id="tenant one")
    SourceFactory.create(knowledge_space=here)
    SourceFactory.create(knowledge_space=SpaceFactory.create(tenant_id="tenant one"))
    SourceFactory.create(knowledge_space=SpaceFactory.create(tenant_id="tenant two"))
    outcome = run("run_credential_backfill", "--space", here.pk)
    assert (outcome.code, last_line(outcome)) == (0, "1 moved in T s. Nothing is left to move or to look at.")
    outcome = run("run_credential_backfill", "--tenant", "tenant one")
    assert (outcome.code, last_line(outcome)) == (0, "1 moved in T s. Nothing is left to move or to look at.")
    assert Source.objects.legacy().count() == 1


def test_the_options_go_before_the_settings_for_this_run_only(
    run: Run, kfs_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kfs_settings(BATCH_SIZE=7, STORE_THREADS=2, LEASE=30, MAX_ATTEMPTS=3)
    seen: list[tuple[Any, ...]] = []

    class Watched(BackfillWorker):
        def run(self) -> BackfillSummary:
            seen.append(
                (
                    *(ours.BATCH_SIZE, ours.STORE_THREADS, ours.LEASE, ours.MAX_ATTEMPTS),
                    *(self.batch_size, self.steps.leases.seconds),
                )
            )
            return super().run()

    monkeypatch.setattr(f"{COMMAND}.BackfillWorker", Watched)
    options = ["--batch-size", 5, "--threads", 4, "--lease", 1.5, "--attempts", 9]
    assert run("run_credential_backfill", *options).code == 0
    assert run("run_credential_backfill").code == 0
    assert seen == [(5, 4, 1.5, 9, 5, 1.5), (7, 2, 30.0, 3, 7, 30.0)]


def test_json_has_result_and_status_and_the_last_line_is_on_standard_error(run: Run) -> None:
    SourceFactory.create()
    SourceFactory.create(credentials={"bundle": "x" * 66_000})
    outcome = run("run_credential_backfill", "--format", "json")
    assert outcome.code == 3
    assert outcome.json["result"] == {
        "moved": 1,
        "already_moved": 0,
        "refreshed": 0,
        "abandoned": 0,
        "to_retry": 0,
        "released": 0,
        "failed": 1,
        "lost": 0,
        "rejected": 0,
        "end": "drained",
    }
    status = run("credential_status", "--format", "json").json
    assert {**outcome.json["status"], "stores": {"default": None}} == status
    assert re.fullmatch(r"1 moved, 1 failed in [0-9.]+ s\. Nothing more can be moved; .*\n", outcome.err)


def test_a_watch_may_begin_before_its_tenant_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BackfillWorker):
        def run(self) -> BackfillSummary:
            return self.summary

    monkeypatch.setattr(f"{COMMAND}.BackfillWorker", Ended)
    assert run("run_credential_backfill", "--tenant", "tenant-new").code == 1
    assert run("run_credential_backfill", "--tenant", "tenant-new", "--watch").code == 0


def test_plain_lines_of_progress_and_none_where_they_are_not_wanted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfs_credentials.management.progress.LINE_EVERY", 0.0)
    SourceFactory.create_batch(2)
    loud = run("run_credential_backfill", "--limit", 1)
    assert re.fullmatch(r"1 of 2 \([0-9,]+ a second, about .* left\): 1 moved\n", loud.err)
    quiet = run("run_credential_backfill", "-v", 0)
    assert (quiet.code, quiet.err) == (0, "")
    assert quiet.last_line.startswith("1 moved in ")


# Dry run.


@pytest.fixture
def awkward() -> None:
    """Something of everything, for two tenants."""
    one, two = SpaceFactory.create(tenant_id="tenant one"), SpaceFactory.create(tenant_id="東京\n")
    SourceFactory.create_batch(3, knowledge_space=one)
    credentials: object
    for credentials in (None, [], "", "token", 0, False, {}):
        SourceFactory.create(knowledge_space=two, credentials=credentials)
    SourceFactory.create(knowledge_space=two, status="deleting")
    SourceFactory.create(knowledge_space=two, bare=True)
    give_ref(SourceFactory.create(knowledge_space=two))
    JobFactory.create(source=SourceFactory.create(knowledge_space=one))
    JobFactory.create(source=SourceFactory.create(knowledge_space=one), queued=True)


PLAN = [
    ("tenant one", "object", 5, 4),
    ("東京\n", "array", 1, 0),
    ("東京\n", "boolean", 1, 0),
    ("東京\n", "null", 1, 0),
    ("東京\n", "number", 1, 0),
    ("東京\n", "object", 2, 1),
    ("東京\n", "string", 2, 0),
]


def test_the_dry_run_counts_by_tenant_and_shape(run: Run, awkward: None) -> None:
    outcome = run("run_credential_backfill", "--dry-run", "--format", "json")
    assert (outcome.code, outcome.err) == (
        0,
        f"5 sources can be moved. Nothing was changed. Next: {AGAIN}.\n",
    )
    plan = outcome.json["plan"]
    assert [(row["tenant"], row["shape"], row["sources"], row["movable"]) for row in plan] == PLAN
    assert outcome.json["sources"]["movable"] == 5


def test_the_dry_run_as_a_table(run: Run, awkward: None) -> None:
    outcome = run("run_credential_backfill", "--dry-run")
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        "tenant      credentials  sources  movable",
        "tenant one  object             5        4",
        r"東京\n      array              1        0",
        r"東京\n      boolean            1        0",
        r"東京\n      null               1        0",
        r"東京\n      number             1        0",
        r"東京\n      object             2        1",
        r"東京\n      string             2        0",
        f"5 sources can be moved. Nothing was changed. Next: {AGAIN}.",
    ]


def test_the_dry_run_keeps_to_tenant_and_space(run: Run, awkward: None) -> None:
    outcome = run("run_credential_backfill", "--dry-run", "--tenant", "tenant one")
    assert outcome.last_line == (
        "4 sources can be moved. Nothing was changed. Next: `manage.py run_credential_backfill --tenant 'tenant one'`."
    )


def test_the_dry_run_finds_nothing(run: Run) -> None:
    outcome = run("run_credential_backfill", "--dry-run")
    assert (outcome.code, outcome.out) == (0, "0 sources can be moved. Nothing was changed.\n")


def test_the_dry_run_touches_nothing(run: Run, awkward: None, secrets_directory: Path) -> None:
    before = table_contents(), directory_contents(secrets_directory)
    run("run_credential_backfill", "--dry-run")
    run("run_credential_backfill", "--dry-run", "--format", "json")
    assert (table_contents(), directory_contents(secrets_directory)) == before


def test_the_dry_run_needs_neither_key_nor_store(run: Run, kfs_settings: Any, secrets_directory: Path) -> None:
    kfs_settings(KEYS=[])
    shutil.rmtree(secrets_directory)
    assert run("run_credential_backfill", "--dry-run", "--skip-checks").code == 0


# What goes wrong.


def test_the_directory_is_not_there(run: Run, secrets_directory: Path) -> None:
    SourceFactory.create()
    shutil.rmtree(secrets_directory)
    message = f"the directory for secrets does not exist: {secrets_directory}."
    outcome = run("run_credential_backfill")
    assert (outcome.code, outcome.out) == (1, "")
    assert f"(kfs_credentials.E004) KFS_CREDENTIALS['STORES']['default']: {message}" in outcome.err
    outcome = run("run_credential_backfill", "--skip-checks")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"CommandError: {message}")
    assert SourceCredentialBackfill.objects.count() == 0


def test_there_is_no_key(run: Run, kfs_settings: Any) -> None:
    SourceFactory.create()
    kfs_settings(KEYS=[])
    outcome = run("run_credential_backfill")
    assert outcome.code == 1
    assert "(kfs_credentials.E002) KFS_CREDENTIALS['KEYS'] is empty" in outcome.err
    outcome = run("run_credential_backfill", "--skip-checks")
    assert outcome.code == 1
    assert "KFS_CREDENTIALS['KEYS'] is empty: there is nothing to encrypt with" in outcome.err
    assert SourceCredentialBackfill.objects.count() == 0


class FailingStore(EncryptedStore):
    """The real store, which from some call on answers as it is told."""

    error: Exception | None = None
    after = 0

    def check(self) -> None:
        if self.after == 0 and self.error is not None:
            raise self.error
        super().check()

    def _put_many(self, entries: Any, *, deadline: Any) -> Any:
        if type(self).after > 0:
            type(self).after -= 1
        elif self.error is not None:
            raise self.error
        return super()._put_many(entries, deadline=deadline)


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
    fail(StoreUnavailable("the vault is sealed"))
    outcome = run("run_credential_backfill", "--skip-checks")
    assert outcome.code == 5
    assert outcome.err == "CommandError: The secret store is out of reach: the vault is sealed\n"


def test_the_store_refuses_in_the_middle(run: Run, fail: Callable[..., None]) -> None:
    SourceFactory.create_batch(4)
    fail(StoreDenied("the token has expired"), after=1)
    outcome = run("run_credential_backfill", "--batch-size", 2)
    assert outcome.code == 4
    assert last_line(outcome) == (
        "2 moved, 2 released in T s. Ended early: the token has expired. 2 left, and no job has failed by that. "
        f"Put this right, run `manage.py resume_credential_workers`, then {AGAIN}."
    )
    assert Pause.objects.get().reason == "the secret store denies access"
    assert sorted(SourceCredentialBackfill.objects.values_list("run_state", "retry_count")) == [
        ("queued", 0),
        ("queued", 0),
        ("succeeded", 0),
        ("succeeded", 0),
    ]


def test_the_store_stays_out_of_reach(run: Run, fail: Callable[..., None], kfs_settings: Any) -> None:
    kfs_settings(RETRY_BASE=0, RETRY_MAX=0)
    SourceFactory.create_batch(2)
    fail(StoreUnavailable("it does not answer"), after=1)
    outcome = run("run_credential_backfill", "--batch-size", 1, "--lease", 0.2)
    assert outcome.code == 5
    assert re.fullmatch(
        r"\d moved, .* in T s\. Ended early: the secret store is out of reach: it does not answer\. \d left, nothing "
        rf"lost; {AGAIN} goes on\.",
        last_line(outcome),
    )


def test_nothing_moves_any_more(run: Run, admin: Admin, kfs_settings: Any) -> None:
    kfs_settings(RETRY_MAX=0, RETRY_BASE=0)
    source = SourceFactory.create()
    with admin.transaction():
        admin.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [source.pk])
        outcome = run("run_credential_backfill", "--lease", 0.1)
    assert outcome.code == 4
    assert last_line(outcome) == (
        f"0 moved in T s. Ended early: nothing has moved for 0.2 s. 1 left; {LOOK} shows what they wait for."
    )


@pytest.fixture
def trigger(admin: Admin) -> Iterator[None]:
    """A host's trigger that refuses some jobs."""
    admin.execute(
        "CREATE FUNCTION kfs_tests_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'canary' USING ERRCODE = 'P0001'; END $$"
    )
    admin.execute(
        "CREATE TRIGGER kfs_tests_refuse BEFORE INSERT ON source_credential_backfills FOR EACH ROW "
        "WHEN (NEW.tenant_id = 'refused') EXECUTE FUNCTION kfs_tests_refuse()"
    )
    yield
    admin.execute("DROP FUNCTION kfs_tests_refuse CASCADE")


def test_rows_that_the_database_rejects(run: Run, trigger: None) -> None:
    SourceFactory.create()
    SourceFactory.create(knowledge_space__tenant_id="refused")
    outcome = run("run_credential_backfill")
    assert outcome.code == 3
    assert last_line(outcome) == (
        "1 moved, 1 that the database rejects in T s. Nothing more can be moved; "
        f"{LOOK} shows what a person has to look at."
    )
    assert "canary" not in outcome.out + outcome.err


def test_the_database_refuses_in_the_middle(run: Run, admin: Admin) -> None:
    """What was done by then is said."""
    SourceFactory.create_batch(2)
    admin.execute("ALTER TABLE kfs_credentials_secret_object RENAME TO kfs_tests_hidden")
    try:
        outcome = run("run_credential_backfill")
    finally:
        admin.execute("ALTER TABLE kfs_tests_hidden RENAME TO kfs_credentials_secret_object")
    assert outcome.code == 1
    assert re.fullmatch(
        r"CommandError: 0 moved in [0-9.]+ s; then the database refused a statement of this worker \(.*\)\. .*\n",
        outcome.err,
    )


def test_the_database_goes_away_before_the_end(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The counts are still told, and that what is left is not known."""
    SourceFactory.create()
    here = connection.settings_dict["HOST"]

    class Unplugged(BackfillWorker):
        def run(self) -> BackfillSummary:
            summary = super().run()
            connection.close()
            connection.settings_dict["HOST"] = str(tmp_path)
            return summary

    monkeypatch.setattr(f"{COMMAND}.BackfillWorker", Unplugged)
    try:
        outcome = run("run_credential_backfill")
    finally:
        connection.settings_dict["HOST"] = here
    assert (outcome.code, outcome.err) == (5, "")
    assert last_line(outcome) == (
        f"1 moved in T s. What is left is not known, since the database is out of reach. Run {AGAIN} when it is back."
    )


def test_it_shows_no_value(run: Run) -> None:
    SourceFactory.create(credentials={"token": "canary"})
    SourceFactory.create(credentials="canary")
    SourceFactory.create(credentials={"bundle": "canary" * 20_000})
    for arguments in (["--dry-run"], ["-v", 3, "--traceback"], ["--format", "json"]):
        outcome = run("run_credential_backfill", *arguments)
        assert "canary" not in outcome.out + outcome.err
