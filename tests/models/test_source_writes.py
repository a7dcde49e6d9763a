"""`credential_ref` is never written through the model: only the state machines move refs."""

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core import serializers
from django.db import DatabaseError, IntegrityError, connection
from django.db.models import F, Value
from django.test.utils import CaptureQueriesContext

from kfs_credentials.models import KnowledgeSpace, Source
from tests.factories import SourceFactory, SpaceFactory

pytestmark = pytest.mark.django_db

REFUSED = (
    "Source.credential_ref is never written through the model: a stale object would bring back an old ref and lose a "
    "secret. Leave it out; the backfill and the services move refs."
)


def new_ref() -> str:
    return f"source-secret:v1:{uuid.uuid4()}"


def set_ref(source: Source, ref: str | None) -> None:
    """Move the ref as the state machines do: by SQL."""
    with connection.cursor() as cursor:
        cursor.execute("UPDATE sources SET credential_ref = %s WHERE id = %s", [ref, source.pk])


def ref_of(source: Source) -> str | None:
    return Source.objects.values_list("credential_ref", flat=True).get(pk=source.pk)


@pytest.fixture
def source() -> Source:
    return SourceFactory.create()


class TestSave:
    @pytest.mark.parametrize("options", [{}, {"force_update": True}, {"using": "default"}])
    def test_a_stale_object_does_not_bring_back_the_old_ref(self, source: Source, options: dict[str, Any]) -> None:
        old, new = new_ref(), new_ref()
        set_ref(source, old)
        stale = Source.objects.get(pk=source.pk)
        assert stale.credential_ref == old
        set_ref(source, new)
        stale.name = "Renamed"
        stale.save(**options)
        assert ref_of(source) == new
        assert Source.objects.get(pk=source.pk).name == "Renamed"

    @pytest.mark.parametrize("gone", [None, "source-secret:v1:b0000000-0000-4000-8000-000000000001"])
    def test_an_object_read_before_there_was_a_ref_does_not_remove_it(self, source: Source, gone: str | None) -> None:
        new = new_ref()
        set_ref(source, new)
        source.credential_ref = gone
        source.save()
        assert ref_of(source) == new

    def test_every_other_column_is_written(self, source: Source) -> None:
        other = SourceFactory.build(knowledge_space=SpaceFactory.create(), metadata={"a": 1}, version=41)
        for field in Source._meta.concrete_fields:
            if field.name not in ("id", "credential_ref"):
                setattr(source, field.attname, getattr(other, field.attname))
        source.save()
        written = Source.objects.get(pk=source.pk)
        for field in Source._meta.concrete_fields:
            if field.name != "id":
                assert getattr(written, field.attname) == getattr(other, field.attname), field.name

    def test_asking_for_the_ref_is_refused(self, source: Source) -> None:
        with pytest.raises(ValueError, match="never written") as caught:
            source.save(update_fields=["name", "credential_ref"])
        assert str(caught.value) == REFUSED

    def test_a_generator_of_names(self, source: Source) -> None:
        source.name = "Renamed"
        source.save(update_fields=(name for name in ["name"]))
        assert Source.objects.get(pk=source.pk).name == "Renamed"

    def test_a_new_object_with_a_ref_is_refused(self) -> None:
        fresh = SourceFactory.build(knowledge_space=SpaceFactory.create(), credential_ref=new_ref())
        with pytest.raises(ValueError, match="never written") as caught:
            fresh.save()
        assert str(caught.value) == REFUSED
        assert not Source.objects.exists()

    def test_a_new_object_never_overwrites_a_row(self, source: Source) -> None:
        ref = new_ref()
        set_ref(source, ref)
        twin = SourceFactory.build(pk=source.pk, knowledge_space=source.knowledge_space)
        twin.save(force_update=True)
        assert ref_of(source) == ref
        with pytest.raises(IntegrityError, match="sources_pkey"):
            SourceFactory.build(pk=source.pk, knowledge_space=source.knowledge_space).save()

    def test_a_copy_has_no_ref(self, source: Source) -> None:
        set_ref(source, new_ref())
        copy = Source.objects.get(pk=source.pk)
        copy.pk = uuid.uuid4()
        with pytest.raises(ValueError, match="never written"):
            copy.save(force_insert=True)
        copy.credential_ref = None
        copy.save(force_insert=True)
        assert ref_of(copy) is None
        assert Source.objects.count() == 2

    def test_deferred_columns_stay(self, source: Source) -> None:
        set_ref(source, new_ref())
        for loaded in (Source.objects.defer("metadata", "credential_ref"), Source.objects.only("name")):
            partial = loaded.get(pk=source.pk)
            Source.objects.update(uri="https://files.example/meanwhile", metadata={"meanwhile": True})
            partial.name = "Renamed"
            with CaptureQueriesContext(connection) as queries:
                partial.save()
            (update,) = [query["sql"] for query in queries if query["sql"].startswith("UPDATE")]
            assert "credential_ref" not in update
            assert "metadata" not in update
        assert Source.objects.get(pk=source.pk).metadata == {"meanwhile": True}

    def test_nothing_but_the_key_is_loaded(self, source: Source) -> None:
        Source.objects.only("pk").get(pk=source.pk).save()

    def test_a_row_that_is_gone_is_not_made_again(self, source: Source) -> None:
        Source.objects.filter(pk=source.pk).delete()
        with pytest.raises(DatabaseError, match="did not affect any rows"):
            source.save()

    def test_names_by_position_are_not_taken(self, source: Source) -> None:
        with pytest.raises(TypeError):
            source.save(False, False, None, ["credential_ref"])  # type: ignore[call-arg, arg-type]


