"""`verify_credentials`: what it says, what it asks, and its exit codes. What is found: tests/verification."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from kfs_credentials.crypto import Scope, new_ref, object_name
from kfs_credentials.errors import StoreDenied, StoreUnavailable
from kfs_credentials.models import Event, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.verification import deep
from kfs_credentials.verification.findings import Finding, FindingClass, what_to_do
from tests.cleanup.rows import in_database, make_source, ref_of, scope_of
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import Admin, Outcome, Run
from tests.management.rows import JobFactory, directory_contents, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

VERIFY = "verify_credentials"
SAME = '{"credentials": {"token": "made-up"}}'
SOURCE = "5f0c2a7e-3d1b-4c68-9e47-0a51c2d3e4f5"


def line(outcome: Outcome) -> str:
    """Return the last line, with what depends on the machine left out."""
    shown = outcome.out if outcome.out.strip() and not outcome.out.startswith("{") else outcome.err
    return re.sub(r"in [0-9.]+ s", "in T s", shown.strip().splitlines()[-1])


def beside(metadata: str) -> Source:
    source = make_source()
    in_database("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", metadata, source.pk)
    return source


def test_nothing_is_found(run: Run, secrets_directory: Path) -> None:
    make_source()
    SourceFactory.create()
    JobFactory.create(source=SourceFactory.create(bare=True), succeeded=True)
    before = table_contents(), directory_contents(secrets_directory)
    outcome = run(VERIFY)
    assert (outcome.code, outcome.err) == (0, "")
    assert line(outcome) == "3 sources, 1 ref, 1 job looked at in T s. Nothing was found."
    outcome = run(VERIFY, "--deep")
    assert outcome.code == 0
    assert line(outcome) == ("3 sources, 1 ref, 1 job looked at, 1 object read and 1 listed in T s. Nothing was found.")
    assert (table_contents(), directory_contents(secrets_directory)) == before


def test_an_empty_database(run: Run) -> None:
    outcome = run(VERIFY, "--deep", "--format", "json")
    assert (outcome.code, outcome.json["clean"], outcome.json["findings"]) == (0, True, [])
    assert outcome.json["old_plaintext"]["rewritten"] is True


def test_findings_in_a_table(run: Run) -> None:
    source = make_source(SpaceFactory.create(tenant_id="東京\n"))
    ref = ref_of(source)
    in_database("DELETE FROM source_secret_lifecycle_refs")
    SourceFactory.create(credentials="canary", id=SOURCE)
    outcome = run(VERIFY)
    assert (outcome.code, outcome.err) == (3, "")
    lines = outcome.out.splitlines()
    assert lines[:2] == [
        "ref_unknown: a source names a ref that the ledger does not know (1)",
        rf"    {source.pk}  東京\n  source-secret:v1:{ref[17:25]}…    -> `manage.py run_secret_cleanup --due`",
    ]
    assert lines[3] == "unsupported: credentials that are no object, which nobody has acknowledged (1)"
    assert lines[4].endswith(f"string  -> `manage.py settle_unsupported_credentials {SOURCE} --wrap KEY`")
    assert line(outcome) == (
        "2 sources, 0 refs, 0 jobs looked at in T s. 2 findings: 1 ref_unknown, 1 unsupported. "
        "Each says what to do; then run `manage.py verify_credentials` again."
    )
    assert "canary" not in outcome.out


def test_findings_in_json(run: Run) -> None:
    source = beside('{"credentials": {"token": "canary"}}')
    outcome = run(VERIFY, "--format", "json", "--tenant", "tenant-a")
    assert outcome.code == 3
    assert outcome.json["counts"] == {"plaintext_differs": 1}
    assert outcome.json["findings"] == [
        {
            "class": "plaintext_differs",
            "tenant": "tenant-a",
            "source": str(source.pk),
            "ref": ref_of(source),
            "detail": "object",
            "what_to_do": f"`manage.py settle_credential_conflict --source {source.pk} --keep ref --tenant tenant-a`, "
            "or --keep plaintext",
        }
    ]
    assert line(outcome).startswith("1 source, 1 ref, 0 jobs looked at in T s. 1 finding: 1 plaintext_differs. ")
    assert "canary" not in outcome.out + outcome.err


def test_only_some_are_shown_and_all_are_counted(run: Run) -> None:
    for _ in range(23):
        SourceFactory.create(credentials="made-up")
    outcome = run(VERIFY)
    assert "unsupported: credentials that are no object, which nobody has acknowledged (23)" in outcome.out
    assert outcome.out.count("--wrap KEY`") == 20
    assert "\n  and 3 more: --format json lists up to 1,000 of a class\n" in outcome.out
    assert len(run(VERIFY, "--format", "json").json["findings"]) == 23


@pytest.mark.parametrize("what", FindingClass)
def test_each_class_says_what_to_do(what: FindingClass) -> None:
    todo = what_to_do(Finding(what, "tenant-a", SOURCE), lambda call: f"`manage.py {call}`")
    assert todo
    assert "None" not in todo
    assert str(what.label)


def test_some_classes_alone_and_some_left_out(run: Run) -> None:
    SourceFactory.create(credentials="made-up", other={"api_key": "canary"})
    assert run(VERIFY, "--format", "json").json["counts"] == {"metadata": 1, "unsupported": 1}
    assert run(VERIFY, "--skip", "metadata", "--format", "json").json["counts"] == {"unsupported": 1}
    assert run(VERIFY, "--only", "metadata", "--format", "json").json["counts"] == {"metadata": 1}
    outcome = run(VERIFY, "--skip", "metadata", "--skip", "unsupported")
    assert (outcome.code, line(outcome)[-18:]) == (0, "Nothing was found.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "object_missing"], "object_missing is about the objects in the store: give --deep too."),
        (["--sample", 3], "--sample is about the objects in the store: give --deep too."),
        (["--rate", 3], "--rate is about the objects in the store: give --deep too."),
        (["--erase-unknown"], "--erase-unknown is about the objects in the store: give --deep too."),
        (["--deep", "--sample", 3, "--resume"], "A sample is read in one go: leave out --resume and --restart"),
        (["--deep", "--resume"], "No deep run was cut short: leave out --resume, and one begins from the start."),
        (["--deep", "--erase-unknown", "--tenant", "tenant-a"], "Whose an object without a ledger row is cannot be"),
        (["--scrub-same"], "This removes credentials in clear from the metadata of sources that have a ref"),
        (["--deep", "--erase-unknown"], "This erases objects for good that no row of this database's ledger accounts"),
    ],
    ids=str,
)
def test_wrong_use(run: Run, arguments: list[object], message: str) -> None:
    SpaceFactory.create()
    outcome = run(VERIFY, *arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"CommandError: {message}")


def test_a_question_that_nobody_can_answer_names_the_way_out(run: Run) -> None:
    outcome = run(VERIFY, "--scrub-same")
    assert outcome.err.endswith("Nobody can be asked here: give --yes if that is right. Nothing was changed.\n")


def test_a_deletion_that_the_next_sweep_sees(run: Run) -> None:
    """The cleanup runs: a check by cron stays green."""
    make_source()
    assert run("run_secret_cleanup", "--due").code == 0
    Source.objects.all().delete()
    outcome = run(VERIFY)
    assert outcome.code == 0
    assert (
        "1 ref that no source names any more, and that the cleanup's next sweep retires: no finding, while sweeps are "
        "made.\n"
    ) in outcome.out
    assert run(VERIFY, "--format", "json").json["unswept"] == 1
    in_database("UPDATE kfs_credentials_round SET covers_until = now() - interval '3 days'")
    assert run(VERIFY).code == 3
    assert run("run_secret_cleanup", "--due").code == 0
    outcome = run(VERIFY)
    assert (outcome.code, "next sweep" in outcome.out) == (0, False)


def test_scrub_what_is_the_same(run: Run) -> None:
    same, differs = beside(SAME), beside('{"credentials": {"token": "other"}}')
    outcome = run(VERIFY)
    assert "-> `manage.py verify_credentials --scrub-same`" in outcome.out
    outcome = run(VERIFY, "--scrub-same", "--yes")
    assert outcome.code == 3
    assert line(outcome).startswith("2 sources, 2 refs, 0 jobs looked at, 1 scrubbed in T s. 1 finding: ")
    assert "credentials" not in Source.objects.get(pk=same.pk).metadata
    assert "credentials" in Source.objects.get(pk=differs.pk).metadata
    assert Event.objects.get(kind="scrubbed").actor != "application"


def test_three_corrupt_objects(run: Run, store: EncryptedStore, secrets_directory: Path) -> None:
    sources = [make_source() for _ in range(12)]
    bad = sorted(str(source.pk) for source in sources[:3])
    for source in sources[:3]:
        (secrets_directory / object_name(ref_of(source), prefix=store.prefix)).write_bytes(b"{")
    outcome = run(VERIFY, "--deep", "--format", "json")
    assert outcome.code == 3
    assert outcome.json["counts"] == {"object_damaged": 3}
    assert sorted(one["source"] for one in outcome.json["findings"]) == bad
    assert "restore this object from a backup of the store" in outcome.json["findings"][0]["what_to_do"]


def test_unknown_objects(run: Run, store: EncryptedStore, secrets_directory: Path) -> None:
    ref = new_ref()
    store.put(Scope("tenant-a", SOURCE, SOURCE), ref, {"token": "made-up"})
    name = object_name(ref, prefix=store.prefix)
    outcome = run(VERIFY, "--deep")
    assert outcome.code == 3
    assert f"default: {name}  -> find out whose it is (another database that uses this store?)" in outcome.out
    outcome = run(VERIFY, "--deep", "--erase-unknown", "--yes")
    assert outcome.code == 3
    assert "(not erased: younger than ERASE_GRACE)" in outcome.out
    os.utime(secrets_directory / name, (0, 0))
    outcome = run(VERIFY, "--deep", "--erase-unknown", "--yes")
    assert outcome.code == 0
    assert ", 0 objects read and 1 listed, 1 unknown object erased in T s. Nothing was found." in line(outcome)


# A run that does not come to its end: OP-03.


def batches(monkeypatch: pytest.MonkeyPatch, error: Exception | type[BaseException]) -> None:
    """Let the second batch of a deep run end like that, each time it is tried."""
    monkeypatch.setattr(deep, "AT_A_TIME", 1)
    monkeypatch.setattr(deep, "pause_before_try", lambda _: 0.0)
    real, calls = EncryptedStore._get_many, [0]

    def get_many(self: EncryptedStore, addresses: Sequence[Any], **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            return real(self, addresses, **options)
        raise error

    def check(self: EncryptedStore) -> None:
        if calls[0] > 1:
            raise error

    monkeypatch.setattr(EncryptedStore, "_get_many", get_many)
    monkeypatch.setattr(EncryptedStore, "_check", check)


@pytest.mark.parametrize(
    ("error", "code", "problem"),
    [
        (StoreUnavailable("no answer"), 5, "the secret store is out of reach: no answer"),
        (StoreDenied("not allowed"), 1, "not allowed"),
        (KeyboardInterrupt, 4, "interrupted"),
    ],
)
def test_a_deep_run_that_is_cut_short(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Any, code: int, problem: str
) -> None:
    for _ in range(3):
        make_source()
    SourceFactory.create(credentials="made-up")
    with monkeypatch.context() as patch:
        batches(patch, error)
        outcome = run(VERIFY, "--deep")
    assert outcome.code == code
    assert line(outcome) == (
        f"4 sources, 3 refs, 0 jobs looked at, 1 object read and 0 listed in T s. Not finished: {problem}. "
        "1 finding: 1 unsupported. `manage.py verify_credentials --deep` goes on where it was."
    )
    outcome = run(VERIFY, "--deep")
    assert re.match(
        r"Goes on with the deep run of \d{4}-\d\d-\d\d \d\d:\d\d UTC, after 1 objects; --restart begins anew\.\n",
        outcome.err,
    )
    assert ", 3 objects read and 3 listed in T s." in line(outcome)


def test_resume_and_restart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        make_source()
    for option, resumed in (("--resume", True), ("--restart", False)):
        with monkeypatch.context() as patch:
            batches(patch, KeyboardInterrupt)
            assert run(VERIFY, "--deep", option if option == "--restart" else "-v1").code == 4
        outcome = run(VERIFY, "--deep", option, "--format", "json")
        assert (outcome.code, outcome.json["resumed"]) == (0, resumed)
        assert outcome.json["looked_at"]["objects_read"] == 3


def test_a_run_that_looked_for_something_else_is_not_taken_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        make_source()
    with monkeypatch.context() as patch:
        batches(patch, KeyboardInterrupt)
        assert run(VERIFY, "--deep", "--only", "object_missing").code == 4
    outcome = run(VERIFY, "--deep", "--resume")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "CommandError: The deep run that was cut short looked for object_missing: give it the same --only or --skip, "
        "or leave out --resume, and one begins from the start.\n"
    )
    assert run(VERIFY, "--deep", "--only", "metadata").code == 0  # which reads no objects, and leaves it as it is
    outcome = run(VERIFY, "--deep")
    assert outcome.code == 0
    assert re.match(
        r"Begins anew: the deep run of \d{4}-\d\d-\d\d \d\d:\d\d UTC, which was cut short after 1 objects, looked for "
        r"other classes\.\n",
        outcome.err,
    )
    assert ", 3 objects read and 3 listed in T s." in line(outcome)


def test_nothing_is_erased_while_the_workers_are_paused(run: Run, secrets_directory: Path) -> None:
    make_source()
    run("pause_credential_workers", "--reason", "a restore is under way")
    outcome = run(VERIFY, "--deep", "--erase-unknown", "--yes")
    assert outcome.code == 4
    assert "Not finished: nothing is erased while the workers are paused by " in line(outcome)
    assert ": a restore is under way. " in line(outcome)
    assert run(VERIFY, "--deep").code == 0


def test_a_store_that_is_not_there(run: Run, secrets_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_source()
    away = secrets_directory.with_name("elsewhere")
    secrets_directory.rename(away)
    outcome = run(VERIFY, "--deep")
    assert (outcome.code, outcome.out) == (1, "")
    assert "the directory for secrets does not exist" in outcome.err
    away.rename(secrets_directory)


@pytest.mark.parametrize(
    ("error", "code", "problem"),
    [
        (StoreUnavailable("no answer"), 5, "the secret store is out of reach: no answer"),
        (StoreDenied("not allowed"), 1, "not allowed"),
    ],
    ids=["unavailable", "denied"],
)
def test_a_store_that_cannot_be_asked_makes_no_conflict_of_a_source(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, problem: str
) -> None:
    """Without --deep, the store is needed only where something lies in clear beside a ref."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(EncryptedStore, "_get_many", fail)
    make_source()
    assert run(VERIFY).code == 0
    beside(SAME)
    outcome = run(VERIFY, "--format", "json")
    assert (outcome.code, outcome.json["counts"], outcome.json["finished"]) == (code, {}, False)
    assert line(outcome).endswith(f"Not finished: {problem}. It is safe to run `manage.py verify_credentials` again.")


