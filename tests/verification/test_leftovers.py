"""Where old plaintext still is: the table until it is rewritten, and other tables that have a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection

from kfs_credentials import services
from kfs_credentials.models import Event, Source, SourceCredentialBackfill
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.verification import leftovers
from kfs_credentials.verification.findings import FindingClass
from kfs_credentials.verification.leftovers import Leftovers, look_at_heap, look_at_history
from tests.cleanup.rows import in_database, make_source
from tests.factories import SourceFactory
from tests.management.rows import JobFactory
from tests.verification.looks import found

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]


def rewrite() -> None:
    in_database("VACUUM (FULL) sources")


def move() -> None:
    JobFactory.create(source=make_source(), succeeded=True)


def test_nothing_was_moved_yet() -> None:
    look = look_at_heap("default")
    assert look.rewritten
    assert look.lines() == ["Old plaintext: nothing was moved yet."]
    assert look.statements == []


def test_refs_that_came_with_their_sources() -> None:
    """Whether there ever was plaintext beside them is not known."""
    make_source()
    look = look_at_heap("default")
    assert look.rewritten is None
    assert look.as_json()["rewritten"] is None
    assert look.statements == []
    assert (
        ": no job and no event tells that any was removed (there was none, or they are gone), not " in look.lines()[0]
    )
    rewrite()
    look = look_at_heap("default")
    assert look.rewritten is None
    assert "(there was none, or they are gone), rewritten since " in look.lines()[0]
    assert "What was removed later" not in look.lines()[0]


def rotated(source: Source) -> None:
    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "new"})


def revoked(source: Source) -> None:
    services.revoke_credentials(tenant="tenant-a", source_id=source.pk)


def moved(_: Source) -> None:
    call_command("run_credential_backfill", verbosity=0, stdout=StringIO())


def moved_and_deleted(source: Source) -> None:
    moved(source)
    services.delete_source(tenant="tenant-a", source_id=source.pk)
    assert not SourceCredentialBackfill.objects.exists()


def moved_deleted_and_forgotten(source: Source) -> None:
    moved_and_deleted(source)
    LedgerRow.objects.all().delete()


@pytest.mark.parametrize("remove", [rotated, revoked, moved, moved_and_deleted, moved_deleted_and_forgotten])
def test_whoever_removes_plaintext_leaves_it_in_the_table(remove: Callable[[Source], None]) -> None:
    source = SourceFactory.create()
    assert look_at_heap("default").rewritten
    remove(source)
    look = look_at_heap("default")
    assert look.last_removed_at is not None
    assert look.rewritten is False
    assert look.statements
    rewrite()
    assert look_at_heap("default").rewritten


def test_what_a_look_has_seen_outlives_the_event_that_told_of_it() -> None:
    revoked(SourceFactory.create())
    seen = look_at_heap("default").last_removed_at
    in_database("DELETE FROM kfs_credentials_event")
    look = look_at_heap("default")
    assert (look.last_removed_at, look.rewritten) == (seen, False)


def test_services_note_what_they_remove_and_nothing_else() -> None:
    legacy, bare = SourceFactory.create(), SourceFactory.create(bare=True)
    null = SourceFactory.create(bare=True)
    in_database("""UPDATE sources SET metadata = '{"credentials": null}' WHERE id = %s""", null.pk)
    for source in (legacy, bare, null):
        rotated(source)
        rotated(source)
        revoked(source)
    gone = SourceFactory.create()
    revoked(gone)
    noted = Event.objects.filter(kind="scrubbed").order_by("id").values_list("source_id", "credential_ref", "detail")
    (first, ref, why), second = noted
    assert (first, why, second) == (legacy.pk, None, (gone.pk, None, None))
    assert LedgerRow.objects.get(credential_ref=ref).source_id == legacy.pk


def test_not_rewritten_yet_then_rewritten_and_moved_again() -> None:
    """What was removed before the old file was last seen is not in the new one. What was removed later may be."""
    move()
    first = look_at_heap("default")
    assert not first.rewritten
    assert first.clean_before is None
    assert "not rewritten yet, as far as is known (first noted: " in first.lines()[0]
    assert first.statements == ["VACUUM (FULL, ANALYZE) sources;", "pg_repack --no-order --table=sources"]
    assert look_at_heap("default").noted_at == first.noted_at
    rewrite()
    after = look_at_heap("default")
    assert after.rewritten
    assert after.lines()[0].startswith("Old plaintext in sources (")
    assert ": rewritten since " in after.lines()[0]
    assert after.statements == []
    move()
    later = look_at_heap("default")
    assert not later.rewritten
    assert later.clean_before == after.clean_before
    assert "What was removed later (last: " in later.lines()[0]
    assert later.statements


def test_what_was_removed_between_the_last_look_and_the_rewrite_is_not_known_to_be_out() -> None:
    move()
    look_at_heap("default")
    move()
    rewrite()
    look = look_at_heap("default")
    assert look.clean_before is not None
    assert not look.rewritten


def test_what_else_may_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    move()
    last = look_at_heap("default").lines()[-1]
    assert last.startswith("What was removed is also in WAL until that is recycled (archive_mode is off; 0 replication")
    assert last.endswith("Nothing here can look there.")
    known = look_at_heap("default").as_json()
    assert (known["archive_mode"], known["replication_slots"], known["standbys"]) == (False, 0, 0)
    assert isinstance(look_at_heap("default"), Leftovers)


def test_old_plaintext_in_the_heap_alone_is_no_finding() -> None:
    source = make_source()
    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "new"})
    move()
    assert found() == []


# Other tables.


@pytest.fixture
def history() -> Iterator[None]:
    """A host's history of its sources: as jsonb, as json, one without, and one that is no table."""
    in_database("CREATE SCHEMA kfs_tests_elsewhere")
    in_database("CREATE TABLE source_history AS SELECT * FROM sources")
    in_database("CREATE TABLE outbox (metadata json)")
    in_database("CREATE TABLE notes (metadata jsonb)")
    in_database("CREATE TABLE kfs_tests_elsewhere.copies (metadata jsonb)")
    in_database("CREATE VIEW current_sources AS SELECT * FROM sources")
    yield
    in_database("DROP VIEW current_sources")
    in_database("DROP TABLE source_history, outbox, notes")
    in_database("DROP SCHEMA kfs_tests_elsewhere CASCADE")


