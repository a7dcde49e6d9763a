"""What lies in clear where nothing should: compared, removed, kept and wrapped, and what is in motion left alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.db import connections

from kfs_credentials import in_clear, services
from kfs_credentials.audit import acting_as
from kfs_credentials.errors import StoreDenied, StoreMisconfigured, StoreUnavailable
from kfs_credentials.in_clear import InClear, Settled, Verdict, compared, keep_plaintext, keep_ref, scrub_same, wrap
from kfs_credentials.models import Acknowledgement, Event, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.verification import database
from tests.cleanup.rows import in_database, make_source, ref_of, scope_of
from tests.cuts import Cut
from tests.factories import SourceFactory, SpaceFactory
from tests.ref_scenes import row_of
from tests.verification.looks import before_statement, elsewhere

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

SAME = '{"title": "x", "credentials": {"token": "made-up"}}'
OTHER = '{"title": "x", "credentials": {"token": "other"}}'


def beside(metadata: str = OTHER, secret: dict[str, Any] | None = None) -> Source:
    """Return a source that has a ref, and this metadata."""
    source = make_source(secret=secret or {"token": "made-up"})
    in_database("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", metadata, source.pk)
    return source


def look(source: Source) -> InClear:
    ((found, _),) = compared("default", [source.pk])
    return found


def read(source: Source) -> InClear:
    ((found,),) = in_clear.read("default", [source.pk])
    return found


def now(source: Source) -> Source:
    return Source.objects.get(pk=source.pk)


def credentials(source: Source) -> dict[str, Any]:
    return dict(services.resolve_credentials(tenant="tenant-a", source_id=source.pk))


def verdicts(*sources: Source) -> list[Verdict]:
    found = {one.source: verdict for one, verdict in compared("default", [source.pk for source in sources])}
    return [found[source.pk] for source in sources]


def test_compared(store: EncryptedStore) -> None:
    digits = beside('{"credentials": {"id": 12345678901234567891}}', {"id": 12345678901234567890})
    same_digits = beside('{"credentials": {"n": 1.10, "id": 10}}', {"id": 10, "n": Decimal("1.1")})
    lost, shape, empty = beside(SAME), beside('{"credentials": "token"}'), beside('{"credentials": null}')
    store.delete(scope_of(lost), ref_of(lost))
    assert verdicts(beside(SAME), beside(OTHER), digits, same_digits, lost, shape) == [
        Verdict.SAME,
        Verdict.DIFFERENT,
        Verdict.DIFFERENT,
        Verdict.SAME,
        Verdict.NOT_COMPARED,
        Verdict.DIFFERENT,
    ]
    assert list(compared("default", [empty.pk, uuid.uuid4(), SourceFactory.create().pk])) == []


def test_values_come_in_parts(kfs_settings: Any) -> None:
    kfs_settings(BATCH_BYTES=60, MAX_SECRET_BYTES=50)
    sources = [beside(SAME) for _ in range(7)]
    large = beside('{"credentials": {"token": "' + "x" * 100 + '"}}')
    assert verdicts(*sources, large) == [Verdict.SAME] * 7 + [Verdict.NOT_COMPARED]


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), StoreDenied("no"), StoreMisconfigured("no")])
def test_a_store_that_cannot_be_asked_says_nothing_about_any_of_them(
    store: EncryptedStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    source = beside(SAME)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(EncryptedStore, "_get_many", fail)
    with pytest.raises(type(error)):
        look(source)


# Scrub what is the same.


def test_what_is_the_same_is_removed_and_nothing_else() -> None:
    sources = [beside(SAME) for _ in range(3)]
    with acting_as("somebody"):
        assert scrub_same("default", [look(source) for source in sources]) == {source.pk for source in sources}
    for source in sources:
        after = now(source)
        assert (after.metadata, after.version, after.credential_ref) == ({"title": "x"}, 2, ref_of(source))
        assert credentials(source) == {"token": "made-up"}
        (event,) = Event.objects.filter(kind="scrubbed", credential_ref=after.credential_ref)
        assert (event.actor, event.detail, event.source_id) == ("somebody", "the same value as the ref's", source.pk)


CHANGES = {
    "the value": """UPDATE sources SET metadata = '{"credentials": {"token": "newer"}}' WHERE id = %s""",
    "the ref": "UPDATE sources SET credential_ref = NULL WHERE id = %s",
    "gone": "DELETE FROM sources WHERE id = %s",
    "not active": "UPDATE source_secret_lifecycle_refs SET state = 'retired' WHERE source_id = %s",
}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))


@changes
def test_what_changed_meanwhile_is_left_alone(change: str) -> None:
    source, other = beside(SAME), beside(SAME)
    found = [look(source), look(other)]
    in_database(change, source.pk)
    before = list(Source.objects.filter(pk=source.pk).values())
    assert scrub_same("default", found) == {other.pk}
    assert list(Source.objects.filter(pk=source.pk).values()) == before


def test_what_changes_right_before_the_lock_is_left_alone() -> None:
    source = beside(SAME)
    found = look(source)
    with before_statement("FOR NO KEY UPDATE SKIP LOCKED", 1, lambda: elsewhere((CHANGES["the value"], source.pk))):
        assert scrub_same("default", [found]) == set()
    assert now(source).metadata == {"credentials": {"token": "newer"}}


def test_a_row_that_somebody_has_locked_is_not_waited_for() -> None:
    locked, free = beside(SAME), beside(SAME)
    found = [look(locked), look(free)]
    other = connections.create_connection("default")
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [locked.pk])
            assert scrub_same("default", found) == {free.pk}
    finally:
        other.close()


@pytest.fixture
def refusal() -> Any:
    """Let the database refuse each change of a source whose name is `stubborn`."""
    in_database(
        "CREATE FUNCTION kfs_tests_refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'canary: %%', NEW.metadata; END $$",
    )
    in_database(
        "CREATE TRIGGER kfs_tests_refuse BEFORE UPDATE ON sources FOR EACH ROW WHEN (NEW.name = 'stubborn') "
        "EXECUTE FUNCTION kfs_tests_refuse()"
    )
    yield
    in_database("DROP FUNCTION kfs_tests_refuse CASCADE")


def test_one_that_the_database_refuses_to_change_stops_nothing(refusal: None) -> None:
    sources = [beside(SAME) for _ in range(5)]
    found = [look(source) for source in sources]
    in_database("ALTER TABLE sources DISABLE TRIGGER USER")
    in_database("UPDATE sources SET name = 'stubborn' WHERE id = %s", sources[2].pk)
    in_database("ALTER TABLE sources ENABLE TRIGGER USER")
    assert scrub_same("default", found) == {source.pk for source in sources} - {sources[2].pk}
    assert keep_ref("default", look(sources[2])) is Settled.REFUSED
    assert keep_plaintext("default", look(sources[2])) is Settled.REFUSED


def test_values_of_a_page_are_compared_and_removed_in_parts(kfs_settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more of them is held than a batch may have, whatever a page has."""
    for _ in range(6):
        beside(SAME)
    kfs_settings(BATCH_BYTES=50, MAX_SECRET_BYTES=40)
    parts, real = list[int](), in_clear.scrub_same

    def scrub(using: str, found: Any) -> Any:
        parts.append(len(found))
        return real(using, found)

    monkeypatch.setattr(database, "scrub_same", scrub)
    run = database.Verification("default", scrub=True)
    run.run()
    assert (run.scrubbed, run.findings.total) == (6, 0)
    assert parts == [3, 3]


