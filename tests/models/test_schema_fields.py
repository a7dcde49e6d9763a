"""The fields and indexes that the seed has and Django lacks."""

import uuid

import pytest
from django.apps import apps
from django.core import checks
from django.db import connection, models
from django.db.models.functions import Now

from kfs_credentials.models import KnowledgeSpace, Source, SourceCredentialBackfill
from kfs_credentials.models.schema import ExactJSONDecoder, ExactJSONEncoder, FixedCharField, SeedIndex
from tests.factories import SourceFactory


def job_of(source: Source, fingerprint: str) -> SourceCredentialBackfill:
    return SourceCredentialBackfill.objects.create(
        tenant_id=source.knowledge_space.tenant_id,
        knowledge_space=source.knowledge_space,
        source=source,
        source_version=1,
        candidate_credential_ref=f"source-secret:v1:{uuid.uuid4()}",
        secret_fingerprint=fingerprint,
        run_state="queued",
        retry_count=0,
        row_version=0,
        created_at=Now(),
        updated_at=Now(),
    )


def test_long_names_of_indexes_pass_the_checks() -> None:
    """Django allows an Index 30 characters (models.E034); PostgreSQL takes 63, and the seed uses 42."""
    names = [index.name for model in apps.get_models() for index in model._meta.indexes]
    assert 42 <= max(len(name) for name in names) <= SeedIndex.max_name_length == 63
    assert checks.run_checks(tags=[checks.Tags.models]) == []


def test_a_column_of_a_fixed_length() -> None:
    field = FixedCharField(max_length=64)
    assert field.db_type(connection) == "char(64)"
    *_, path, arguments, options = field.deconstruct()
    assert (path, arguments, options) == ("kfs_credentials.models.schema.FixedCharField", [], {"max_length": 64})


@pytest.mark.django_db
def test_fingerprints_are_found_by_the_index_of_their_column() -> None:
    job = job_of(SourceFactory.create(), "0f" * 32)
    short = job_of(SourceFactory.create(), "0f")
    jobs = SourceCredentialBackfill.objects
    assert jobs.get(secret_fingerprint="0f" * 32) == job
    assert jobs.get(secret_fingerprint__in=["0f" * 32, "1f" * 32]) == job
    assert jobs.get(secret_fingerprint="0f") == short
    short.refresh_from_db()
    assert short.secret_fingerprint == "0f" + " " * 62  # padded, as PostgreSQL does
    assert "::text" not in str(jobs.filter(secret_fingerprint="0f").query)


def test_a_json_column_says_how_it_is_read_and_written() -> None:
    for name in ("metadata", "permission_scope"):
        field = Source._meta.get_field(name)
        assert isinstance(field, models.JSONField)
        assert (field.encoder, field.decoder) == (ExactJSONEncoder, ExactJSONDecoder)


@pytest.mark.django_db
def test_lookups_inside_json_columns() -> None:
    big = 9007199254740993
    source = SourceFactory.create(credentials={"id": big}, other={"tags": ["a"]})
    SourceFactory.create(credentials={"id": big - 1}, other={"tags": []})
    assert Source.objects.get(metadata__credentials__id=big) == source
    assert Source.objects.get(metadata__contains={"tags": ["a"]}) == source
    assert Source.objects.get(metadata__tags__0="a") == source
    assert list(Source.objects.order_by("name").values_list("metadata__credentials__id", flat=True)) == [big, big - 1]


@pytest.mark.django_db
def test_the_database_deletes_what_hangs_on_a_source_or_a_space() -> None:
    """Its foreign keys cascade, and Django does not collect anything first."""
    first, second = SourceFactory.create(), SourceFactory.create()
    job_of(first, "0f" * 32)
    job_of(second, "0f" * 32)
    first.delete()
    assert SourceCredentialBackfill.objects.get().source == second
    KnowledgeSpace.objects.all().delete()
    assert not Source.objects.exists()
    assert not SourceCredentialBackfill.objects.exists()
