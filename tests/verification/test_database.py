"""What is found in the tables: each class once, and what is no finding."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections

from kfs_credentials import services
from kfs_credentials.models import Acknowledgement, Attention, KnowledgeSpace, SecretObject, Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.verification import database
from kfs_credentials.verification.findings import Finding, FindingClass
from tests.cleanup.rows import add_ref, bare_source, in_database, make_source, name_ref, of_ref, ref_of
from tests.factories import SourceFactory, SpaceFactory
from tests.management.rows import JobFactory, RefFactory, object_row
from tests.verification.looks import before_statement, classes, elsewhere, found

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

INFINITY = "'infinity'"


def set_ref(ref: str, assignment: str) -> None:
    in_database(f"UPDATE source_secret_lifecycle_refs SET {assignment} WHERE credential_ref = %s", ref)


def set_job(job: Any, assignment: str) -> None:
    in_database(f"UPDATE source_credential_backfills SET {assignment} WHERE id = %s", job.pk)


def with_candidate(state: str = "candidate", source: Source | None = None, **job: Any) -> Any:
    """Make a job and the ledger row of its candidate."""
    made = JobFactory.create(**({"source": source} if source else {}), **job)
    times = {"next_delete_at": None} if state != "retired" else {}
    object_row(RefFactory.create(job=made, state=state, **times).credential_ref)
    return made


# What makes each class.


def ref_unknown() -> str:
    source = make_source()
    in_database("DELETE FROM source_secret_lifecycle_refs WHERE source_id = %s", source.pk)
    return str(source.pk)


def ref_misplaced() -> str:
    source, other = make_source(), bare_source()
    name_ref(source, None)
    set_ref(source.credential_ref or "", "state = 'retired', next_delete_at = now() + interval '1 hour'")
    name_ref(other, source.credential_ref)
    return str(other.pk)


def ref_not_active() -> str:
    source = make_source()
    set_ref(ref_of(source), "state = 'retired'")
    return str(source.pk)


def ref_unnamed() -> str:
    source = make_source()
    name_ref(source, None)
    return str(source.pk)


def ref_claimed() -> str:
    source = make_source()
    set_ref(ref_of(source), "delete_attempts = 1")
    return str(source.pk)


def ref_undated() -> str:
    return str(add_ref(None, "retired", next_delete_at=None).source_id)


def ref_stuck_for_ever() -> str:
    row = add_ref(None, "retired")
    set_ref(row.credential_ref, f"next_delete_at = {INFINITY}")
    return str(row.source_id)


def ref_stuck_in_a_reservation() -> str:
    row = add_ref(None, "staged")
    set_ref(row.credential_ref, f"recover_after = {INFINITY}")
    return str(row.source_id)


def ref_stuck_in_a_lease() -> str:
    row = add_ref(None, "deleting")
    set_ref(row.credential_ref, "lease_expires_at = now() + interval '2 days'")
    return str(row.source_id)


def erasure_unproved() -> str:
    row = add_ref(None, "retired")
    set_ref(row.credential_ref, "state = 'deleted', deleted_at = now(), next_delete_at = NULL")
    return str(row.source_id)


def job_in_clear() -> str:
    return str(with_candidate("retired", run_state="succeeded", last_error_code=None).source_id)


def job_candidate_left() -> str:
    return str(with_candidate("candidate").source_id)


def job_candidate_lost() -> str:
    return str(with_candidate("retired", queued=True).source_id)


def job_without_a_candidate() -> str:
    return str(JobFactory.create(running=True).source_id)


def job_stuck() -> str:
    job = with_candidate(queued=True)
    set_job(job, f"updated_at = {INFINITY}")
    return str(job.source_id)


def job_stuck_in_a_lease() -> str:
    job = with_candidate(running=True)
    set_job(job, f"lease_expires_at = {INFINITY}")
    return str(job.source_id)


def job_unexplained() -> str:
    return str(with_candidate("retired", last_error_code=None).source_id)


def unsupported() -> str:
    return str(SourceFactory.create(credentials="made-up").pk)


def metadata() -> str:
    return str(SourceFactory.create(bare=True, other={"auth": {"api_key": "made-up"}}).pk)


def plaintext_same() -> str:
    source = make_source()
    in_database("""UPDATE sources SET metadata = '{"credentials": {"token": "made-up"}}' WHERE id = %s""", source.pk)
    return str(source.pk)


def plaintext_differs() -> str:
    source = make_source()
    in_database("""UPDATE sources SET metadata = '{"credentials": {"token": "other"}}' WHERE id = %s""", source.pk)
    return str(source.pk)


CASES: dict[Callable[[], str], FindingClass] = {
    ref_unknown: FindingClass.REF_UNKNOWN,
    ref_misplaced: FindingClass.REF_MISPLACED,
    ref_not_active: FindingClass.REF_NOT_ACTIVE,
    ref_unnamed: FindingClass.REF_UNNAMED,
    ref_claimed: FindingClass.REF_CLAIMED,
    ref_undated: FindingClass.REF_UNDATED,
    ref_stuck_for_ever: FindingClass.REF_STUCK,
    ref_stuck_in_a_reservation: FindingClass.REF_STUCK,
    ref_stuck_in_a_lease: FindingClass.REF_STUCK,
    erasure_unproved: FindingClass.ERASURE_UNPROVED,
    job_in_clear: FindingClass.JOB_IN_CLEAR,
    job_candidate_left: FindingClass.JOB_CANDIDATE_LEFT,
    job_candidate_lost: FindingClass.JOB_CANDIDATE_LOST,
    job_without_a_candidate: FindingClass.JOB_CANDIDATE_LOST,
    job_stuck: FindingClass.JOB_STUCK,
    job_stuck_in_a_lease: FindingClass.JOB_STUCK,
    job_unexplained: FindingClass.JOB_UNEXPLAINED,
    unsupported: FindingClass.UNSUPPORTED,
    metadata: FindingClass.METADATA,
    plaintext_same: FindingClass.PLAINTEXT_SAME,
    plaintext_differs: FindingClass.PLAINTEXT_DIFFERS,
}
each = pytest.mark.parametrize(("make", "what"), CASES.items(), ids=[make.__name__ for make in CASES])


@each
def test_each_class(make: Callable[[], str], what: FindingClass) -> None:
    healthy = make_source()
    source = make()
    (finding,) = found()
    assert (finding.what, finding.tenant, finding.source) == (what, "tenant-a", source)
    assert finding.source != str(healthy.pk)
    assert found(classes=[one for one in FindingClass if one is not what]) == []


@each
def test_another_tenants_is_none_of_this_ones(make: Callable[[], str], what: FindingClass) -> None:
    make()
    here = SpaceFactory.create(tenant_id="tenant-b")
    make_source(here)
    assert found(tenant="tenant-b") == []
    assert found(space=here.pk) == []
    assert classes(tenant="tenant-a") == [what.value]


@each
def test_what_is_right_again_at_the_second_look_is_no_finding(make: Callable[[], str], what: FindingClass) -> None:
    """A rotate or a backfill at that moment, or somebody who writes source and ledger one after the other."""
    source = uuid.UUID(make())

    def put_right() -> None:
        elsewhere(
            ("DELETE FROM source_credential_backfills WHERE source_id = %s", source),
            ("DELETE FROM source_secret_lifecycle_refs WHERE source_id = %s", source),
            ("DELETE FROM sources WHERE id = %s", source),
        )

    walk = {"metadata": "sources", "unsupported": "sources"}.get(what.value, what.value.partition("_")[0])
    part = {
        "ref": "whether the ledger has it as theirs"
        if what in database.NAMED.finds
        else "what is active has its source",
        "erasure": "what is active has its source",
        "job": "what is not over can be claimed",
        "plaintext": "whether the ledger has it as theirs",
        "sources": "credentials that are no object",
    }[walk]
    with before_statement(part, 2, put_right):
        assert what.value not in classes()


def test_a_healthy_database_at_each_step() -> None:
    """What is under way, or a known time away, is no finding."""
    source = make_source()
    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "new"})
    services.revoke_credentials(tenant="tenant-a", source_id=make_source().pk)
    for situation in ("staged", "staged, unused", "candidate", "retired", "retired, due", "deleting", "deleted"):
        add_ref(None, situation)
    add_ref(None, "deleting, expired")
    add_ref(None, "deleted, due")
    add_ref(None, "final")
    with_candidate(queued=True)
    with_candidate(running=True)
    with_candidate("retired")
    # A job that knowledge-fs has given up: its candidate is taken back when its time is over.
    over = with_candidate("candidate")
    set_ref(over.candidate_credential_ref, "recover_after = now() + interval '1 minute'")
    SourceFactory.create()
    # A row that waits for a person, with a reason.
    for columns in ({"attention": Attention.DISPLACED}, {"abandoned_at": "2026-01-01T00:00Z"}):
        row = add_ref(source, "retired", next_delete_at=None)
        SecretObject.objects.filter(pk=row.credential_ref).update(**columns)
    assert found() == []


def test_a_reservation_that_its_source_names_is_active_soon() -> None:
    source = make_source()
    set_ref(ref_of(source), "state = 'staged', recover_after = now() + interval '1 minute'")
    assert found() == []
    set_ref(ref_of(source), "recover_after = now() - interval '1 second'")
    assert classes() == ["ref_not_active"]


def test_what_is_being_deleted_is_nobodys_finding() -> None:
    for make in (plaintext_same, ref_not_active, unsupported, metadata, job_in_clear):
        make()
    in_database("UPDATE sources SET status = 'deleting'")
    assert found() == []


def test_a_moved_source_whose_ledger_row_was_purged_long_ago() -> None:
    """Of a job that is over, the candidate may be rotated away, erased and forgotten."""
    source = make_source()
    JobFactory.create(source=source, succeeded=True)
    assert found() == []


def test_rotates_backfills_and_deletes_meanwhile() -> None:
    sources = [make_source() for _ in range(4)]
    stop, failures = threading.Event(), list[BaseException]()

    def live() -> None:
        try:
            while not stop.is_set():
                for source in sources:
                    services.rotate_credentials(tenant="tenant-a", source_id=source.pk, credentials={"token": "new"})
                gone = make_source(KnowledgeSpace.objects.get(pk=sources[0].knowledge_space_id))
                services.delete_source(tenant="tenant-a", source_id=gone.pk)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            failures.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        for _ in range(10):
            assert found(deep=True) == []
    finally:
        stop.set()
        thread.join()
    assert failures == []


def test_what_was_acknowledged_is_no_finding() -> None:
    one, both = SourceFactory.create(credentials="made-up"), make_source()
    in_database("""UPDATE sources SET metadata = '{"credentials": "made-up"}' WHERE id = %s""", both.pk)
    assert sorted(classes()) == ["plaintext_differs", "unsupported"]
    for source in (one, both):
        Acknowledgement.objects.create(
            source_id=source.pk, shape="string", acknowledged_by="tests", acknowledged_at="2026-01-01T00:00Z"
        )
    assert found() == []


def test_a_ref_that_is_none_is_not_shown() -> None:
    source = bare_source()
    name_ref(source, "canary")
    (finding,) = found()
    assert (finding.what, finding.shown_ref) == (FindingClass.REF_UNKNOWN, "(not a ref: it is not shown)")
    assert "canary" not in str(finding.as_json())


def test_more_than_a_page(monkeypatch: pytest.MonkeyPatch, store: EncryptedStore) -> None:
    space = SpaceFactory.create()
    for _ in range(7):
        make_source(space)
        SourceFactory.create(credentials="made-up", knowledge_space=space)
    in_database("UPDATE source_secret_lifecycle_refs SET delete_attempts = 1")
    run = database.Verification("default")
    run.pages.most = run.pages.size = 3
    run.run()
    assert run.findings.counts == {FindingClass.UNSUPPORTED: 7, FindingClass.REF_CLAIMED: 7}
    assert run.looked_at == {"refs of sources": 7, "refs": 7, "sources": 14}


def test_documents_come_in_parts_and_large_ones_not_at_all(kfs_settings: Any) -> None:
    kfs_settings(BATCH_BYTES=2_000, MAX_SECRET_BYTES=1_000)
    for _ in range(5):
        SourceFactory.create(bare=True, other={"api_key": "x" * 900})
    SourceFactory.create(bare=True, other={"api_key": "x" * 3_000})
    SourceFactory.create(bare=True)
    run = database.Verification("default")
    run.run()
    assert run.findings.counts == {FindingClass.METADATA: 5, FindingClass.METADATA_NOT_READ: 1}
    assert run.looked_at["sources"] == 7


def test_findings_are_counted_and_only_some_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfs_credentials.verification.findings.LISTED", 2)
    for _ in range(5):
        unsupported()
    run = database.Verification("default")
    run.run()
    assert run.findings.total == 5
    assert [type(finding) for finding in run.findings.listed()] == [Finding, Finding]


def test_a_statement_that_takes_too_long_is_made_smaller(store: EncryptedStore) -> None:
    """As many rows as the server allows in its time; what was found before stays found."""
    make_source()
    sizes = []
    pages = database.Verification("default").pages

    def read(limit: int) -> int:
        sizes.append(limit)
        if limit > 500:
            in_database("SELECT set_config('statement_timeout', '1ms', true)")
            in_database("SELECT pg_sleep(10)")
        return limit

    assert pages.read(read) == 500
    assert sizes == [2000, 1000, 500]


def test_it_writes_nothing_and_waits_for_nobody() -> None:
    """A row that somebody has locked is looked at all the same."""
    source = make_source()
    ref_not_active()
    other = connections.create_connection("default")
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute(
                "LOCK TABLE sources, source_secret_lifecycle_refs, source_credential_backfills IN SHARE MODE"
            )
            cursor.execute("SELECT FROM sources WHERE id = %s FOR UPDATE", [source.pk])
            assert classes() == ["ref_not_active"]
    finally:
        other.close()


def test_only_own_rows_are_counted_where_a_tenant_is_chosen() -> None:
    make_source()
    here = make_source(SpaceFactory.create(tenant_id="tenant-b"))
    run = database.Verification("default", tenant="tenant-b")
    run.run()
    assert run.looked_at == {"refs of sources": 1, "refs": 1, "sources": 1}
    assert of_ref(ref_of(here)).tenant_id == "tenant-b"
    assert LedgerRow.objects.count() == 2
