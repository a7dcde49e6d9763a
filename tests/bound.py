"""Database and store are bound before a test begins."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from django.db import connection

from kfs_credentials import sql
from kfs_credentials.binding import known
from kfs_credentials.conf import key_ring
from kfs_credentials.models import Binding
from kfs_credentials.stores import SecretStore


def bind_at_once(using: str, store: SecretStore) -> None:
    """Bind a database and an empty store, whatever refs there are, and in whatever transaction."""
    sql.query(using, "binding/propose", store=store.alias, id=uuid.uuid4(), environment="", by="tests")
    half = known(using, store.alias)
    assert half is not None
    assert store.create_probe(half.probe)
    Binding.objects.using(using).filter(pk=store.alias).confirm()


def bind_as_before(store: SecretStore, directory: Path) -> None:
    """Bind the default database and an empty directory, with the halves that an earlier test has had made.

    It takes the time of one statement and one file: thousands of tests begin with it.
    """
    made_for = (connection.settings_dict["NAME"], connection.settings_dict["HOST"], key_ring().key_ids)
    if made_for in _halves:
        half, names, probe = _halves[made_for]
        Binding.objects.bulk_create([Binding(**half)])
        place = directory
        for name in names[:-1]:
            place /= name
            place.mkdir(mode=0o700)
        (place / names[-1]).touch(mode=0o600)
        (place / names[-1]).write_bytes(probe)
        return
    bind_at_once("default", store)
    (path,) = (path for path in directory.rglob("*") if path.is_file())
    (row,) = Binding.objects.values()
    _halves[made_for] = (dict(row), path.relative_to(directory).parts, path.read_bytes())


_halves: dict[tuple[Any, ...], tuple[dict[str, Any], tuple[str, ...], bytes]] = {}
"""The database's half, and name and content of the store's, by database and keys."""


def seal_anew(using: str, store: SecretStore) -> None:
    """Seal the probe under the first key of the ring as it is now."""
    half = known(using, store.alias)
    assert half is not None
    store.start_replace_probe(half.probe).result()
