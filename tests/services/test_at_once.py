"""Several at work on one source, each on a thread and a connection of its own: one after the other, or one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from django.db import OperationalError, transaction
from django.utils import timezone

from kfs_credentials import services
from kfs_credentials.backfill import Backfill
from kfs_credentials.batch import Move
from kfs_credentials.errors import KfsCredentialsError, NoCredentials, SourceNotFound, VersionConflict
from kfs_credentials.models import (
    KnowledgeSpace,
    RefState,
    RunState,
    Source,
    SourceCredentialBackfill,
    SourceSecretLifecycleRef,
)
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.services.conftest import (
    NEW,
    OLD,
    TENANT,
    after_put,
    before_statement,
    create,
    elsewhere,
    execute,
    meet_after_put,
    plaintext_left,
    put,
    resolve,
    rotate,
    row_of,
    states,
    together,
)

pytestmark = pytest.mark.django_db(transaction=True)

BEFORE_ANY_LOCK, UNDER_THE_LOCK = "FOR NO KEY UPDATE OF", "FOR NO KEY UPDATE OF src NOWAIT"


def revoke(source: Source) -> Source:
    return services.revoke_credentials(tenant=TENANT, source_id=source.pk)


# Two services.


def test_of_two_rotates_that_expect_the_same_version_one_wins(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's ref stays reserved, and the cleanup takes it back."""
    meet_after_put(store, monkeypatch)
    values = [{"token": "one"}, {"token": "two"}]
    outcomes = together(*[lambda value=value: rotate(source, value, expected_version=1) for value in values])
    (winner,) = [place for place, outcome in enumerate(outcomes) if isinstance(outcome, Source)]
    assert isinstance(outcomes[1 - winner], VersionConflict), outcomes
    assert (outcomes[winner].version, resolve(source)) == (2, values[winner])
    assert states() == ["active", "retired", "staged"]
    assert check_invariants("default", store) == []


