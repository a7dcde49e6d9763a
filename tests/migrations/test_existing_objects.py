"""Tables and indexes that are there already: adopted if they are the seed's, refused if not."""

import re

import pytest
from django.db import DatabaseError, OperationalError

from .catalog import catalog
from .conftest import CatalogOf, MakeHost
from .hosts import BASE, LEGACY_ROWS, LIVE_REFS, MIGRATIONS, OURS, SEED, STARTS, Host, refusal

# Without its last statement, the guard: what there is to be adopted.
SEEDS_OBJECTS = SEED[: SEED.index("-- Rolling upgrades may replay")]


class TestIndexes:
    @pytest.mark.parametrize("table", ["sources", "source_credential_backfills", "source_secret_lifecycle_refs"])
    def test_an_invalid_index_is_noticed(self, make_host: MakeHost, table: str) -> None:
        """SM-03, for every index of the seed on this table: its CREATE INDEX CONCURRENTLY is interrupted."""
        host = make_host(*STARTS["seeded"], OURS.split(";")[0])
        indexes = dict(
            host.rows(
                "SELECT indexname, indexdef FROM pg_indexes "
                "WHERE tablename = %s AND indexname !~ '(_pkey|_status_idx)$'",
                [table],
            )
        )
        assert len(indexes) >= 4
        for index, definition in indexes.items():
            host.run(f"DROP INDEX {index} CASCADE")  # a foreign key may need it
            interrupt_build(host, table, definition)

            hint = refused(host, f"index {index} on {table} is INVALID: its build was interrupted")
            assert hint == f"Run DROP INDEX CONCURRENTLY {index}; then migrate again."
            assert index not in {name for (name,) in host.rows(VALID)}

            host.run(hint.removeprefix("Run ").partition(";")[0])
            host.run(definition)
        host.migrate()
        assert host.recorded() == MIGRATIONS

    def test_an_invalid_unique_index_over_values_that_are_not(self, make_host: MakeHost) -> None:
        host = make_host(BASE, LEGACY_ROWS, "ALTER TABLE sources ADD credential_ref TEXT")
        host.run("UPDATE sources SET credential_ref = 'source-secret:v1:' || (version = 1)")
        with pytest.raises(DatabaseError):
            host.run(
                "CREATE UNIQUE INDEX CONCURRENTLY sources_credential_ref_uq ON sources (credential_ref) "
                "WHERE credential_ref IS NOT NULL"
            )
        refused(host, "index sources_credential_ref_uq on sources is INVALID: its build was interrupted")
        host.run("DROP INDEX CONCURRENTLY sources_credential_ref_uq")

        # Now the migration would build it, and cannot. It says how many, and not which values.
        index = "index sources_credential_ref_uq on sources"
        message = f"{index} cannot be built: 2 value(s) of (credential_ref) occur more than once"
        assert refused(host, message) == "Repair these rows, then migrate again."
        host.run("UPDATE sources SET credential_ref = NULL")
        host.migrate()
        assert host.recorded() == MIGRATIONS

    @pytest.mark.parametrize(
        ("index", "table", "columns"),
        [
            (
                "source_credential_backfills_candidate_ref_uq",
                "source_credential_backfills",
                "candidate_credential_ref",
            ),
            ("source_secret_lifecycle_refs_ref_uq", "source_secret_lifecycle_refs", "credential_ref"),
        ],
    )
    def test_values_that_are_not_unique(self, make_host: MakeHost, index: str, table: str, columns: str) -> None:
        host = make_host(BASE, LEGACY_ROWS, SEEDS_OBJECTS, LIVE_REFS, f"DROP INDEX {index}")
        host.run(f"UPDATE {table} SET {columns} = (SELECT min({columns}) FROM {table})")
        message = f"index {index} on {table} cannot be built: 1 value(s) of ({columns}) occur more than once"
        assert refused(host, message) == "Repair these rows, then migrate again."

    @pytest.mark.parametrize(
        ("table", "index", "other"),
        [
            ("sources", "sources_credential_ref_uq", "(credential_ref) WHERE credential_ref IS NOT NULL"),
            ("sources", "sources_space_id_uq", "(knowledge_space_id, id)"),
            (
                "source_credential_backfills",
                "source_credential_backfills_source_uq",
                "(tenant_id, knowledge_space_id, source_id)",
            ),
            (
                "source_credential_backfills",
                "source_credential_backfills_candidate_ref_uq",
                "(candidate_credential_ref)",
            ),
            ("source_secret_lifecycle_refs", "source_secret_lifecycle_refs_ref_uq", "(credential_ref)"),
        ],
    )
    def test_an_index_that_should_be_unique(self, make_host: MakeHost, table: str, index: str, other: str) -> None:
        host = make_host(*STARTS["seeded"], f"DROP INDEX {index} CASCADE", f"CREATE INDEX {index} ON {table} {other}")
        hint = refused(host, f"index {index} on {table} is not the one that kfs_credentials knows")
        assert hint == "Rename or drop it, then migrate again."
        host.run(f"ALTER INDEX {index} RENAME TO another_idx")
        host.migrate()
        assert host.value("SELECT indisunique FROM pg_index WHERE indexrelid = %s::regclass", [index])

    @pytest.mark.parametrize(
        ("index", "other"),
        [
            ("sources_space_id_uq", "UNIQUE INDEX {} ON sources (id, knowledge_space_id)"),
            (
                "sources_credential_ref_uq",
                "UNIQUE INDEX {} ON sources (credential_ref) WHERE status = 'active'",
            ),
            ("kfs_credentials_legacy_idx", "INDEX {} ON sources (id) WHERE metadata ? 'credentials'"),
            ("source_secret_lifecycle_refs_claim_idx", "INDEX {} ON source_secret_lifecycle_refs (state)"),
            (
                "source_secret_lifecycle_refs_ref_uq",
                "UNIQUE INDEX {} ON source_secret_lifecycle_refs (credential_ref) WHERE state = 'active'",
            ),
        ],
    )
    def test_an_index_on_something_else(self, make_host: MakeHost, index: str, other: str) -> None:
        host = make_host(*STARTS["seeded"], f"DROP INDEX IF EXISTS {index} CASCADE", f"CREATE {other.format(index)}")
        table = host.value("SELECT tablename FROM pg_indexes WHERE indexname = %s", [index])
        refused(host, f"index {index} on {table} is not the one that kfs_credentials knows")

    def test_what_makes_no_difference_is_not_compared(self, make_host: MakeHost) -> None:
        host = make_host(*STARTS["seeded"], "DROP INDEX sources_space_id_uq, sources_credential_ref_uq CASCADE")
        host.run(
            "CREATE UNIQUE INDEX sources_space_id_uq ON sources (knowledge_space_id, id DESC) INCLUDE (name)",
            "CREATE UNIQUE INDEX sources_credential_ref_uq ON sources (credential_ref) "
            "WITH (fillfactor = 70) WHERE credential_ref IS NOT NULL",
        )
        before = host.rows("SELECT indexdef FROM pg_indexes WHERE tablename = 'sources' ORDER BY indexname")
        host.migrate()
        after = host.rows("SELECT indexdef FROM pg_indexes WHERE tablename = 'sources' ORDER BY indexname")
        assert set(before) < set(after)