def test_a_connection_that_is_lost_is_made_anew(run: Run, admin: Admin) -> None:
    source = make_source()
    from tests.verification.looks import before_statement

    def cut() -> None:
        admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )

    with before_statement("what is active has its source", 1, cut):
        outcome = run(VERIFY)
    assert outcome.code == 0
    assert scope_of(source)


def test_no_value_is_in_any_output_or_log(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """As loud as it gets: every statement is logged, with its parameters."""
    canary = {"token": "canary"}
    make_source(secret=canary)
    same, other, third = (beside('{"credentials": {"token": "canary"}, "api_key": "canary"}') for _ in range(3))
    wrapped = SourceFactory.create(credentials="canary")
    loud = ["-v", 3, "--traceback"]
    outcomes = []
    for logger in ("", "django.db.backends", "kfs_credentials"):
        caplog.set_level("DEBUG", logger=logger)
    connection.force_debug_cursor = True
    try:
        for arguments in (
            [VERIFY, "--deep", "--scrub-same", "--yes"],
            [VERIFY, "--format", "json"],
            ["settle_credential_conflict", "--source", same.pk, "--keep", "ref", "--yes"],
            ["settle_credential_conflict", "--source", other.pk, "--keep", "plaintext", "--yes"],
            ["settle_unsupported_credentials", wrapped.pk, "--wrap", "token"],
        ):
            outcome = run(*arguments, *loud)
            outcomes.append(outcome)
    finally:
        connection.force_debug_cursor = False
    assert [outcome.code for outcome in outcomes] == [3, 3, 0, 0, 0]
    logged = "".join(f"{record.getMessage()}{record.__dict__}" for record in caplog.records)
    assert "removes what lies in clear" in logged.lower()
    assert "canary" not in logged + "".join(outcome.out + outcome.err for outcome in outcomes)
    assert third.pk


def test_old_plaintext_is_information(run: Run) -> None:
    JobFactory.create(source=make_source(), succeeded=True)
    outcome = run(VERIFY)
    assert outcome.code == 0
    assert "Old plaintext in sources (" in outcome.out
    assert "\n  VACUUM (FULL, ANALYZE) sources;  -- locks the table for as long as it takes" in outcome.out
    assert run(VERIFY, "--format", "json").json["old_plaintext"]["statements"][0] == "VACUUM (FULL, ANALYZE) sources;"
    in_database("VACUUM (FULL) sources")
    outcome = run(VERIFY)
    assert ": rewritten since " in outcome.out
    assert "VACUUM" not in outcome.out
