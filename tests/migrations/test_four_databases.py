"""`migrate` on each of the four databases that it meets. All of them are made by SQL, none by our models."""

from typing import Any

import pytest
from django.apps import apps

from .catalog import catalog
from .conftest import MakeHost
from .hosts import LEGACY_ROWS, MIGRATIONS, OWN_TABLES, SEED, SOURCE_COLUMNS, SPACE_COLUMNS, STARTS, Host

FILES = "SELECT oid, relfilenode FROM pg_class WHERE relname IN ('sources', 'knowledge_spaces')"


def registered(host: Host) -> list[tuple[Any, ...]]:
    """Return the ledger, column by column, wherever its rows lie."""
    return host.rows("SELECT * FROM source_secret_lifecycle_refs ORDER BY credential_ref")


def read_everything(host: Host) -> int:
    """Read every row through our models; return how many there are."""
    models = apps.get_app_config("kfs_credentials").get_models()
    return sum(len(list(model._base_manager.using(host.alias))) for model in models)


def test_an_empty_database_gets_everything(host: Host) -> None:
    host.migrate()
    assert host.recorded() == MIGRATIONS
    assert read_everything(host) == 0
    host.run(LEGACY_ROWS)
    assert read_everything(host) == 4 + 24


def test_base_tables_with_live_rows_are_adopted_in_place(make_host: MakeHost) -> None:
    host = make_host(*STARTS["base"])
    spaces = host.dump("knowledge_spaces")
    sources = host.dump("sources")
    files = host.rows(FILES)

    host.migrate()

    assert host.recorded() == MIGRATIONS
    assert host.dump("knowledge_spaces", SPACE_COLUMNS) == spaces
    assert host.dump("sources", SOURCE_COLUMNS) == sources
    assert host.rows(FILES) == files
    assert host.value("SELECT count(credential_ref) FROM sources") == 0
    assert registered(host) == []
    assert read_everything(host) == 4 + 24


@pytest.mark.parametrize(("start", "unregistered"), [("seeded", 3), ("later", 4)])
def test_live_refs_are_registered_as_by_the_seed(make_host: MakeHost, start: str, unregistered: int) -> None:
    host = make_host(*STARTS[start])
    twin = make_host(*STARTS[start], SEED, alias="twin")  # the seed's own replay is what should come out
    others = ["knowledge_spaces", "sources", "source_credential_backfills"]
    others += ["deletion_jobs"] if start == "later" else []
    before = {table: host.dump(table) for table in others}
    ledger = host.dump("source_secret_lifecycle_refs")

    host.migrate()

    assert host.recorded() == MIGRATIONS
    assert {table: host.dump(table) for table in others} == before
    after = host.dump("source_secret_lifecycle_refs")
    assert set(ledger) < set(after)
    assert len(after) == len(ledger) + unregistered
    assert registered(host) == registered(twin)
    assert read_everything(host) > len(after)


@pytest.mark.parametrize("start", STARTS)
def test_a_second_run_does_nothing(make_host: MakeHost, start: str) -> None:
    host = make_host(*STARTS[start])
    host.migrate()
    objects = catalog(host)
    tables = ["knowledge_spaces", "sources", "source_credential_backfills", "source_secret_lifecycle_refs"]
    before = {table: host.dump(table) for table in [*tables, "django_migrations"]}

    host.migrate()
    assert {table: host.dump(table) for table in [*tables, "django_migrations"]} == before

    # The record of migrations is lost: all but our own tables is there, and is not made again.
    host.run(f"DROP TABLE {', '.join(OWN_TABLES)}, django_migrations")
    host.migrate()
    assert {table: host.dump(table) for table in tables} == {table: before[table] for table in tables}
    assert catalog(host) == objects