# Keep one or the other.


def test_keep_the_ref() -> None:
    source = beside(OTHER)
    assert keep_ref("default", look(source)) is Settled.DONE
    assert (now(source).metadata, now(source).version) == ({"title": "x"}, 2)
    assert credentials(source) == {"token": "made-up"}
    assert Event.objects.get(kind="scrubbed").detail == "a person kept the ref"


@pytest.mark.parametrize("metadata", ['{"credentials": "token"}', '{"credentials": ["a"], "n": 1.50}'])
def test_keep_the_ref_beside_another_shape(metadata: str) -> None:
    source = beside(metadata)
    assert keep_ref("default", look(source)) is Settled.DONE
    assert "credentials" not in now(source).metadata


def test_a_ref_that_cannot_be_read_is_not_kept(store: EncryptedStore) -> None:
    """What lies in clear is all there is then."""
    source, retired = beside(OTHER), beside(OTHER)
    store.delete(scope_of(source), ref_of(source))
    in_database("UPDATE source_secret_lifecycle_refs SET state = 'retired' WHERE source_id = %s", retired.pk)
    for one in (source, retired):
        assert keep_ref("default", look(one)) is Settled.UNREADABLE
        assert now(one).metadata["credentials"] == {"token": "other"}
        assert keep_plaintext("default", look(one)) is Settled.DONE
        assert credentials(one) == {"token": "other"}


