"""Database and store are bound before a test begins."""

from __future__ import annotations

import uuid

from kfs_credentials import sql
from kfs_credentials.binding import known
from kfs_credentials.models import Binding
from kfs_credentials.stores import SecretStore


def bind_at_once(using: str, store: SecretStore) -> None:
    """Bind a database and an empty store, whatever refs there are, and in whatever transaction."""
    sql.query(using, "binding/propose", store=store.alias, id=uuid.uuid4(), environment="", by="tests")
    half = known(using, store.alias)
    assert half is not None
    assert store.create_probe(half.probe)
    Binding.objects.using(using).filter(pk=store.alias).confirm()


def seal_anew(using: str, store: SecretStore) -> None:
    """Seal the probe under the first key of the ring as it is now."""
    half = known(using, store.alias)
    assert half is not None
    store.start_replace_probe(half.probe).result()
