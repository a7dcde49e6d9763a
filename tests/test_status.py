"""The counts: one rule for each shape of metadata and credentials, the same for all who look at them.

Those of the ledger are in test_status_refs.py.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.db.models import F
from django.utils import timezone

from kfs_credentials.backfill import Backfill
from kfs_credentials.models import JobError, KnowledgeSpace, Source, SourceCredentialBackfill
from kfs_credentials.operations import Unsettled, acknowledge, unsettled
from kfs_credentials.selection import Selection
from kfs_credentials.status import Status, read_left, read_plan, read_status
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.verification.findings import FindingClass
from tests.factories import SourceFactory, SpaceFactory
from tests.management.rows import JobFactory, RefFactory, give_ref, table_contents
from tests.verification.looks import found as verified

LATER = Path(__file__).with_name("data") / "seed" / "later.sql"

NONE, LEGACY, TOO_LARGE = "none", "legacy", "legacy and too large"
deep: Any = "made-up"
for _ in range(50):
    deep = {"level": deep}

# The written rule: what the metadata is, and what that makes of the source. Anything but these three is unsupported.
RULES: dict[str, tuple[object, str]] = {
    "JSON null": (None, NONE),
    "an empty object": ({}, NONE),
    "an empty array": ([], NONE),
    "a string": ("credentials", NONE),
    "a number": (7, NONE),
    "an array that names the key": (["credentials", {"credentials": {"token": "made-up"}}], NONE),
    "the key in another case": ({"Credentials": {"token": "made-up"}, "CREDENTIALS": "made-up"}, NONE),
    "the key with a blank": ({"credentials ": {"token": "made-up"}}, NONE),
    "the key elsewhere": ({"auth": {"credentials": {"token": "made-up"}}}, NONE),
    "credentials: null": ({"credentials": None}, NONE),
    "credentials: an empty object": ({"credentials": {}}, LEGACY),
    "credentials: an object": ({"credentials": {"token": "made-up"}}, LEGACY),
    "credentials: with an empty key": ({"credentials": {"": "made-up"}}, LEGACY),
    "credentials: with the key once more": ({"credentials": {"credentials": []}}, LEGACY),
    "credentials: 50 levels": ({"credentials": deep}, LEGACY),
    "credentials: 2,000 keys": ({"credentials": {f"key {n}": n for n in range(2_000)}}, LEGACY),
    "credentials: 10,000 keys": ({"credentials": {f"key {n}": n for n in range(10_000)}}, TOO_LARGE),
    "credentials: 5 MB": ({"credentials": {"blob": "x" * 5_000_000}}, TOO_LARGE),
    "credentials: an empty array": ({"credentials": []}, "array"),
    "credentials: a list of objects": ({"credentials": [{"token": "made-up"}, {}]}, "array"),
    "credentials: an empty string": ({"credentials": ""}, "string"),
    "credentials: a string": ({"credentials": "token"}, "string"),
    "credentials: zero": ({"credentials": 0}, "number"),
    "credentials: false": ({"credentials": False}, "boolean"),
}


def source(metadata: object, **values: Any) -> Source:
    """Return a source with this metadata, which may be anything."""
    made: Source = SourceFactory.create(**values)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET metadata = %s WHERE id = %s", [json.dumps(metadata), made.pk])
    return made


@pytest.mark.django_db
def test_metadata_is_never_null() -> None:
    made = SourceFactory.create()
    with pytest.raises(IntegrityError), connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET metadata = NULL WHERE id = %s", [made.pk])


@pytest.mark.django_db
@pytest.mark.parametrize(("metadata", "rule"), RULES.values(), ids=RULES)
def test_each_shape_in_the_status(metadata: object, rule: str) -> None:
    source(metadata)
    status = read_status("default")
    legacy = int(rule in (LEGACY, TOO_LARGE))
    unsupported = int(rule not in (NONE, LEGACY, TOO_LARGE))
    assert status.sources == {
        "total": 1,
        "legacy": legacy,
        "movable": legacy,
        "unsupported": unsupported,
        "too_large": 0,
        "referenced": 0,
        "both": 0,
        "dangling": 0,
    }
    assert {shape for shape, count in status.unsupported.items() if count} == ({rule} if unsupported else set())
    assert status.left == read_left("default") == (legacy, 0, 0)
    assert status.clean == (rule == NONE)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("metadata", "rule"), RULES.values(), ids=RULES)
def test_each_shape_for_dry_run_discovery_and_settling(metadata: object, rule: str, store: EncryptedStore) -> None:
    made = source(metadata)
    before = table_contents()
    legacy = rule in (LEGACY, TOO_LARGE)
    plan = [(row["shape"], row["sources"], row["movable"]) for row in read_plan("default")]
    if legacy:
        assert plan == [("object", 1, 1)]
    elif rule == NONE:
        has_key = isinstance(metadata, dict) and "credentials" in metadata
        assert plan == ([("null", 1, 0)] if has_key else [])
    else:
        assert plan == [(rule, 1, 0)]
    settleable = list(unsettled("default"))
    assert settleable == (
        [Unsettled(made.pk, "tenant-a", rule)] if rule in ("array", "string", "number", "boolean") else []
    )
    batch = Backfill(using="default", store=store, worker="tests", lease=60).discover(10)
    assert (batch is not None) == legacy
    if not legacy:
        assert table_contents() == before


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("metadata", "rule"), RULES.values(), ids=RULES)
def test_each_shape_for_verification(metadata: object, rule: str, store: EncryptedStore) -> None:
    made = source(metadata)
    before = table_contents()
    found = [finding for finding in verified() if finding.what is FindingClass.UNSUPPORTED]
    assert [finding.source for finding in found] == ([] if rule in (NONE, LEGACY, TOO_LARGE) else [str(made.pk)])
    assert table_contents() == before


@pytest.mark.django_db
def test_what_failed_and_why() -> None:
    """`movable` are the legacy ones without a failed job; too large ones are told from the others that failed."""
    large = {"bundle": "x" * 66_000}
    JobFactory.create(source=SourceFactory.create(credentials=large), last_error_code=JobError.TOO_LARGE)
    JobFactory.create(last_error_code=JobError.CONFLICT)
    JobFactory.create(last_error_code=None)
    SourceFactory.create()
    JobFactory.create(queued=True)
    JobFactory.create(succeeded=True)  # credentials that have come back
    status = read_status("default")
    assert status.sources["legacy"] == 6
    assert status.sources["movable"] == 3
    assert status.sources["too_large"] == 1
    assert status.failures == {"SOURCE_SECRET_REF_CONFLICT": 1, "SOURCE_SECRET_TOO_LARGE": 1, "unknown": 1}
    assert status.findings == {"unsupported": 0, "too_large": 1, "failed": 2, "both": 0}
    assert status.left == read_left("default") == (3, 1, 0)
    assert [row["movable"] for row in read_plan("default")] == [3]


@pytest.mark.django_db
def test_failed_jobs_that_have_nothing_left_to_move_still_need_a_person() -> None:
    JobFactory.create(source=SourceFactory.create(bare=True), last_error_code=JobError.TOO_LARGE)
    for moved in (SourceFactory.create(bare=True), SourceFactory.create()):
        give_ref(moved)
        JobFactory.create(source=moved)
    SourceFactory.create()
    status = read_status("default")
    assert status.left == read_left("default") == (1, 0, 0)
    assert status.findings == {"unsupported": 0, "too_large": 0, "failed": 3, "both": 1}
    assert not status.clean


@pytest.mark.django_db
def test_the_limit_decides_what_is_too_large(kfs_settings: Callable[..., None]) -> None:
    JobFactory.create(
        source=SourceFactory.create(credentials={"bundle": "x" * 66_000}), last_error_code=JobError.TOO_LARGE
    )
    kfs_settings(MAX_SECRET_BYTES=100_000)
    assert read_status("default").findings == {"unsupported": 0, "too_large": 0, "failed": 1, "both": 0}


@pytest.mark.django_db
def test_refs_and_both() -> None:
    give_ref(SourceFactory.create(bare=True))
    give_ref(SourceFactory.create())
    give_ref(SourceFactory.create(credentials=["unsupported, whatever else there is"]))
    status = read_status("default")
    assert status.sources == {
        "total": 3,
        "legacy": 0,
        "movable": 0,
        "unsupported": 1,
        "too_large": 0,
        "referenced": 3,
        "both": 1,
        "dangling": 0,
    }
    assert read_plan("default") == []
    assert not status.clean


@pytest.mark.django_db(transaction=True)
def test_acknowledged_ones() -> None:
    credentials: object
    for credentials in ("token", 7, [], True):
        SourceFactory.create(credentials=credentials)
    large = SourceFactory.create(credentials={"bundle": "x" * 66_000})
    JobFactory.create(source=large, last_error_code=JobError.TOO_LARGE)
    found = list(unsettled("default"))
    acknowledge("default", found[:2], by="tests")
    status = read_status("default")
    assert status.acknowledged == {"unsupported": 2, "too_large": 0}
    assert status.findings == {"unsupported": 2, "too_large": 1, "failed": 0, "both": 0}
    acknowledge("default", found[2:], by="tests")
    status = read_status("default")
    assert status.acknowledged == {"unsupported": 4, "too_large": 1}
    assert status.clean
    # What is noted of a source that is gone says nothing.
    large.delete()
    Source.objects.exclude(pk=large.pk).delete()
    assert read_status("default").acknowledged == {"unsupported": 0, "too_large": 0}


@pytest.mark.django_db
def test_jobs_and_their_leases() -> None:
    for _ in range(2):
        JobFactory.create(running=True)
    SourceCredentialBackfill.objects.filter(pk=SourceCredentialBackfill.objects.first().pk).update(  # type: ignore[union-attr]
        lease_expires_at=timezone.now() - timedelta(seconds=1)
    )
    JobFactory.create(source=SourceFactory.create(bare=True), succeeded=True)
    for hours in (1, 3):
        JobFactory.create(
            source=SourceFactory.create(), queued=True, updated_at=timezone.now() - timedelta(hours=hours)
        )
    status = read_status("default")
    age = status.backfills.pop("oldest_queued_seconds")
    assert 3 * 3600 <= age < 4 * 3600
    assert status.backfills == {"queued": 2, "running": 2, "succeeded": 1, "failed": 0, "expired_leases": 1}
    assert read_left("default") == (4, 2, 2)


@pytest.mark.django_db
def test_one_tenant_and_one_space() -> None:
    spaces = [SpaceFactory.create(tenant_id=tenant) for tenant in ("one", "one", "two")]
    for space in spaces:
        JobFactory.create(source=SourceFactory.create(knowledge_space=space), queued=True)
        RefFactory.create(job=JobFactory.create(source=SourceFactory.create(knowledge_space=space)))
        SourceFactory.create(knowledge_space=space, credentials=[])
        give_ref(SourceFactory.create(knowledge_space=space))

    def counts(status: Status) -> list[int]:
        sources = status.sources
        return [
            *(sources[name] for name in ("total", "legacy", "movable", "unsupported", "referenced", "both")),
            *(status.backfills[name] for name in ("queued", "failed")),
            status.ledger["retired"],
            status.failures["SOURCE_CREDENTIAL_BACKFILL_FAILED"],
        ]

    one = counts(read_status("default", space=spaces[0].pk))
    assert one == [4, 2, 1, 1, 1, 1, 1, 1, 1, 1]
    assert counts(read_status("default", tenant="one")) == [2 * count for count in one]
    assert counts(read_status("default", tenant="two")) == one
    assert counts(read_status("default")) == [3 * count for count in one]
    assert counts(read_status("default", tenant="one", space=spaces[1].pk)) == one
    assert read_status("default", tenant="two", space=spaces[1].pk).sources["total"] == 0
    assert read_left("default", tenant="one") == (2, 2, 0)
    assert read_left("default", space=spaces[2].pk) == (1, 1, 0)
    assert [(row["tenant"], row["sources"]) for row in read_plan("default", tenant="two")] == [("two", 1), ("two", 2)]


@pytest.mark.django_db
def test_a_tenant_that_is_not_there() -> None:
    JobFactory.create(queued=True)
    assert read_left("default", tenant="nobody") == (0, 0, 0)
    assert read_left("default", space=uuid.uuid4()) == (0, 0, 0)
    assert read_plan("default", tenant="nobody") == []
    status = read_status("default", tenant="nobody")
    assert status.sources["total"] == 0
    assert status.clean


@pytest.fixture
def later(db: None) -> None:
    """What later versions of knowledge-fs add to the tables, for the transaction of the test."""
    with connection.cursor() as cursor:
        cursor.execute(LATER.read_text())


def deleting_source(made: Source) -> None:
    Source.objects.filter(pk=made.pk).update(status="deleting")


def deleting_source_as_later_versions_do(made: Source) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE sources SET status = 'deleting', deletion_job_id = id, deleting_at = now() WHERE id = %s", [made.pk]
        )


def deleting_space(made: Source) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE knowledge_spaces SET lifecycle_state = 'deleting', deletion_job_id = id, deleting_at = now() "
            "WHERE id = %s",
            [made.knowledge_space_id],
        )


def deletion_job(target: str) -> Callable[[Source], None]:
    def insert(made: Source) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO deletion_jobs VALUES (gen_random_uuid(), 'tenant-a', %s, 'any', %s, 1, now())",
                [made.knowledge_space_id, getattr(made, target)],
            )

    return insert


def everything(space: KnowledgeSpace) -> list[Source]:
    """Something of all that counts as left or as a finding."""
    large = SourceFactory.create(knowledge_space=space, credentials={"bundle": "x" * 66_000})
    sources = [SourceFactory.create(knowledge_space=space) for _ in range(5)]
    JobFactory.create(source=sources[0], queued=True)
    JobFactory.create(source=sources[1], running=True, lease_expires_at=timezone.now() - timedelta(hours=1))
    JobFactory.create(source=sources[2])
    JobFactory.create(source=large, last_error_code=JobError.TOO_LARGE)
    give_ref(sources[3])
    return [large, *sources, SourceFactory.create(knowledge_space=space, credentials="token")]


def check_waiting(status: Status) -> None:
    assert status.clean
    assert status.left == read_left("default") == (0, 0, 0)
    assert status.sources == {
        "total": 7,
        "legacy": 5,
        "movable": 0,
        "unsupported": 0,
        "too_large": 0,
        "referenced": 1,
        "both": 0,
        "dangling": 0,
    }
    assert status.failures == {}
    assert status.backfills["expired_leases"] == 0
    assert status.backfills["failed"] == 0
    assert list(unsettled("default")) == []
    assert sum(row["movable"] for row in read_plan("default")) == 0


@pytest.mark.django_db
def test_sources_that_are_being_deleted() -> None:
    for made in everything(SpaceFactory.create()):
        deleting_source(made)
    check_waiting(read_status("default"))


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "delete",
    [
        deleting_source_as_later_versions_do,
        deleting_space,
        deletion_job("pk"),
        deletion_job("knowledge_space_id"),
    ],
    ids=["sources", "space", "jobs for the sources", "jobs for the space"],
)
def test_what_later_versions_delete(delete: Callable[[Source], None]) -> None:
    sources = everything(SpaceFactory.create())
    before = read_status("default")
    assert before.left == read_left("default") == (3, 1, 1)
    assert all(before.findings.values())
    for made in sources:
        delete(made)
    check_waiting(read_status("default"))


@pytest.mark.usefixtures("later")
def test_deletions_that_are_over_are_none() -> None:
    made = SourceFactory.create()
    deletion_job("pk")(made)
    with connection.cursor() as cursor:
        cursor.execute("UPDATE deletion_jobs SET active_slot = NULL")
    assert read_left("default") == (1, 0, 0)


@pytest.mark.django_db(transaction=True)
def test_all_counts_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that is moved while the status is read is not missed by all of its counts."""
    SourceFactory.create()
    real = Selection.of

    def read_then_move(*arguments: Any, **keywords: Any) -> Any:
        selection = real(*arguments, **keywords)
        other = connection.copy()
        with other.cursor() as cursor:
            cursor.execute("DELETE FROM sources")
        other.close()
        return selection

    monkeypatch.setattr(Selection, "of", read_then_move)
    assert read_status("default").sources["movable"] == 1
    assert Source.objects.count() == 0


@pytest.mark.django_db(transaction=True)
def test_it_reads_in_a_transaction_that_can_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    SourceFactory.create()
    monkeypatch.setattr(Selection, "of", lambda *_, **__: Source.objects.update(version=F("version") + 1))
    with pytest.raises(Exception, match="read-only transaction"):
        read_status("default")