def test_keep_the_plaintext() -> None:
    source = beside('{"title": "x", "credentials": {"id": 12345678901234567890.10}}')
    old = ref_of(source)
    assert keep_plaintext("default", look(source)) is Settled.DONE
    after = now(source)
    assert (after.metadata, after.version) == ({"title": "x"}, 2)
    assert after.credential_ref != old
    assert credentials(source) == {"id": Decimal("12345678901234567890.1")}
    assert (row_of(old).state, row_of(after.credential_ref or "").state) == ("retired", "active")
    assert Event.objects.get(kind="scrubbed").credential_ref == after.credential_ref


@pytest.mark.parametrize("took_place", [True, False])
def test_a_commit_that_is_not_answered(cut_at_commit: Cut, took_place: bool) -> None:
    """It is done, and that is said, whether the first try took place or the second."""
    for keep, after in ((keep_ref, "made-up"), (keep_plaintext, "other")):
        source = beside(OTHER)
        found = look(source)
        cut_at_commit(1 if keep is keep_ref else 2, took_place=took_place)
        assert keep("default", found) is Settled.DONE
        assert (now(source).metadata, now(source).version) == ({"title": "x"}, 2)
        assert credentials(source) == {"token": after}
    source = beside(SAME)
    found = look(source)
    cut_at_commit(1, took_place=took_place)
    assert scrub_same("default", [found]) == {source.pk}
    assert (now(source).metadata, now(source).version) == ({"title": "x"}, 2)
    assert Event.objects.filter(kind="scrubbed").count() == 3


@changes
@pytest.mark.parametrize("keep", [keep_ref, keep_plaintext])
def test_what_changed_meanwhile_is_not_settled(keep: Callable[[str, InClear], Settled], change: str) -> None:
    source = beside(OTHER)
    found = look(source)
    in_database(change, source.pk)
    before = list(Source.objects.filter(pk=source.pk).values())
    outcome = keep("default", found)
    if "retired" in change and keep is keep_plaintext:
        assert outcome is Settled.DONE  # the value that was looked at is the one that is kept
        return
    assert outcome in (Settled.CHANGED, Settled.BUSY)
    assert list(Source.objects.filter(pk=source.pk).values()) == before


def test_the_plaintext_changes_after_it_was_put() -> None:
    """An old writer does not raise the version: what it wrote is not removed with what it replaced."""
    source = beside(OTHER)
    found = look(source)
    with before_statement("FOR NO KEY UPDATE SKIP LOCKED", 1, lambda: elsewhere((CHANGES["the value"], source.pk))):
        assert keep_plaintext("default", found) is Settled.CHANGED
    assert now(source).metadata == {"credentials": {"token": "newer"}}
    assert now(source).credential_ref == ref_of(source)


def test_too_large_and_not_an_object(kfs_settings: Any) -> None:
    source, text = beside(OTHER), beside('{"credentials": "token"}')
    kfs_settings(MAX_SECRET_BYTES=10)
    assert keep_plaintext("default", look(source)) is Settled.TOO_LARGE
    assert keep_plaintext("default", look(text)) is Settled.INVALID


LARGE = """UPDATE sources SET metadata = '{"title": "x", "credentials": {"token": "%s"}}' WHERE id = %%s"""


