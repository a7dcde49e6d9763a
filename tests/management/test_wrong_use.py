"""What a user can get wrong, and what every command then says."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.db.migrations.recorder import MigrationRecorder
from pytest_django import DjangoDbBlocker

from kfs_credentials.management.options import EXIT_CODES, printable
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import Admin, Run
from tests.management.rows import JobFactory, RefFactory
from tests.migrations.hosts import MIGRATIONS

WORK = [
    ["credential_status"],
    ["run_credential_backfill"],
    ["run_secret_cleanup"],
    ["retry_credential_backfill", "--all"],
    ["settle_unsupported_credentials", "--all"],
    ["verify_credentials"],
]
ALL = [*WORK, ["settle_credential_conflict"], ["generate_secret_key"], ["demo"]]

work = pytest.mark.parametrize("command", WORK, ids=lambda command: command[0])


@pytest.mark.parametrize("command", [command[0] for command in ALL])
def test_the_help_teaches(run: Run, command: str) -> None:
    outcome = run(command, "--help")
    assert outcome.code == 0
    assert f"\nexamples:\n  manage.py {command}" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 110


@pytest.mark.parametrize("command", [command[0] for command in WORK])
def test_the_help_puts_the_commands_own_options_first(run: Run, command: str) -> None:
    out = run(command, "--help").out
    assert EXIT_CODES in out
    assert out.index("\n  --database") < out.index("\n  --version")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["credential_status", "--space", "abc"], "argument --space: 'abc' is not a UUID"),
        (["credential_status", "--format", "xml"], "argument --format: invalid choice: 'xml'"),
        (["credential_status", "--database", "nowhere"], "argument --database: invalid choice: 'nowhere'"),
        (["run_credential_backfill", "--limit", "0"], "argument --limit: '0' is not a whole number of 1 or more"),
        (["run_credential_backfill", "--threads", "x"], "argument --threads: 'x' is not a whole number of 1 or more"),
        (["run_credential_backfill", "--batch-size", "-1"], "argument --batch-size: '-1' is not a whole number"),
        (["run_credential_backfill", "--attempts", "1.5"], "argument --attempts: '1.5' is not a whole number"),
        (["run_credential_backfill", "--lease", "0"], "argument --lease: '0' is not a number of seconds above 0"),
        (["run_credential_backfill", "--lease", "inf"], "argument --lease: 'inf' is not a number of seconds above 0"),
        (["run_credential_backfill", "--lease", "1m"], "argument --lease: '1m' is not a number of seconds above 0"),
        (["run_secret_cleanup", "--limit", "0"], "argument --limit: '0' is not a whole number of 1 or more"),
        (["run_secret_cleanup", "--lease", "0"], "argument --lease: '0' is not a number of seconds above 0"),
        (["run_secret_cleanup", "--attempts", "3"], "unrecognized arguments: --attempts 3"),
        (["retry_credential_backfill", "7"], "argument ID: '7' is not a UUID"),
        (["settle_unsupported_credentials", "a\nb"], r"argument SOURCE: 'a\nb' is not a UUID"),
        (["settle_unsupported_credentials", "--shape", "round"], "argument --shape: invalid choice: 'round'"),
        (["verify_credentials", "--rate", "0"], "argument --rate: '0' is not a number above 0"),
        (["verify_credentials", "--sample", "0"], "argument --sample: '0' is not a whole number of 1 or more"),
        (["verify_credentials", "--only", "everything"], "argument --only: invalid choice: 'everything'"),
        (["verify_credentials", "--only", "metadata", "--skip", "metadata"], "argument --skip: not allowed with"),
        (["settle_credential_conflict", "--keep", "ref"], "the following arguments are required: --source"),
        (["settle_credential_conflict", "--keep", "both"], "argument --keep: invalid choice: 'both'"),
        (["demo", "--number", "0"], "argument --number: '0' is not a whole number of 1 or more"),
    ],
    ids=" ".join,
)
def test_a_wrong_option(run: Run, arguments: list[str], message: str) -> None:
    outcome = run(*arguments)
    assert outcome.code == 1
    assert f"error: {message}" in outcome.err
    assert outcome.err.startswith("usage: ")
    assert outcome.out == ""


@pytest.mark.django_db(transaction=True)
@work
def test_a_database_that_is_not_migrated(run: Run, secrets_directory: Path, command: list[str]) -> None:
    recorder = MigrationRecorder(connection)
    recorder.record_unapplied("kfs_credentials", MIGRATIONS[-1])
    try:
        outcome = run(*command)
    finally:
        recorder.record_applied("kfs_credentials", MIGRATIONS[-1])
    assert outcome.code == 1
    assert outcome.err == (
        "CommandError: The database 'default' is not migrated. Run `manage.py migrate kfs_credentials` first.\n"
    )


@pytest.fixture
def limited_role(admin: Admin) -> Iterator[str]:
    """A role that is no superuser, which the commands' session takes on as soon as it connects."""
    name = f"kfs_tests_{uuid.uuid4().hex}"  # roles belong to all databases of the server
    admin.execute(f"CREATE ROLE {name}")
    admin.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    connection.settings_dict["OPTIONS"] = {**options, "options": f"-c role={name}"}
    yield name
    connection.close()
    connection.settings_dict["OPTIONS"] = options
    admin.execute(f"DROP OWNED BY {name}")
    admin.execute(f"DROP ROLE {name}")


