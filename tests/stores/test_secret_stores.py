"""`secret_stores`: stores by alias, made from the settings, and what is said when they give none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from django.core.files.storage import FileSystemStorage, InMemoryStorage
from django.test import override_settings

from kfs_credentials.crypto import new_ref
from kfs_credentials.errors import StoreMisconfigured
from kfs_credentials.stores import SecretStore, secret_stores
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.files import DurableFileStorage
from tests.stores.contract import SCOPE, VALUE
from tests.stores.test_leaks import CANARY, bare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENCRYPTED = "kfs_credentials.stores.encrypted.EncryptedStore"
DURABLE = "kfs_credentials.stores.files.DurableFileStorage"
WHERE = "KFS_CREDENTIALS['STORES']['default']"
FROM_ALIAS = (
    f"{WHERE}: OPTIONS['storage'] gives no storage: it must be an alias of STORAGES, or a dictionary with a BACKEND "
    "and the OPTIONS that this backend takes"
)


class Demanding(EncryptedStore):
    """Takes options of its own."""

    def __init__(self, *, url: str, token: str) -> None:
        super().__init__({"BACKEND": DURABLE, "OPTIONS": {"location": url}})
        if token != "right":
            raise ValueError(f"not the token: {token}")


class DemandingStorage(DurableFileStorage):
    """Quotes its options."""

    def __init__(self, location: str, token: str = "") -> None:
        if token:
            raise ValueError(f"not the token: {token}")
        super().__init__(location)


def encrypted(**options: Any) -> dict[str, Any]:
    return {"BACKEND": ENCRYPTED, "OPTIONS": options}


def test_a_store_is_made_once_for_its_settings(
    store: EncryptedStore, secrets_directory: Path, kfs_settings: Callable[..., None]
) -> None:
    assert secret_stores["default"] is store
    assert store.alias == "default"
    storage = {"BACKEND": DURABLE, "OPTIONS": {"location": str(secrets_directory)}}

    kfs_settings(STORES={"default": encrypted(storage=storage), "other": encrypted(storage=storage, prefix="x/")})
    assert secret_stores["default"] is store
    other = secret_stores["other"]
    assert (other.alias, store.alias) == ("other", "default")

    kfs_settings(STORES={"default": encrypted(storage=storage, prefix="y/")})
    changed = secret_stores["default"]
    assert isinstance(changed, EncryptedStore)
    assert (changed.prefix, changed is store) == ("y/", False)
    with pytest.raises(StoreMisconfigured):
        secret_stores["other"]


def test_the_storage_may_be_an_alias_of_djangos(secrets_directory: Path, kfs_settings: Callable[..., None]) -> None:
    kfs_settings(STORES={"default": encrypted(storage="secrets")})
    options = {"location": str(secrets_directory)}
    ref = new_ref()
    with override_settings(STORAGES={"secrets": {"BACKEND": DURABLE, "OPTIONS": options}}):
        secret_stores["default"].put(SCOPE, ref, VALUE)
        assert secret_stores["default"].get(SCOPE, ref) == VALUE


def test_the_storage_may_be_an_object(secrets_directory: Path) -> None:
    made = EncryptedStore(DurableFileStorage(secrets_directory))
    ref = new_ref()
    made.put(SCOPE, ref, VALUE)
    assert made.get(SCOPE, ref) == VALUE


MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "no such module": (
        {"BACKEND": "no.such.Store"},
        f"{WHERE}: 'no.such.Store' cannot be imported: No module named 'no'.",
    ),
    "no such class": (
        {"BACKEND": "kfs_credentials.stores.NoStore"},
        (
            f"{WHERE}: 'kfs_credentials.stores.NoStore' cannot be imported: Module \"kfs_credentials.stores\" does not "
            'define a "NoStore" attribute/class.'
        ),
    ),
    "no path": (
        {"BACKEND": "Store"},
        f"{WHERE}: 'Store' cannot be imported: Store doesn't look like a module path.",
    ),
    "not a store": (
        {"BACKEND": "django.core.files.storage.FileSystemStorage"},
        f"{WHERE}: 'django.core.files.storage.FileSystemStorage' is not a SecretStore.",
    ),
    "not a class": (
        {"BACKEND": "kfs_credentials.stores.secret_stores"},
        f"{WHERE}: 'kfs_credentials.stores.secret_stores' is not a SecretStore.",
    ),
    "abstract": (
        {"BACKEND": "kfs_credentials.stores.SecretStore"},
        f"{WHERE}: SecretStore cannot be made from these OPTIONS; it takes none.",
    ),
    "no options": (
        {"BACKEND": ENCRYPTED},
        f"{WHERE}: EncryptedStore cannot be made from these OPTIONS; it takes storage, prefix.",
    ),
    "an option too many": (
        encrypted(storage={"BACKEND": DURABLE}, token=CANARY),
        f"{WHERE}: EncryptedStore cannot be made from these OPTIONS; it takes storage, prefix.",
    ),
    "options that are none": (
        {"BACKEND": ENCRYPTED, "OPTIONS": [CANARY]},
        f"{WHERE}: EncryptedStore cannot be made from these OPTIONS; it takes storage, prefix.",
    ),
    "a value that the store refuses": (
        {"BACKEND": f"{__name__}.Demanding", "OPTIONS": {"url": "/", "token": CANARY}},
        f"{WHERE}: Demanding cannot be made from these OPTIONS; it takes url, token.",
    ),
    "prefix empty": (
        encrypted(storage={"BACKEND": DURABLE, "OPTIONS": {"location": "/"}}, prefix=""),
        f"{WHERE}: The prefix must have 1 to 512 characters, not 0.",
    ),
    "prefix too long": (
        encrypted(storage={"BACKEND": DURABLE, "OPTIONS": {"location": "/"}}, prefix="x" * 513),
        f"{WHERE}: The prefix must have 1 to 512 characters, not 513.",
    ),
    "no such alias": (
        encrypted(storage="nowhere"),
        f"{WHERE}: OPTIONS['storage'] gives no storage: Could not find config for 'nowhere' in settings.STORAGES.",
    ),
    "no such storage": (
        encrypted(storage={"BACKEND": "no.such.Storage"}),
        f"{WHERE}: OPTIONS['storage'] gives no storage: Could not find backend 'no.such.Storage': No module named 'no'",
    ),
    "no backend": (encrypted(storage={"OPTIONS": {"location": "/"}}), FROM_ALIAS),
    "no storage": (encrypted(storage=None), FROM_ALIAS),
    "storage option too many": (
        encrypted(storage={"BACKEND": DURABLE, "OPTIONS": {"location": "/", "token": CANARY}}),
        FROM_ALIAS,
    ),
    "storage option missing": (encrypted(storage={"BACKEND": DURABLE}), FROM_ALIAS),
    "a value that the storage refuses": (
        encrypted(storage={"BACKEND": f"{__name__}.DemandingStorage", "OPTIONS": {"location": "/", "token": CANARY}}),
        FROM_ALIAS,
    ),
    "location is not absolute": (
        encrypted(storage={"BACKEND": DURABLE, "OPTIONS": {"location": "secrets"}}),
        (
            f"{WHERE}: OPTIONS['storage'] gives no storage: DurableFileStorage needs OPTIONS['location'], an absolute "
            "path: the directory for secrets."
        ),
    ),
    "a storage that cannot create once": (
        encrypted(storage={"BACKEND": "django.core.files.storage.FileSystemStorage"}),
        (
            f"{WHERE}: FileSystemStorage cannot create a file once and durably, and a secret that is overwritten is "
            "lost. Use kfs_credentials.stores.files.DurableFileStorage."
        ),
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_settings_that_give_no_store_are_misconfigured(kfs_settings: Callable[..., None], case: str) -> None:
    config, message = MESSAGES[case]
    kfs_settings(STORES={"default": config})

    with pytest.raises(StoreMisconfigured) as caught:
        secret_stores["default"]

    assert str(caught.value) == message
    bare(caught.value)


def test_an_alias_that_is_missing_is_misconfigured(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(STORES={})
    with pytest.raises(StoreMisconfigured) as caught:
        secret_stores["default"]
    assert str(caught.value) == (
        "KFS_CREDENTIALS['STORES'] has no 'default': say where the secrets go. The README shows how."
    )


@pytest.mark.parametrize("storage", [FileSystemStorage, InMemoryStorage])
def test_djangos_own_storages_are_refused(storage: type) -> None:
    with pytest.raises(StoreMisconfigured, match=f"^{storage.__name__} cannot create a file once and durably"):
        EncryptedStore(storage())


def test_a_store_of_ones_own_is_a_subclass() -> None:
    assert issubclass(EncryptedStore, SecretStore)


class Own(EncryptedStore):
    """Has an `__init__` of its own that calls no other."""

    def __init__(self, location: Path) -> None:
        self.storage, self.prefix = DurableFileStorage(location), "objects/v1/"


def test_a_store_with_an_init_of_its_own_works(secrets_directory: Path) -> None:
    store, ref = Own(secrets_directory), new_ref()
    store.put(SCOPE, ref, VALUE)
    assert store.get(SCOPE, ref) == VALUE