def details() -> list[str]:
    return sorted(finding.detail for finding in look_at_history("default"))


@pytest.mark.usefixtures("history")
def test_tables_that_have_a_copy() -> None:
    assert details() == []
    JobFactory.create()  # its source has credentials in clear
    in_database("INSERT INTO source_history SELECT * FROM sources")
    in_database("""INSERT INTO source_history SELECT * FROM sources""")
    # JS-01: json may hold what jsonb refuses.
    in_database(
        r"""INSERT INTO outbox VALUES ('{"credentials": {"token": "\u0000"}}'), ('{"credentials": null}'), ('[]')"""
    )
    in_database("""INSERT INTO notes VALUES ('{"title": "credentials"}'), ('"credentials"'), (NULL)""")
    in_database("""INSERT INTO kfs_tests_elsewhere.copies VALUES ('{"credentials": "token"}')""")
    assert details() == ["public.outbox: 1 rows", "public.source_history: 2 rows"]
    assert {finding.what for finding in found() if finding.source is None} == {FindingClass.HISTORY_COPY}
    others = [what for what in FindingClass if what is not FindingClass.HISTORY_COPY]
    assert [finding for finding in found(classes=others) if finding.source is None] == []


@pytest.mark.usefixtures("history")
def test_a_large_one_is_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    in_database("""INSERT INTO notes SELECT '{"credentials": "token"}' FROM generate_series(1, 20000)""")
    monkeypatch.setattr(leftovers, "SAMPLED_PAGES", 20)
    (detail,) = details()
    table, _, words = detail.partition(": ")
    assert table == "public.notes"
    about, number, *rest = words.split()
    assert (about, rest) == ("about", ["rows,", "by", "a", "sample", "of", "its", "pages"])
    assert 5_000 < int(number.replace(",", "")) < 60_000


@pytest.mark.usefixtures("history")
def test_one_that_cannot_be_looked_at_in_time_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    in_database("""INSERT INTO notes SELECT '{"credentials": "token"}' FROM generate_series(1, 200000)""")
    monkeypatch.setattr(leftovers, "PATIENCE", "1ms")
    (detail,) = details()
    assert detail == "public.notes: could not be looked at (QueryCanceled, SQLSTATE 57014)"
    with connection.cursor() as cursor:
        cursor.execute("SHOW statement_timeout")
        assert cursor.fetchone() == ("0",)
