"""The secret stores of the project, by alias, as in CACHES and STORAGES: `secret_stores["default"]`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from django.utils.module_loading import import_string

from kfs_credentials.conf import NAME, settings
from kfs_credentials.crypto import sensitive
from kfs_credentials.errors import StoreMisconfigured, StoreNotConfigured
from kfs_credentials.stores.base import SecretStore
from kfs_credentials.stores.values import Address, Entry, Receipt, Resealed

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Address", "Entry", "Receipt", "Resealed", "SecretStore", "secret_stores"]


class SecretStores:
    """Makes each store when it is first asked for, and anew when its settings have changed."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Mapping[str, Any], SecretStore]] = {}

    @sensitive  # OPTIONS may hold passwords
    def __getitem__(self, alias: str) -> SecretStore:
        """Return the store of that alias; raises `StoreNotConfigured` if the settings do not give one."""
        config = settings.STORES.get(alias)
        if config is None:
            raise StoreNotConfigured(
                f"{NAME}['STORES'] has no '{alias}': say where the secrets go. The README shows how."
            )
        made = self._made.get(alias)
        if made is None or made[0] != config:
            made = self._made[alias] = (config, self._make(alias, config))
        return made[1]

    def _make(self, alias: str, config: Mapping[str, Any]) -> SecretStore:
        where = f"{NAME}['STORES']['{alias}']"
        try:
            backend = import_string(config["BACKEND"])
        except ImportError as error:
            raise StoreNotConfigured(f"{where}: '{config['BACKEND']}' cannot be imported: {error}.") from None
        if not (isinstance(backend, type) and issubclass(backend, SecretStore)):
            raise StoreNotConfigured(f"{where}: '{config['BACKEND']}' is not a SecretStore.")
        try:
            store = backend(**config.get("OPTIONS", {}))
        except StoreMisconfigured as error:
            raise StoreNotConfigured(f"{where}: {error}") from None
        except (TypeError, ValueError, LookupError):
            # The text of such an error may quote an option.
            options = ", ".join(inspect.signature(backend).parameters) or "none"
            raise StoreNotConfigured(
                f"{where}: {backend.__name__} cannot be made from these OPTIONS; it takes {options}."
            ) from None
        store.alias = alias
        return store


secret_stores = SecretStores()
