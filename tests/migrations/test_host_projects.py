"""What a host project sees of our migrations: no new ones, no warnings, readable SQL."""

from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from kfs_credentials import sql

from .catalog import catalog
from .conftest import CatalogOf, MakeHost
from .hosts import BASE, MIGRATIONS, OURS, SEED, STARTS, Host, manage, server

PEOPLE = "tests.migrations.host_project.people"
APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "kfs_credentials",
]


@pytest.mark.parametrize(
    "settings",
    [
        {"DEFAULT_AUTO_FIELD": "django.db.models.AutoField"},
        {"DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField", "USE_TZ": False, "LANGUAGE_CODE": "de"},
        {"DEFAULT_AUTO_FIELD": f"{PEOPLE}.fields.RandomKey"},
        {"AUTH_USER_MODEL": "people.Person", "INSTALLED_APPS": [*APPS, PEOPLE]},
    ],
    ids=["AutoField", "BigAutoField", "a field of the project's", "a user model of the project's"],
)
def test_no_project_gets_new_migrations(host: Host, tmp_path: Path, settings: dict[str, Any]) -> None:
    """SM-05."""
    result = manage(
        *("makemigrations", "--check", "--dry-run", "kfs_credentials"),
        directory=tmp_path,
        settings={"DATABASES": {"default": server(host)}, **settings},
        python=["-W", "error"],
    )
    assert (result.returncode, result.stdout) == (0, "No changes detected in app 'kfs_credentials'\n"), result.stderr


def test_forward_back_and_forward_without_a_warning(host: Host, catalog_of: CatalogOf, tmp_path: Path) -> None:
    """SM-06: a deprecation warning of today is an error in the next Django."""
    settings = {"DATABASES": {"default": server(host)}}
    for arguments in (["migrate"], ["migrate", "kfs_credentials", "zero"], ["migrate", "kfs_credentials"]):
        result = manage(*arguments, directory=tmp_path, settings=settings, python=["-W", "error"])
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
    assert host.recorded() == MIGRATIONS
    made = catalog(host)
    for kind, objects in catalog_of(BASE, SEED, OURS).items():
        assert objects.items() <= made[kind].items()  # beside those of Django's own apps


def test_the_refusal_as_an_operator_sees_it(make_host: MakeHost, tmp_path: Path) -> None:
    host = make_host(*STARTS["seeded"], "DELETE FROM sources WHERE version = 7")
    settings = {"DATABASES": {"default": server(host)}}
    result = manage("migrate", "kfs_credentials", directory=tmp_path, settings=settings)
    assert result.returncode == 1
    assert (
        "active source secret lifecycle row is orphaned or does not match its source: "
        "1 ref(s) (1 whose source is gone)\n"
        "HINT:  Set these ledger rows to retired, or repair their sources, then migrate again; "
        "nothing was recorded.\n"
    ) in result.stderr
    assert "source-secret:" not in result.stderr + result.stdout


@pytest.mark.parametrize("migration", MIGRATIONS)
def test_sqlmigrate_prints_the_file(host: Host, capsys: pytest.CaptureFixture[str], migration: str) -> None:
    call_command("sqlmigrate", "kfs_credentials", migration, database=host.alias)
    printed = capsys.readouterr().out
    assert sql.read(f"schema/{migration}").strip() in printed
    assert f"-- Run SQL file {migration}.sql" in printed


@pytest.mark.parametrize("start", STARTS)
def test_what_sqlmigrate_prints_can_be_run_by_hand(
    make_host: MakeHost, capsys: pytest.CaptureFixture[str], start: str
) -> None:
    """Then a DBA runs it, and `migrate --fake` records it."""
    by_hand = make_host(*STARTS[start])
    for migration in MIGRATIONS:
        call_command("sqlmigrate", "kfs_credentials", migration, database=by_hand.alias)
        by_hand.run(capsys.readouterr().out)
    by_hand.migrate(fake=True)
    by_migrate = make_host(*STARTS[start], alias="migrated")
    by_migrate.migrate()
    assert catalog(by_hand) == catalog(by_migrate)


@pytest.mark.parametrize("migration", ["0002_source_indexes", "0004_own_tables", "0006_erasure", "0007_operations"])
def test_sqlmigrate_prints_the_way_back(host: Host, capsys: pytest.CaptureFixture[str], migration: str) -> None:
    host.migrate()
    call_command("sqlmigrate", "kfs_credentials", migration, backwards=True, database=host.alias)
    assert sql.read(f"schema/{migration}.reverse").strip() in capsys.readouterr().out


def test_the_plan_names_the_files(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("migrate", "kfs_credentials", database=host.alias, plan=True)
    planned = capsys.readouterr().out
    for migration in MIGRATIONS:
        assert f"Run SQL file {migration}.sql" in planned
