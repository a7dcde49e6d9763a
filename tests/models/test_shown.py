"""What our models show of themselves: names, ids and states (LL-06)."""

import copy
import json
import pickle
import uuid
from typing import Any

import pytest
from django.apps import apps
from django.core import serializers
from django.core.serializers.json import DjangoJSONEncoder
from django.forms.models import model_to_dict

from kfs_credentials import models
from tests.factories import SourceFactory

CANARY = "made-up-canary"
REF = "source-secret:v1:b0000000-0000-4000-8000-000000000001"
SHORT_REF = "source-secret:v1:b0000000…"
ID = uuid.UUID("a0000000-0000-4000-8000-000000000001")

# One of each, with the canary in every column that may hold text from outside.
SOURCE = models.Source(id=ID, name="Handbook", uri=CANARY, metadata={"credentials": {"a": CANARY}}, credential_ref=REF)
ROWS = {
    "Handbook": SOURCE,
    "Space (tenant-a)": models.KnowledgeSpace(id=ID, tenant_id="tenant-a", name="Space", description=CANARY),
    f"{ID} (failed)": models.SourceCredentialBackfill(
        id=ID, source=SOURCE, run_state="failed", secret_fingerprint=CANARY, last_error_message=CANARY
    ),
    f"{SHORT_REF} (active)": models.SourceSecretLifecycleRef(
        id=ID, credential_ref=REF, state="active", last_error_message=CANARY
    ),
    SHORT_REF: models.SecretObject(credential_ref=REF, store=CANARY, abandoned_by=CANARY, abandoned_reason=CANARY),
    f"{ID} (string)": models.Acknowledgement(source_id=ID, shape="string", acknowledged_by=CANARY),
    "sweep": models.Round(name=models.Round.SWEEP, worker_id=CANARY),
    f"default ({ID})": models.Binding(store="default", environment_id=ID, bound_by=CANARY),
    "ada: see https://[hidden]@host": models.Pause(paused_by="ada", reason=f"see https://user:{CANARY}@host"),
    "0123456789abcdef": models.ClosedKey(key_id="0123456789abcdef", closed_by=CANARY),
    "retired": models.Event(kind="retired", actor=CANARY, credential_ref=REF, detail=CANARY),
    "cleanup": models.Tick(role="cleanup", worker_id=CANARY),
    "cleanup: paused": models.Refusal(role="cleanup", reason="paused"),
    "reencrypt": models.Checkpoint(name="reencrypt", position=CANARY, data={"a": CANARY}),
}


@pytest.mark.parametrize(("text", "row"), ROWS.items(), ids=[type(row).__name__ for row in ROWS.values()])
def test_str_and_repr(text: str, row: object) -> None:
    assert str(row) == f"{row}" == text
    assert repr(row) == f"<{type(row).__name__}: {text}>"
    assert CANARY not in repr([row])


def test_every_model_is_shown_here() -> None:
    assert {type(row) for row in ROWS.values()} == set(apps.get_app_config("kfs_credentials").get_models())


@pytest.mark.django_db
def test_a_queryset_shows_names_only() -> None:
    SourceFactory.create(name="Handbook", credentials={"a": CANARY})
    assert repr(models.Source.objects.all()) == "<SourceQuerySet [<Source: Handbook>]>"
    assert CANARY not in str(models.Source.objects.legacy().query)


@pytest.mark.django_db
@pytest.mark.filterwarnings("ignore::kfs_credentials.errors.CredentialsInClearWarning")
def test_what_a_copy_shows_before_and_after_the_backfill() -> None:
    """A source that has not been moved holds its credentials in clear, and so does whatever copies its row."""
    source = SourceFactory.create(credentials={"access_token": CANARY})
    copies = (
        lambda: serializers.serialize("json", models.Source.objects.all()),
        lambda: repr(model_to_dict(models.Source.objects.get())),
        lambda: repr(list(models.Source.objects.values())),
        lambda: repr(pickle.dumps(models.Source.objects.get())),
        lambda: repr(vars(copy.deepcopy(models.Source.objects.get()))),
    )
    assert all(CANARY in make() for make in copies)

    # Afterwards there is nothing to show but the ref.
    models.Source.objects.update(metadata={"title": "Handbook"})
    assert not any(CANARY in make() for make in copies)
    assert f"{source.pk}" in copies[0]()


SHAPES: list[Any] = [
    {"title": "Handbook", "credentials": {"access_token": CANARY}},
    {"title": "Handbook", "credentials": CANARY},
    {"title": "Handbook", "credentials": [CANARY, {"deep": CANARY}]},
    {"title": "Handbook", "auth": {"api_key": CANARY}, "link": f"https://user:{CANARY}@host"},
    {"title": "Handbook", "document": json.dumps({"credentials": {"access_token": CANARY}})},
    [{"title": "Handbook", "credentials": {"access_token": CANARY}}],
]


@pytest.mark.django_db
@pytest.mark.parametrize("metadata", SHAPES)
def test_what_is_made_for_an_api_shows_no_secret(metadata: Any) -> None:
    SourceFactory.create(
        metadata=metadata,
        name=f"https://user:{CANARY}@host",
        uri=f"https://host/?sig={CANARY}",
        permission_scope=SHAPES,
    )
    source = models.Source.objects.get()
    source.credential_ref = REF
    shown = json.dumps(source.shown(), cls=DjangoJSONEncoder)
    assert CANARY not in shown
    assert REF not in shown
    assert "Handbook" in shown
    assert str(source.pk) in shown


def test_what_is_made_for_an_api_has_every_column_but_the_ref() -> None:
    columns = {field.name for field in models.Source._meta.concrete_fields}
    assert set(SOURCE.shown()) - {"has_credentials"} == columns - {"credential_ref"}


@pytest.mark.parametrize(
    ("metadata", "ref", "expected"),
    [
        ({}, None, False),
        ({"credentials": None}, None, False),
        ({"credentials": {}}, None, True),
        ({"credentials": "text"}, None, True),
        ({}, REF, True),
        ([], None, False),
    ],
)
def test_what_is_made_for_an_api_says_whether_there_are_credentials(
    metadata: Any, ref: str | None, expected: bool
) -> None:
    assert models.Source(metadata=metadata, credential_ref=ref).shown()["has_credentials"] is expected


@pytest.mark.django_db
def test_forms_leave_the_ref_out() -> None:
    SourceFactory.create()
    assert "credential_ref" not in model_to_dict(models.Source.objects.get())


def test_only_sources_has_columns_that_could_hold_credentials() -> None:
    for row in ROWS.values():
        kinds = {field.get_internal_type() for field in type(row)._meta.concrete_fields}
        # A checkpoint holds counts and ids of our own.
        expected = isinstance(row, models.Source | models.Checkpoint)
        assert bool(kinds & {"JSONField", "BinaryField"}) == expected
