"""Database and store are bound before a test begins."""

from __future__ import annotations

import uuid

from kfs_credentials import sql
from kfs_credentials.binding import known
from kfs_credentials.models import Binding
from kfs_credentials.stores import SecretStore


def bind_at_once(using: str, store: SecretStore) -> None:
    """Bind a database and an empty store, whatever refs there are, and in whatever transaction."""
    sql.query(using, "binding/propose", store=store.alias, environment=uuid.uuid4(), by="tests")
    half = known(using, store.alias)
    assert half is not None
    assert store.create_probe(half.probe)
    Binding.objects.using(using).filter(pk=store.alias).confirm()
