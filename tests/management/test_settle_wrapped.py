"""`settle_unsupported_credentials --wrap`: which ones, what it says, and its exit codes."""

from __future__ import annotations

import uuid
from decimal import Decimal
from typing import Any

import pytest

from kfs_credentials import services
from kfs_credentials.errors import NotAsSaid, SecretIntegrityError, SecretStoreError, StoreUnavailable
from kfs_credentials.models import Acknowledgement, Event, Source
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import in_database
from tests.factories import SourceFactory, SpaceFactory
from tests.management.commands import Run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

SETTLE = "settle_unsupported_credentials"
BY_ITS_ID = "What is acknowledged already is moved where its id is given."


def source(number: int, credentials: object, **values: object) -> Source:
    return SourceFactory.create(id=uuid.UUID(int=number), credentials=credentials, **values)


def resolved(made: Source) -> dict[str, Any]:
    return dict(services.resolve_credentials(tenant="tenant-a", source_id=made.pk))


def test_all(run: Run) -> None:
    made = [source(1, "canary"), source(2, 7), source(3, ["canary"]), source(4, False)]
    whole = source(5, {"token": "made-up"})
    outcome = run(SETTLE, "--all", "--wrap", "value", "--by", "Security team")
    assert (outcome.code, outcome.out, outcome.err) == (0, "4 moved into the secret store.\n", "")
    assert [resolved(one) for one in made] == [
        {"value": "canary"},
        {"value": 7},
        {"value": ["canary"]},
        {"value": False},
    ]
    assert Source.objects.get(pk=whole.pk).credential_ref is None
    assert set(Event.objects.filter(kind="scrubbed").values_list("actor", flat=True)) == {"Security team"}
    assert run(SETTLE, "--all", "--wrap", "value").out == f"0 moved into the secret store. {BY_ITS_ID}\n"
    assert run("verify_credentials", "--deep").code == 0


def test_every_digit_is_kept(run: Run) -> None:
    made = source(1, 0)
    in_database("""UPDATE sources SET metadata = '{"credentials": 123456789012345678.9012345678901}'""")
    assert run(SETTLE, made.pk, "--wrap", "pin").code == 0
    assert resolved(made) == {"pin": Decimal("123456789012345678.9012345678901")}


def test_one_by_its_id_and_again(run: Run) -> None:
    one, two = source(1, "a"), source(2, "b")
    assert run(SETTLE, one.pk, "--wrap", "token").out == "1 moved into the secret store.\n"
    outcome = run(SETTLE, one.pk, two.pk, "--wrap", "token")
    assert (outcome.code, outcome.out) == (0, "1 moved into the secret store, 1 moved before.\n")
    assert resolved(one) == {"token": "a"}
    assert Source.objects.get(pk=one.pk).version == 2


def test_an_acknowledged_one_by_its_id_alone(run: Run) -> None:
    made = source(1, "a")
    assert run(SETTLE, "--all").code == 0
    assert run(SETTLE, "--all", "--wrap", "token").out == f"0 moved into the secret store. {BY_ITS_ID}\n"
    assert run(SETTLE, made.pk, "--wrap", "token").out == "1 moved into the secret store.\n"
    assert not Acknowledgement.objects.exists()


def test_a_shape_a_tenant_and_a_dry_run(run: Run) -> None:
    source(1, "a")
    source(2, 7)
    source(3, "a", knowledge_space=SpaceFactory.create(tenant_id="tenant-b"))
    outcome = run(SETTLE, "--all", "--wrap", "token", "--dry-run", "--tenant", "tenant-a")
    assert outcome.last_line == "2 to move (1 number, 1 string). Nothing was changed."
    assert run(SETTLE, "--all", "--wrap", "t", "--shape", "number").out == "1 moved into the secret store.\n"
    outcome = run(SETTLE, "--all", "--wrap", "t", "--tenant", "tenant-b", "--format", "json")
    assert outcome.json == {"wrapped": 1, "before": 0, "left": []}
    assert Source.objects.referenced().count() == 2


