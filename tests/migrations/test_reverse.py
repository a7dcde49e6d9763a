"""Going back: refused while a secret would be forgotten; then ours goes, and the seed's stays (SM-10)."""

import pytest

from .catalog import catalog
from .conftest import CatalogOf, MakeHost
from .hosts import BASE, MIGRATIONS, OURS, SEED, STARTS, Host, refusal

ERASE_ALL = """
UPDATE sources SET credential_ref = NULL;
UPDATE source_secret_lifecycle_refs SET state = 'deleted', deleted_at = now(), worker_id = NULL,
  lease_token = NULL, lease_expires_at = NULL, heartbeat_at = NULL;
"""


ERASE_FIRST = "Revoke these credentials and let the erasure finish; `manage.py credential_status` counts what is left."


def refused(count: int) -> tuple[str, str]:
    not_erased = f"{count} secret(s) are not erased"
    return (
        f"cannot unapply kfs_credentials: {not_erased}, and their refs would be forgotten",
        ERASE_FIRST,
    )


def test_refused_while_refs_are_not_erased(make_host: MakeHost, catalog_of: CatalogOf) -> None:
    host = make_host(*STARTS["seeded"])
    host.migrate()
    objects, ledger, sources = catalog(host), host.dump("source_secret_lifecycle_refs"), host.dump("sources")

    for target in ("zero", "0005_register_refs", "0004_own_tables", "0002_source_indexes"):
        # 7 in sources; staged, candidate (twice), retired and deleting. The deleted one is erased.
        assert refusal(host, target) == refused(12)
        assert host.recorded() == MIGRATIONS
        assert catalog(host) == objects
        assert host.dump("source_secret_lifecycle_refs") == ledger

    host.run(ERASE_ALL)
    rows = [host.dump(table) for table in ("sources", "source_credential_backfills", "source_secret_lifecycle_refs")]
    assert len(rows[0]) == len(sources)
    host.migrate("zero")
    assert host.recorded() == []
    assert catalog(host) == catalog_of(BASE, SEED)
    assert rows == [
        host.dump(table) for table in ("sources", "source_credential_backfills", "source_secret_lifecycle_refs")
    ]

    host.migrate()
    assert host.recorded() == MIGRATIONS
    assert catalog(host) == objects


@pytest.mark.parametrize("state", ["staged", "candidate", "active", "retired", "deleting"])
def test_one_ref_in_any_state_is_enough(make_host: MakeHost, state: str) -> None:
    host = make_host(*STARTS["seeded"])
    host.migrate()
    keep = "credential_ref = (SELECT min(credential_ref) FROM source_secret_lifecycle_refs)"
    host.run(ERASE_ALL, f"UPDATE source_secret_lifecycle_refs SET state = 'staged', deleted_at = NULL WHERE {keep}")
    lease = "worker_id = 'w', lease_token = gen_random_uuid(), lease_expires_at = now(), heartbeat_at = now()"
    more = f", {lease}" if state == "deleting" else ""
    host.run(f"UPDATE source_secret_lifecycle_refs SET state = '{state}'{more} WHERE {keep}")
    assert refusal(host, "zero") == refused(1)


def test_a_ref_that_only_its_source_knows_is_enough(make_host: MakeHost) -> None:
    host = make_host(*STARTS["base"])
    host.migrate()
    host.run("UPDATE sources SET credential_ref = 'source-secret:v1:' || id WHERE version = 7")
    assert refusal(host, "zero") == refused(1)


@pytest.mark.parametrize("start", ["empty", "base"])
def test_back_and_forward_where_nothing_was_moved(make_host: MakeHost, catalog_of: CatalogOf, start: str) -> None:
    host = make_host(*STARTS[start])
    host.migrate()
    sources = host.dump("sources")
    host.migrate("zero")
    assert host.recorded() == []
    assert catalog(host) == catalog_of(BASE, SEED)
    host.migrate()
    assert catalog(host) == catalog_of(BASE, SEED, OURS)
    assert host.dump("sources") == sources


def test_step_by_step(host: Host) -> None:
    host.migrate()
    for target in reversed(MIGRATIONS[:-1]):
        host.migrate(target)
        assert host.recorded() == MIGRATIONS[: MIGRATIONS.index(target) + 1]
    for target in MIGRATIONS:
        host.migrate(target)
    assert host.recorded() == MIGRATIONS


def test_back_to_before_erasure_and_forward_again(host: Host) -> None:
    host.migrate("0005_register_refs")
    before = catalog(host)
    host.migrate()
    after = catalog(host)
    host.run("INSERT INTO kfs_credentials_round (name, found) VALUES ('sweep', 0)")
    host.migrate("0005_register_refs")
    assert catalog(host) == before
    host.migrate()
    assert catalog(host) == after


def test_our_index_may_have_been_dropped(host: Host) -> None:
    """It is offered to be dropped when the backfill is over."""
    host.migrate()
    host.run("DROP INDEX kfs_credentials_legacy_idx")
    host.migrate("zero")
    assert host.recorded() == []
