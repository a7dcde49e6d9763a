"""A database without secrets is bound by its first use; whoever is first, all see the same binding."""

from __future__ import annotations

import secrets
import threading
import uuid
from typing import Any

import pytest
from django.db import connections

from kfs_credentials import binding
from kfs_credentials.binding import check_bindable, ensure_bound, known
from kfs_credentials.conf import key_ring
from kfs_credentials.crypto import seal
from kfs_credentials.errors import BindingBroken, BindingProblem
from kfs_credentials.models import Binding, Event
from kfs_credentials.services import create_source
from kfs_credentials.stores.encrypted import PROBE_NAME, PROBE_REF, PROBE_SCOPE, EncryptedStore
from kfs_credentials.stores.values import Probe
from tests.cleanup.rows import add_secret
from tests.factories import SpaceFactory

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.unbound]


def test_the_first_secret_binds(store: EncryptedStore) -> None:
    space = SpaceFactory.create()
    values: dict[str, Any] = {"type": "drive", "name": "Source", "uri": "https://files.example/"}
    create_source(tenant=space.tenant_id, space_id=space.pk, credentials={"token": "made-up"}, **values)
    half = known("default", "default")
    assert half is not None
    assert half.is_confirmed
    assert store.read_probe() == half.probe
    assert list(Event.objects.filter(kind="bound").values_list("detail", flat=True)) == ["default"]


def test_a_source_without_credentials_binds_nothing(store: EncryptedStore) -> None:
    space = SpaceFactory.create()
    values: dict[str, Any] = {"type": "drive", "name": "Source", "uri": "https://files.example/"}
    create_source(tenant=space.tenant_id, space_id=space.pk, **values)
    assert not Binding.objects.exists()
    assert store.read_probe() is None


def test_several_at_once(store: EncryptedStore) -> None:
    barrier = threading.Barrier(4, timeout=60)
    seen: list[Any] = []

    def use() -> None:
        try:
            barrier.wait()
            seen.append(ensure_bound("default", "default").half.environment_id)
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            seen.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [Binding.objects.get().environment_id] * 4
    assert Event.objects.filter(kind="bound").count() == 1


def test_killed_before_the_store_has_its_half(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next use goes on where the first one was."""

    def killed(_: Probe) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "create_probe", killed)
        with pytest.raises(KeyboardInterrupt):
            ensure_bound("default", "default")
    before = Binding.objects.get()
    assert before.confirmed_at is None
    check_bindable("default", "default")
    assert ensure_bound("default", "default").half.environment_id == before.environment_id


def test_secrets_before_the_first_use(store: EncryptedStore) -> None:
    """A database that has secrets already is not bound by itself: nobody knows that this is their store."""
    add_secret(store)
    for attempt in (ensure_bound, check_bindable):
        with pytest.raises(BindingBroken) as caught:
            attempt("default", "default")
        assert caught.value.problem is BindingProblem.UNBOUND
    assert not Binding.objects.exists()
    assert store.read_probe() is None


def test_secrets_that_are_erased_do_not_count(store: EncryptedStore) -> None:
    add_secret(store, None, "final")
    ensure_bound("default", "default")


def test_a_store_that_is_somebody_elses(store: EncryptedStore) -> None:
    store.create_probe(Probe(uuid.uuid4(), "", "1", 2, 3))
    for attempt in (ensure_bound, check_bindable):
        with pytest.raises(BindingBroken) as caught:
            attempt("default", "default")
        assert caught.value.problem is BindingProblem.OTHER
    assert not Binding.objects.exists()


def test_a_store_under_another_key(store: EncryptedStore, kfs_settings: Any) -> None:
    store.create_probe(Probe(uuid.uuid4(), "", "1", 2, 3))
    kfs_settings(KEYS=[secrets.token_bytes(32)])
    for attempt in (ensure_bound, check_bindable):
        with pytest.raises(BindingBroken) as caught:
            attempt("default", "default")
        assert caught.value.problem is BindingProblem.UNREADABLE


def test_a_probe_of_a_later_version_is_nobodys(store: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be understood is not overwritten."""
    ensure_bound("default", "default")
    members = {"environmentId": "none"}
    blob = binding_blob(members)
    name = store.prefix + PROBE_NAME
    assert store.storage.replace_many([(name, store.storage.read(name), blob)]) == [True]
    with pytest.raises(BindingBroken) as caught:
        binding.check_bound("default", "default")
    assert caught.value.problem is BindingProblem.UNREADABLE


def binding_blob(members: dict[str, Any]) -> bytes:
    """Seal what is no probe as one."""
    return seal(key_ring(), PROBE_SCOPE, PROBE_REF, members)