@work
def test_row_level_security(
    run: Run, secrets_directory: Path, admin: Admin, limited_role: str, command: list[str]
) -> None:
    admin.execute("ALTER TABLE sources ENABLE ROW LEVEL SECURITY")
    try:
        outcome = run(*command)
    finally:
        admin.execute("ALTER TABLE sources DISABLE ROW LEVEL SECURITY")
    assert outcome.code == 1
    assert outcome.err == (
        "CommandError: Row-level security hides rows of sources from this role, and a source that cannot be seen would "
        "be taken for one that was deleted. Use a role with BYPASSRLS.\n"
    )


@work
def test_a_role_that_may_not_read(
    run: Run, secrets_directory: Path, admin: Admin, limited_role: str, command: list[str]
) -> None:
    admin.execute(f"REVOKE ALL ON sources, source_credential_backfills FROM {limited_role}")
    outcome = run(*command)
    assert outcome.code == 1
    assert outcome.err.startswith("CommandError: ")
    assert "(InsufficientPrivilege, SQLSTATE 42501)" in outcome.err
    assert "role may read and write the tables" in outcome.err


@pytest.mark.django_db(transaction=True)
@work
def test_an_index_that_is_invalid(run: Run, secrets_directory: Path, command: list[str]) -> None:
    mark = "UPDATE pg_index SET indisvalid = %s WHERE indexrelid = 'sources_credential_ref_uq'::regclass"
    with connection.cursor() as cursor:
        cursor.execute(mark, [False])
    try:
        outcome = run(*command)
    finally:
        with connection.cursor() as cursor:
            cursor.execute(mark, [True])
    assert outcome.code == 1
    assert outcome.err == (
        "CommandError: INVALID indexes: sources_credential_ref_uq. An interrupted CREATE INDEX CONCURRENTLY left them "
        "behind, and an invalid unique index keeps nothing unique. DROP INDEX CONCURRENTLY, then build them again.\n"
    )


@pytest.fixture
def out_of_reach(transactional_db: None, tmp_path: Path) -> Iterator[None]:
    """No server where the settings say."""
    here = connection.settings_dict["HOST"]
    connection.close()
    connection.settings_dict["HOST"] = str(tmp_path)
    yield
    connection.settings_dict["HOST"] = here


@work
def test_a_database_out_of_reach(
    run: Run, secrets_directory: Path, tmp_path: Path, out_of_reach: None, command: list[str]
) -> None:
    outcome = run(*command)
    assert outcome.code == 5
    assert outcome.err.startswith("CommandError: The database 'default' is out of reach (connection ")
    assert "No such file or directory" in outcome.err
    assert outcome.err.endswith(
        "See that its server runs and that DATABASES['default'] is right, then run this again.\n"
    )
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


def test_a_database_that_is_not_postgresql(
    run: Run, secrets_directory: Path, tmp_path: Path, django_db_blocker: DjangoDbBlocker
) -> None:
    lite = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "lite")}
    connections.databases["lite"] = {**connections.databases["default"], **lite}
    try:
        with django_db_blocker.unblock():
            outcome = run("credential_status", "--database", "lite")
    finally:
        del connections["lite"], connections.databases["lite"]
    assert outcome.code == 1
    assert outcome.err == (
        "CommandError: DATABASES['lite'] is SQLite, and kfs_credentials needs PostgreSQL. Give another alias with "
        "--database, or correct DATABASES.\n"
    )


@pytest.mark.django_db(transaction=True)
@work
def test_a_tenant_or_space_that_is_not_there(run: Run, secrets_directory: Path, command: list[str]) -> None:
    source = SourceFactory.create(knowledge_space__tenant_id="Tenant A")
    space = source.knowledge_space_id
    others = SpaceFactory.create(tenant_id="tenant-b").pk
    message = "CommandError: The database 'default' has no {}. Tenants are compared as they are, case included.\n"
    nowhere = uuid.uuid4()
    for arguments, what in {
        ("--tenant", "tenant a"): "tenant 'tenant a'",
        ("--tenant", "x\x1b[2J"): r"tenant 'x\x1b[2J'",
        ("--space", nowhere): f"knowledge space {nowhere}",
        # One of somebody else looks like none.
        ("--tenant", "Tenant A", "--space", nowhere): f"knowledge space {nowhere} of tenant 'Tenant A'",
        ("--tenant", "Tenant A", "--space", others): f"knowledge space {others} of tenant 'Tenant A'",
    }.items():
        outcome = run(*command, *arguments)
        assert (outcome.code, outcome.out, outcome.err) == (1, "", message.format(what))
    assert run(*command, "--tenant", "Tenant A", "--space", space).code == 0


@pytest.mark.django_db(transaction=True)
def test_a_tenant_whose_refs_outlived_its_spaces(run: Run) -> None:
    job = JobFactory.create(source=SourceFactory.create(knowledge_space__tenant_id="tenant-gone"))
    RefFactory.create(job=job)
    job.source.knowledge_space.delete()
    outcome = run("credential_status", "--tenant", "tenant-gone", "--format", "json", "--skip-checks")
    assert outcome.code == 0
    assert outcome.json["ledger"]["retired"] == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [("Brücke 東京 🗼", "Brücke 東京 🗼"), ("a\nb", r"a\nb"), ("\x1b[31m", r"\x1b[31m"), ("a\u202eb", r"a\u202eb")],
)
def test_what_is_printed_of_text_from_outside(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_settings_that_cannot_be_read(run: Run, kfs_settings: Any, secrets_directory: Path) -> None:
    kfs_settings(LEASE="canary", BATCH_SIZ=1)
    outcome = run("run_credential_backfill")
    assert outcome.code == 1
    assert "KFS_CREDENTIALS['LEASE'] must be a number of seconds above 0, or a timedelta." in outcome.err
    assert "KFS_CREDENTIALS has no setting 'BATCH_SIZ'. Did you mean 'BATCH_SIZE'?" in outcome.err
    assert "canary" not in outcome.err