def test_one_that_no_batch_can_hold(kfs_settings: Any) -> None:
    """It is compared by its digest: of the same length and version, another one is another one."""
    kfs_settings(BATCH_BYTES=60, MAX_SECRET_BYTES=50)
    source = beside()
    in_database(LARGE % ("x" * 100), source.pk)
    found = look(source)
    assert keep_plaintext("default", found) is Settled.TOO_LARGE
    with before_statement("FOR NO KEY UPDATE SKIP LOCKED", 1, lambda: elsewhere((LARGE % ("y" * 100), source.pk))):
        assert keep_ref("default", found) is Settled.CHANGED
    assert now(source).metadata["credentials"] == {"token": "y" * 100}
    assert keep_ref("default", look(source)) is Settled.DONE
    assert now(source).metadata == {"title": "x"}
    assert credentials(source) == {"token": "made-up"}


# Wrap.


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ("string", '"made-up"', "made-up"),
        ("string", '"a literal \\\\u0000"', "a literal \\u0000"),
        ("number", "12345678901234567890.123456789", Decimal("12345678901234567890.123456789")),
        ("number", "1e30", 10**30),
        ("number", "0", 0),
        ("boolean", "false", False),
        ("array", '[{"token": 1.10}, null]', [{"token": 1.1}, None]),
        ("array", "[]", []),
    ],
)
def test_each_shape_is_moved_wrapped(shape: str, value: str, expected: object) -> None:
    source = SourceFactory.create(bare=True)
    in_database(
        """UPDATE sources SET metadata = ('{"n": 1.50, "credentials": ' || %s || '}')::jsonb WHERE id = %s""",
        *(value, source.pk),
    )
    assert read(source).shape == shape
    assert wrap("default", read(source), "key") is Settled.DONE
    after = now(source)
    assert credentials(source) == {"key": expected}
    assert type(credentials(source)["key"]) is type(expected)
    assert (set(after.metadata), after.version) == ({"n"}, 2)
    assert Event.objects.get(kind="scrubbed").credential_ref == after.credential_ref
    # Again, nothing is made twice.
    assert wrap("default", read(source), "key") is Settled.BEFORE
    assert now(source).version == 2


def test_a_wrapped_one_is_not_acknowledged_any_more() -> None:
    source = SourceFactory.create(credentials="token")
    Acknowledgement.objects.create(
        source_id=source.pk, shape="string", acknowledged_by="tests", acknowledged_at="2026-01-01T00:00Z"
    )
    assert wrap("default", read(source), "key") is Settled.DONE
    assert not Acknowledgement.objects.exists()


def test_what_is_not_wrapped(kfs_settings: Any, refusal: None) -> None:
    refused = SourceFactory.create(credentials="token", name="stubborn")
    deep = SourceFactory.create(bare=True)
    nested = '{"credentials": ' + "[" * 501 + "]" * 501 + "}"
    in_database("UPDATE sources SET metadata = %s::jsonb WHERE id = %s", nested, deep.pk)
    leaving = SourceFactory.create(credentials="token", status="deleting")
    nameless = SourceFactory.create(credentials="token", knowledge_space=SpaceFactory.create(tenant_id=" "))
    objects = SourceFactory.create()
    large = SourceFactory.create(credentials="x" * 70_000)
    kfs_settings(BATCH_BYTES=100_000)
    beyond = SourceFactory.create(credentials="x" * 200_000)
    outcomes = [
        wrap("default", read(source), "key")
        for source in (refused, deep, leaving, nameless, objects, large, beyond, beside('{"credentials": "token"}'))
    ]
    assert outcomes == [
        Settled.REFUSED,
        Settled.INVALID,
        Settled.LEAVING,
        Settled.INVALID,
        Settled.CHANGED,
        Settled.TOO_LARGE,
        Settled.TOO_LARGE,
        Settled.CHANGED,
    ]
    assert not Event.objects.filter(kind="scrubbed").exists()


def test_what_changes_after_it_was_put_stays() -> None:
    source = SourceFactory.create(credentials="token")
    change = """UPDATE sources SET metadata = '{"credentials": "newer"}' WHERE id = %s"""
    found = read(source)
    with before_statement("FOR NO KEY UPDATE SKIP LOCKED", 1, lambda: elsewhere((change, source.pk))):
        assert wrap("default", found, "key") is Settled.CHANGED
    assert (now(source).metadata, now(source).credential_ref) == ({"credentials": "newer"}, None)
    assert wrap("default", read(source), "key") is Settled.DONE
    assert credentials(source) == {"key": "newer"}
