"""What Django would make of the models is compared with what the migrations made.

Differences that are meant, and the only ones:

- the order of the columns: PostgreSQL appends, and the columns of an abstract base come first in Django;
- foreign keys are in the database only: two of them are composite, which Django has no plain field for;
- a UniqueConstraint is a constraint in Django, unless it has a condition, and a unique index in the seed;
- Django gives a text primary key a second index for LIKE, which nothing of ours needs;
- the CHECKs are written differently, and accept the same rows.
"""

from collections.abc import Iterator
from itertools import product

import pytest
from django.apps import apps
from django.db.migrations.executor import MigrationExecutor
from pytest_django import DjangoDbBlocker

from .catalog import Catalog, catalog
from .hosts import Host, throw_away

MODELS = list(apps.get_app_config("kfs_credentials").get_models())


@pytest.fixture(scope="module")
def host(django_db_blocker: DjangoDbBlocker) -> Iterator[Host]:
    """A migrated database, and in the schema `modelled` what Django makes of the models."""
    with django_db_blocker.unblock(), throw_away("modelled") as host:
        host.migrate()
        host.run("CREATE SCHEMA modelled", "SET search_path = modelled")
        with host.connection.schema_editor() as editor:
            for model in MODELS:
                editor.create_model(model)
        host.run("RESET search_path")
        yield host


@pytest.fixture(scope="module")
def made(host: Host) -> Catalog:
    """The catalog that the migrations leave."""
    return catalog(host, "public")


@pytest.fixture(scope="module")
def modelled(host: Host) -> Catalog:
    """The catalog of what Django makes of the models."""
    return catalog(host, "modelled")


def test_every_table_is_a_model(made: Catalog, modelled: Catalog) -> None:
    assert set(made["relations"]) == set(modelled["relations"])


def test_the_columns_are_the_same(host: Host) -> None:
    query = """
        SELECT relname, attname, format_type(atttypid, atttypmod), attnotnull, atthasdef, attidentity
        FROM pg_attribute JOIN pg_class ON pg_class.oid = attrelid AND relkind = 'r' AND attnum > 0
        WHERE relnamespace = %s::regnamespace AND relname <> 'django_migrations'
        ORDER BY relname, attname
    """
    assert host.rows(query, ["modelled"]) == host.rows(query, ["public"])


def test_the_indexes_are_the_same(made: Catalog, modelled: Catalog) -> None:
    for_like = {names for names, row in modelled["indexes"].items() if "text_pattern_ops" in row}
    own = ("round", "secret_object", "binding", "closed_key", "tick", "checkpoint")
    assert {table for table, _ in for_like} == {f"kfs_credentials_{name}" for name in own}
    assert made["indexes"] == {
        names: row.replace(" ON modelled.", " ON public.")
        for names, row in modelled["indexes"].items()
        if names not in for_like
    }


def test_the_constraints_have_the_same_names(made: Catalog, modelled: Catalog) -> None:
    in_the_database_only = {names for names, row in made["constraints"].items() if row.startswith("(f,")}
    assert {name for _, name in in_the_database_only} == {
        "sources_knowledge_space_id_fkey",
        "source_credential_backfills_tenant_id_knowledge_space_id_fkey",
        "source_credential_backfills_knowledge_space_id_source_id_fkey",
    }
    unique = {names for names, row in modelled["constraints"].items() if row.startswith("(u,")}
    assert unique < set(made["indexes"])
    assert set(made["constraints"]) - in_the_database_only == set(modelled["constraints"]) - unique


# Values that the CHECKs tell apart, for each column that one of them mentions.
STATES = {
    "run_state": ["queued", "running", "succeeded", "failed", "unknown"],
    "state": ["staged", "candidate", "active", "retired", "deleting", "deleted", "unknown"],
    "purpose": ["create", "rotate", "backfill", "unknown"],
}
TELLING = {
    "text": [None, "worker"],
    "uuid": [None, "b0000000-0000-4000-8000-000000000001"],
    "timestamp with time zone": [None, "2025-01-02 03:04:05+00"],
    "integer": [None, "-1", "0", "1"],
    "smallint": [None, "-1", "0", "1"],
}
CHECKS = """
SELECT conname, pg_get_expr(conbin, conrelid), ARRAY(
  SELECT attname || ' ' || format_type(atttypid, NULL) FROM unnest(conkey) AS key
  JOIN pg_attribute ON attrelid = conrelid AND attnum = key ORDER BY attname
)
FROM pg_constraint WHERE contype = 'c' AND connamespace = %s::regnamespace
"""


def test_the_checks_accept_the_same_rows(host: Host) -> None:
    """Each pair of CHECKs is asked about every combination of the values that matter to it."""
    ours = {name: (expression, columns) for name, expression, columns in host.rows(CHECKS, ["modelled"])}
    of_the_seed = {name: (expression, columns) for name, expression, columns in host.rows(CHECKS, ["public"])}
    assert len(of_the_seed) == 12
    assert ours.keys() == of_the_seed.keys()
    for name, (expression, columns) in of_the_seed.items():
        assert ours[name][1] == columns, name
        names, types = zip(*(column.split(" ", 1) for column in columns), strict=True)
        domains = [STATES.get(column) or TELLING[kind] for column, kind in zip(names, types, strict=True)]
        combinations = list(product(*domains))
        arrays = ", ".join(f"%s::text[]::{kind}[]" for kind in types)
        accepted, differing = host.rows(
            f"""
            SELECT count(*) FILTER (WHERE {expression}),
              count(*) FILTER (WHERE ({expression}) IS DISTINCT FROM ({ours[name][0]}))
            FROM unnest({arrays}) AS tuple ({", ".join(names)})
            """,
            [list(values) for values in zip(*combinations, strict=True)],
        )[0]
        assert differing == 0, name
        assert 0 < accepted < len(combinations), name


def test_no_migration_is_missing(host: Host) -> None:
    executor = MigrationExecutor(host.connection)
    assert executor.migration_plan(executor.loader.graph.leaf_nodes("kfs_credentials")) == []
    state = executor.loader.project_state()
    assert {name for app, name in state.models if app == "kfs_credentials"} == {
        model._meta.model_name for model in MODELS
    }