def test_too_large_ones_are_refused_and_the_others_go_on(run: Run) -> None:
    large, small = source(1, "canary" * 20_000), source(2, "a")
    outcome = run(SETTLE, "--all", "--wrap", "token")
    assert outcome.code == 3
    assert outcome.out.splitlines() == [
        f"{large.pk}  larger than MAX_SECRET_BYTES",
        (
            "1 moved into the secret store. Left in clear: 1 larger than MAX_SECRET_BYTES. "
            "Correct that, then run this again."
        ),
    ]
    assert Source.objects.get(pk=large.pk).metadata["credentials"] == "canary" * 20_000
    assert resolved(small) == {"token": "a"}
    outcome = run(SETTLE, "--all", "--wrap", "token", "--format", "json")
    assert outcome.json["left"] == [{"source": str(large.pk), "reason": "too large"}]


@pytest.mark.parametrize("key", ["", " ", "a\nb", "x" * 201, "\udcff", "nul\x00"])
def test_a_key_that_is_none(run: Run, key: str) -> None:
    source(1, "a")
    outcome = run(SETTLE, "--all", "--wrap", key)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "CommandError: --wrap needs a key: printable text of at most 200 characters, not blank. Nothing was touched.\n"
    )


def test_what_cannot_be_wrapped(run: Run) -> None:
    whole, nobody = source(1, {"token": "made-up"}), uuid.UUID(int=2)
    outcome = run(SETTLE, whole.pk, nobody, "--wrap", "token")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        f"CommandError: Nothing to wrap at: {whole.pk}, {nobody}. Nothing was touched; "
        f"`manage.py {SETTLE} --all --dry-run` lists what there is.\n"
    )
    outcome = run(SETTLE, "--all", "--wrap", "token", "--shape", "too_large")
    assert outcome.err == (
        "CommandError: What is too large stays too large when it is wrapped: raise MAX_SECRET_BYTES.\n"
    )


def test_another_tenants_is_none(run: Run) -> None:
    made = source(1, "a")
    SpaceFactory.create(tenant_id="tenant-b")
    outcome = run(SETTLE, made.pk, "--wrap", "token", "--tenant", "tenant-b")
    assert outcome.code == 1
    assert f"Nothing to wrap at: {made.pk}." in outcome.err


ALONE = [
    NotAsSaid("it gives nothing back"),
    SecretIntegrityError("damaged"),
    SecretStoreError("the file cannot be written"),
]


@pytest.mark.parametrize("problem", ALONE, ids=lambda problem: type(problem).__name__)
def test_one_that_the_store_does_not_take_is_told_of_and_the_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: SecretStoreError
) -> None:
    made = [source(number + 1, "canary") for number in range(3)]
    real = EncryptedStore._put_many

    def put_many(self: EncryptedStore, entries: Any, **options: Any) -> Any:
        return [
            problem if entry.scope.source_id == str(made[1].pk) else real(self, [entry], **options)[0]
            for entry in entries
        ]

    monkeypatch.setattr(EncryptedStore, "_put_many", put_many)
    outcome = run(SETTLE, "--all", "--wrap", "token")
    assert outcome.code == 3
    assert outcome.out.splitlines() == [
        f"{made[1].pk}  not taken by the secret store: the log says why",
        (
            "2 moved into the secret store. Left in clear: 1 not taken by the secret store: the log says why. "
            "Correct that, then run this again."
        ),
    ]
    assert f"what lies in clear in source {made[1].pk} is left there: {problem}" in caplog.text
    assert "canary" not in caplog.text
    assert Source.objects.get(pk=made[1].pk).metadata["credentials"] == "canary"
    monkeypatch.undo()
    assert run(SETTLE, "--all", "--wrap", "token").out == "1 moved into the secret store.\n"


def test_a_store_that_goes_away(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        source(number + 1, "a")
    real, calls = EncryptedStore._put_many, [0]

    def put_many(self: EncryptedStore, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise StoreUnavailable("no answer")
        return real(self, *arguments, **options)

    monkeypatch.setattr(EncryptedStore, "_put_many", put_many)
    outcome = run(SETTLE, "--all", "--wrap", "token")
    assert (outcome.code, outcome.out) == (5, "")
    assert outcome.err == (
        "Up to here: 1 moved into the secret store.\nCommandError: The secret store is out of reach: no answer\n"
    )
    assert run(SETTLE, "--all", "--wrap", "token").out == "2 moved into the secret store.\n"
