"""Two keys, secrets under either, and what is noted about them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psycopg
from django.db import connection

from kfs_credentials.crypto import envelope_key_id, key_id, object_name
from kfs_credentials.keys import CLOSING
from kfs_credentials.models import SecretObject

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
OLD_ID, NEW_ID = key_id(OLD), key_id(NEW)

Change = Callable[..., None]
WAITS = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = %s AND NOT granted"


def noted() -> Counter[str | None]:
    """Return how many refs are noted as being under each key."""
    return Counter(SecretObject.objects.values_list("key_id", flat=True))


def sealed(files: Collection[Path]) -> Counter[str | None]:
    """Return how many objects say that they are under each key."""
    return Counter(envelope_key_id(path.read_bytes()) for path in files)


def path_of(directory: Path, ref: str) -> Path:
    """Return the file of a ref."""
    return directory / object_name(ref)


def wait_for_waiter(session: psycopg.Connection[Any], is_over: Callable[[], bool] = lambda: False) -> None:
    """Return once somebody waits for the lock on closing. Asks the server again and again: it tells nobody."""
    while True:
        row = session.execute(WAITS, [CLOSING]).fetchone()
        if row is not None and row[0]:
            return
        assert not is_over(), "it is over, and nobody has waited"


def execute(statement: str, *parameters: Any) -> None:
    """Run a statement as somebody else would."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