VALID = "SELECT indexrelid::regclass::text FROM pg_index WHERE indisvalid"


def interrupt_build(host: Host, table: str, definition: str) -> None:
    """Build an index concurrently beside an open writer, which it waits for in vain: it stays INVALID."""
    with host.session() as writer:
        writer.execute(f"LOCK TABLE {table} IN ROW EXCLUSIVE MODE")
        host.run("SET lock_timeout = '50ms'")
        with pytest.raises(OperationalError, match="lock timeout"):
            host.run(re.sub(" INDEX ", " INDEX CONCURRENTLY ", definition))
        host.run("SET lock_timeout = 0")


def refused(host: Host, message: str) -> str:
    """Expect that `migrate` refuses with this message, and changes nothing; return its hint."""
    before, recorded = catalog(host), host.recorded()
    error, hint = refusal(host)
    assert error == message
    assert "0005_register_refs" not in host.recorded()
    # What a migration before the refusing one did is its own, whole and recorded.
    if host.recorded() == recorded:
        assert catalog(host) == before
    return hint


class TestTables:
    @pytest.mark.parametrize(
        ("change", "differences"),
        [
            (
                "ALTER TABLE sources ALTER metadata TYPE json, ALTER permission_scope TYPE text",
                "sources.metadata is json, not jsonb; sources.permission_scope is text, not jsonb",
            ),
            (
                "ALTER TABLE sources DROP uri, DROP name",
                "sources.name (text) is missing; sources.uri (text) is missing",
            ),
            ("ALTER TABLE sources ALTER version TYPE bigint", "sources.version is bigint, not integer"),
            (
                "ALTER TABLE sources ALTER created_at TYPE timestamp",
                "sources.created_at is timestamp without time zone, not timestamp with time zone",
            ),
            ("ALTER TABLE sources ADD credential_ref UUID", "sources.credential_ref is uuid, not text"),
            (
                "ALTER TABLE knowledge_spaces DROP description",
                "knowledge_spaces.description (text) is missing",
            ),
            (
                "DROP TABLE knowledge_spaces CASCADE; ALTER TABLE sources ALTER knowledge_space_id TYPE text",
                "sources.knowledge_space_id is text, not uuid",
            ),
        ],
    )
    def test_other_base_tables(self, make_host: MakeHost, change: str, differences: str) -> None:
        host = make_host(*STARTS["base"], change)
        hint = refused(
            host,
            f"the tables knowledge_spaces and sources are not the ones that kfs_credentials knows: {differences}",
        )
        expected = "Add or convert these columns, or put the tables of knowledge-fs first on the search_path."
        assert hint == expected
        assert host.recorded() == []

    def test_a_table_of_another_application(self, make_host: MakeHost) -> None:
        host = make_host("CREATE TABLE sources (id serial PRIMARY KEY, url text, metadata json)")
        error, _ = refusal(host)
        assert error.endswith(
            "sources.created_at (timestamp with time zone) is missing; sources.id is integer, not uuid; "
            "sources.knowledge_space_id (uuid) is missing; sources.metadata is json, not jsonb; "
            "sources.name (text) is missing; sources.permission_scope (jsonb) is missing; "
            "sources.status (text) is missing; sources.type (text) is missing; "
            "sources.updated_at (timestamp with time zone) is missing; sources.uri (text) is missing; "
            "sources.version (integer) is missing"
        )
        assert host.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1") == [
            ("django_migrations",),
            ("sources",),
        ]

    @pytest.mark.parametrize(
        ("change", "differences"),
        [
            (
                "ALTER TABLE source_secret_lifecycle_refs DROP deleted_at CASCADE",
                "source_secret_lifecycle_refs.deleted_at (timestamp with time zone) is missing",
            ),
            (
                "ALTER TABLE source_secret_lifecycle_refs ALTER credential_ref TYPE uuid USING id",
                "source_secret_lifecycle_refs.credential_ref is uuid, not text",
            ),
            (
                "ALTER TABLE source_credential_backfills ALTER secret_fingerprint TYPE text, DROP worker_id",
                (
                    "source_credential_backfills.secret_fingerprint is text, not character; "
                    "source_credential_backfills.worker_id (text) is missing"
                ),
            ),
        ],
    )
    def test_other_tables_of_the_ledger(self, make_host: MakeHost, change: str, differences: str) -> None:
        host = make_host(*STARTS["seeded"], change)
        hint = refused(host, f"the tables of the ledger are not the ones that kfs_credentials knows: {differences}")
        assert hint == "Add or convert these columns, or rename these tables, then migrate again."
        assert host.recorded() == MIGRATIONS[:2]

    def test_varchar_is_text(self, make_host: MakeHost) -> None:
        host = make_host(*STARTS["seeded"])
        host.run(
            "ALTER TABLE sources ALTER name TYPE varchar(500), ALTER status TYPE varchar",
            "ALTER TABLE source_secret_lifecycle_refs ALTER tenant_id TYPE varchar(255)",
        )
        host.migrate()
        assert host.recorded() == MIGRATIONS

    def test_parts_that_are_missing_are_added(self, make_host: MakeHost, catalog_of: CatalogOf) -> None:
        host = make_host(*STARTS["base"], SEEDS_OBJECTS, "DROP TABLE source_secret_lifecycle_refs")
        host.run("DROP INDEX sources_space_id_uq CASCADE", "DROP TABLE source_credential_backfills")
        host.migrate()
        assert catalog(host) == catalog_of(BASE, SEED, OURS)