def awaited(coroutine: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await coroutine

    return async_to_sync(wait)()


WRITES: dict[str, Callable[[Source], object]] = {
    "update": lambda source: Source.objects.update(credential_ref=new_ref()),
    "update to NULL": lambda source: Source.objects.filter(pk=source.pk).update(name="x", credential_ref=None),
    "update from a column": lambda source: Source.objects.update(credential_ref=F("uri")),
    "update of a space's sources": lambda source: source.knowledge_space.sources.update(credential_ref=Value("x")),
    "aupdate": lambda source: awaited(Source.objects.aupdate(credential_ref=None)),
    "bulk_update": lambda source: Source.objects.bulk_update([source], ["name", "credential_ref"]),
    "bulk_update, generator": lambda source: Source.objects.bulk_update([source], (n for n in ["credential_ref"])),
    "abulk_update": lambda source: awaited(Source.objects.abulk_update([source], ["credential_ref"])),
    "bulk_create": lambda source: Source.objects.bulk_create([fresh(source), fresh(source, new_ref())]),
    "bulk_create, generator": lambda source: Source.objects.bulk_create(fresh(source, new_ref()) for _ in range(2)),
    "bulk_create, conflicts": lambda source: Source.objects.bulk_create(
        [source], update_conflicts=True, unique_fields=["id"], update_fields=["name", "credential_ref"]
    ),
    "abulk_create": lambda source: awaited(Source.objects.abulk_create([fresh(source, new_ref())])),
    "create": lambda source: Source.objects.create(**columns(source), credential_ref=new_ref()),
    "get_or_create": lambda source: Source.objects.get_or_create(
        pk=uuid.uuid4(), defaults={**columns(source), "credential_ref": new_ref()}
    ),
    "update_or_create": lambda source: Source.objects.update_or_create(
        pk=source.pk, defaults={"credential_ref": new_ref()}
    ),
    "a space's create": lambda source: source.knowledge_space.sources.create(
        **columns(source), credential_ref=new_ref()
    ),
    "asave": lambda source: awaited(source.asave(update_fields=["credential_ref"])),
}


def columns(source: Source) -> dict[str, Any]:
    left_out = ("id", "credential_ref", "knowledge_space")
    values = {f.name: getattr(source, f.name) for f in Source._meta.concrete_fields if f.name not in left_out}
    return values | {"knowledge_space": source.knowledge_space}


def fresh(source: Source, ref: str | None = None) -> Source:
    return Source(**columns(source), credential_ref=ref)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_other_writes_of_the_ref_are_refused(source: Source, write: Callable[[Source], object]) -> None:
    ref = new_ref()
    set_ref(source, ref)
    with pytest.raises(ValueError, match="never written") as caught:
        write(source)
    assert str(caught.value) == REFUSED
    assert ref not in str(caught.value)
    assert list(Source.objects.values_list("pk", "credential_ref")) == [(source.pk, ref)]


def test_bulk_create_takes_the_fields_by_name_only(source: Source) -> None:
    """By position they would pass unseen, and the ref of the row that is there would be overwritten with NULL."""
    ref = new_ref()
    set_ref(source, ref)
    with pytest.raises(TypeError):
        Source.objects.bulk_create([source], None, False, True, ["credential_ref"], ["id"])  # type: ignore[call-arg]
    assert ref_of(source) == ref


def test_writes_that_leave_the_ref_alone(source: Source) -> None:
    ref = new_ref()
    set_ref(source, ref)
    Source.objects.update(name="A")
    source.name = "B"
    Source.objects.bulk_update([source], ["name"], batch_size=1)
    assert Source.objects.get(pk=source.pk).name == "B"
    source.name = "C"
    Source.objects.bulk_create([source], update_conflicts=True, unique_fields=["id"], update_fields=["name"])
    assert Source.objects.get(pk=source.pk).name == "C"
    made = Source.objects.bulk_create([fresh(source), fresh(source)], batch_size=1)
    assert len(made) == 2
    assert ref_of(source) == ref
    assert set(Source.objects.referenced().values_list("pk", flat=True)) == {source.pk}


def test_loaddata_restores_the_ref_that_a_dump_holds(source: Source) -> None:
    """A fixture is a backup: Django writes it past `save()`. Load one into an empty table only."""
    ref = new_ref()
    set_ref(source, ref)
    Source.objects.update(metadata={})
    dumped = serializers.serialize("json", Source.objects.all())
    Source.objects.all().delete()
    for restored in serializers.deserialize("json", dumped):
        restored.save()
    assert ref_of(source) == ref
    assert KnowledgeSpace.objects.count() == 1
