"""Our migrations leave the catalog of the seed's own SQL, whichever way the database came to be."""

import pytest
from django.db import transaction

from .catalog import catalog
from .conftest import CatalogOf, MakeHost
from .hosts import BASE, LATER, OURS, SEED, STARTS


@pytest.mark.parametrize("start", ["empty", "base", "seeded"])
def test_the_catalog_is_the_seeds(make_host: MakeHost, catalog_of: CatalogOf, start: str) -> None:
    host = make_host(*STARTS[start])
    host.migrate()
    assert catalog(host) == catalog_of(BASE, SEED, OURS)


def test_the_catalog_keeps_what_later_versions_add(make_host: MakeHost, catalog_of: CatalogOf) -> None:
    host = make_host(*STARTS["later"])
    host.migrate()
    assert catalog(host) == catalog_of(BASE, SEED, LATER, OURS)


def test_later_versions_can_still_come_afterwards(make_host: MakeHost, catalog_of: CatalogOf) -> None:
    host = make_host()
    host.migrate()
    host.run(SEED, LATER)
    host.migrate()
    assert catalog(host) == catalog_of(BASE, SEED, LATER, OURS)


DIFFERENCES = [
    "ALTER TABLE sources ALTER uri TYPE varchar(255)",
    "ALTER TABLE sources ALTER version SET DEFAULT 1",
    "ALTER TABLE source_secret_lifecycle_refs ALTER delete_attempts DROP NOT NULL",
    "ALTER TABLE source_secret_lifecycle_refs DROP deleted_at",
    "ALTER TABLE source_secret_lifecycle_refs DROP CONSTRAINT source_secret_lifecycle_refs_counts_ck",
    "ALTER TABLE source_credential_backfills DROP CONSTRAINT source_credential_backfills_state_ck",
    "ALTER TABLE sources DROP CONSTRAINT sources_knowledge_space_id_fkey",
    "DROP INDEX source_secret_lifecycle_refs_claim_idx",
    "ALTER INDEX sources_space_id_uq RENAME TO sources_space_uq",
    "ALTER TABLE knowledge_spaces ADD COLUMN revision INTEGER",
    "CREATE TABLE kfs_credentials_more (id UUID)",
    "CREATE SEQUENCE kfs_credentials_more",
    "CREATE TRIGGER t BEFORE UPDATE ON sources EXECUTE FUNCTION suppress_redundant_updates_trigger()",
]


def test_the_comparison_sees_every_kind_of_difference(make_host: MakeHost, catalog_of: CatalogOf) -> None:
    host = make_host(BASE, SEED, OURS)
    for difference in DIFFERENCES:
        with transaction.atomic(using=host.alias):
            host.run(difference)
            assert catalog(host) != catalog_of(BASE, SEED, OURS), difference
            transaction.set_rollback(True, using=host.alias)
    assert catalog(host) == catalog_of(BASE, SEED, OURS)