def test_two_rotates_that_expect_no_version_both_succeed(
    source: Source, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, and each retires the ref that it finds."""
    meet_after_put(store, monkeypatch)
    values = [{"token": "one"}, {"token": "two"}]
    outcomes = together(*[lambda value=value: rotate(source, value) for value in values])
    assert [type(outcome) for outcome in outcomes] == [Source, Source]
    assert Source.objects.get().version == 3
    assert resolve(source) in values
    assert states() == ["active", "retired", "retired"]
    assert check_invariants("default", store) == []


def test_many_of_everything(space: KnowledgeSpace, store: EncryptedStore) -> None:
    """Whoever comes too late is told so, in one of our errors, and nothing is lost."""
    source = create(space)
    works: list[Callable[[], object]] = [
        lambda: rotate(source, {"token": "one"}),
        lambda: rotate(source, {"token": "two"}, expected_version=1),
        lambda: revoke(source),
        lambda: rotate(source, {"token": "three"}, operation_id="same"),
        lambda: rotate(source, {"token": "three"}, operation_id="same"),
        lambda: services.resolve_credentials(tenant=TENANT, source_id=source.pk),
    ]
    for outcome in together(*works):
        assert not isinstance(outcome, BaseException) or isinstance(outcome, KfsCredentialsError), outcome
    named = Source.objects.get().credential_ref
    active = SourceSecretLifecycleRef.objects.filter(state=RefState.ACTIVE).values_list("credential_ref", flat=True)
    assert list(active) == [named] * (named is not None)
    assert check_invariants("default", store) == []


def test_a_rotate_between_the_look_and_the_lock_of_a_revoke(source: Source, store: EncryptedStore) -> None:
    with before_statement(BEFORE_ANY_LOCK, lambda: elsewhere(lambda: rotate(source))):
        assert revoke(source).version == 3
    assert states() == ["retired", "retired"]
    assert check_invariants("default", store) == []


def test_a_revoke_between_the_look_and_the_lock_of_a_rotate(source: Source, store: EncryptedStore) -> None:
    with before_statement(BEFORE_ANY_LOCK, lambda: elsewhere(lambda: revoke(source))):
        assert rotate(source).version == 3
    assert (resolve(source), states()) == (NEW, ["active", "retired"])
    assert check_invariants("default", store) == []


def test_a_delete_by_raw_sql_between_the_look_and_the_lock(source: Source) -> None:
    delete = before_statement(UNDER_THE_LOCK, lambda: elsewhere(lambda: execute("DELETE FROM sources")))
    with delete, pytest.raises(SourceNotFound):
        revoke(source)
    assert states() == ["active"]


@pytest.mark.parametrize(
    ("act", "statement"),
    [(lambda source: create(source.knowledge_space), "INSERT INTO"), (rotate, "UPDATE")],
    ids=["create", "rotate"],
)
def test_a_reservation_cannot_be_taken_back_while_it_is_used(
    source: Source, act: Callable[[Source], object], statement: str
) -> None:
    def take_back() -> None:
        with transaction.atomic(), pytest.raises(OperationalError, match="could not obtain lock"):
            list(SourceSecretLifecycleRef.objects.filter(state=RefState.STAGED).lock(nowait=True))

    with before_statement(f"{statement} sources", lambda: elsewhere(take_back)):
        act(source)
    assert "staged" not in states()


# A service and the backfill.


@pytest.fixture
def legacy(space: KnowledgeSpace) -> Source:
    """A source whose credentials lie in clear."""
    return SourceFactory.create(knowledge_space=space, credentials=OLD)


def check_rotated(source: Source, store: EncryptedStore, version: int) -> None:
    assert (resolve(source), Source.objects.get().version, plaintext_left()) == (NEW, version, 0)
    assert SourceCredentialBackfill.objects.get().run_state == RunState.SUCCEEDED
    assert Counter(states())["active"] == 1
    assert check_invariants("default", store) == []


def test_a_rotate_before_a_running_job_activates(legacy: Source, steps: Backfill, store: EncryptedStore) -> None:
    batch = put(steps)
    rotate(legacy)
    assert steps.settle(batch) == {Move.ABANDON: 1}
    assert states() == ["active", "retired"]
    check_rotated(legacy, store, 2)


def test_a_running_job_that_activates_before_a_rotate_does(
    legacy: Source, steps: Backfill, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have put their values. The one that was moved is retired like any other."""
    batch = put(steps)
    after_put(store, monkeypatch, lambda: steps.settle(batch))
    rotate(legacy)
    assert states() == ["active", "retired"]
    assert row_of(batch.items[0].ref).state == RefState.RETIRED
    check_rotated(legacy, store, 3)


def test_a_running_job_that_activates_while_a_rotate_is_about_to(
    legacy: Source, steps: Backfill, store: EncryptedStore
) -> None:
    """Between the rotation's look and its lock: it looks again, and retires what it finds by then."""
    batch = put(steps)
    with before_statement(UNDER_THE_LOCK, lambda: elsewhere(lambda: steps.settle(batch))):
        rotate(legacy)
    assert row_of(batch.items[0].ref).state == RefState.RETIRED
    check_rotated(legacy, store, 3)


def test_a_version_that_the_job_has_changed_is_a_conflict(
    legacy: Source, steps: Backfill, store: EncryptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = put(steps)
    after_put(store, monkeypatch, lambda: steps.settle(batch))
    with pytest.raises(VersionConflict):
        rotate(legacy, expected_version=1)
    assert (resolve(legacy), states(), plaintext_left()) == (OLD, ["active", "staged"], 0)


def test_a_rotate_while_the_job_settles(legacy: Source, steps: Backfill, store: EncryptedStore) -> None:
    """Whoever of the two has the rows first."""
    batch = put(steps)
    rotated, settled = together(lambda: rotate(legacy), lambda: steps.settle(batch))
    assert isinstance(rotated, Source), rotated
    assert set(settled) <= {Move.ABANDON, Move.ACTIVATE, Move.RELEASE}
    if settled == {Move.RELEASE: 1}:
        again = steps.claim(1)
        assert again is not None
        assert steps.settle(again) == {Move.ABANDON: 1}
    check_rotated(legacy, store, rotated.version)


def test_a_job_that_waits_ends_without_harm(legacy: Source, steps: Backfill, store: EncryptedStore) -> None:
    batch = steps.discover(1)
    assert batch is not None
    steps.release(batch)
    rotate(legacy)
    assert put_and_settle(steps) == {Move.ABANDON: 1}
    check_rotated(legacy, store, 2)


def test_a_revoke_before_a_running_job_activates(legacy: Source, steps: Backfill, store: EncryptedStore) -> None:
    batch = put(steps)
    revoke(legacy)
    assert steps.settle(batch) == {Move.ABANDON: 1}
    assert (states(), plaintext_left()) == (["retired"], 0)
    with pytest.raises(NoCredentials):
        resolve(legacy)
    assert check_invariants("default", store) == []


def test_a_running_job_that_activates_while_a_revoke_is_about_to(
    legacy: Source, steps: Backfill, store: EncryptedStore
) -> None:
    batch = put(steps)
    with before_statement(UNDER_THE_LOCK, lambda: elsewhere(lambda: steps.settle(batch))):
        assert revoke(legacy).version == 3
    assert (states(), plaintext_left()) == (["retired"], 0)
    assert check_invariants("default", store) == []


def test_a_job_that_failed_before_a_rotation_is_not_retried(
    legacy: Source, steps: Backfill, store: EncryptedStore
) -> None:
    put(steps)
    SourceCredentialBackfill.objects.update(
        run_state=RunState.FAILED,
        completed_at=timezone.now(),
        **dict.fromkeys(("worker_id", "lease_token", "lease_expires_at", "heartbeat_at")),
    )
    SourceSecretLifecycleRef.objects.all().retire()
    rotate(legacy)
    check_rotated(legacy, store, 2)


def put_and_settle(steps: Backfill) -> Counter[Move]:
    batch = steps.claim(1)
    assert batch is not None
    steps.start_put(batch)
    steps.finish_put(batch)
    return steps.settle(batch)
