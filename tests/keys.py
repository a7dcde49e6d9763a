"""Two keys, secrets under either, and what is noted about them."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from django.db import connection

from kfs_credentials.crypto import envelope_key_id, key_id, object_name
from kfs_credentials.models import SecretObject

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
OLD_ID, NEW_ID = key_id(OLD), key_id(NEW)

Change = Callable[..., None]


def noted() -> Counter[str | None]:
    """Return how many refs are noted as being under each key."""
    return Counter(SecretObject.objects.values_list("key_id", flat=True))


def sealed(files: Collection[Path]) -> Counter[str | None]:
    """Return how many objects say that they are under each key."""
    return Counter(envelope_key_id(path.read_bytes()) for path in files)


def path_of(directory: Path, ref: str) -> Path:
    """Return the file of a ref."""
    return directory / object_name(ref)


def execute(statement: str, *parameters: Any) -> None:
    """Run a statement as somebody else would."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
