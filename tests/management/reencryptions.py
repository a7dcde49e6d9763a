"""What the tests of `reencrypt_secrets` share."""

from __future__ import annotations

import re
from typing import Any

from kfs_credentials.crypto import Plaintext
from kfs_credentials.models import SecretObject
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores import Entry
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import add_ref, scope_of_row
from tests.factories import SourceFactory, SpaceFactory
from tests.keys import OLD_ID, execute
from tests.management.commands import Outcome

COMMAND = "reencrypt_secrets"
AGAIN = "`manage.py reencrypt_secrets`"
REMOVE = f"Nothing is under any other key: remove {OLD_ID} from KFS_CREDENTIALS['KEYS'], everywhere."


def add_many(store: EncryptedStore, number: int) -> dict[str, dict[str, Any]]:
    """Add refs in use, of sources that name them, each with an object; return the values by ref."""
    values: dict[str, dict[str, Any]] = {}
    entries = []
    space = SpaceFactory.create()
    for place in range(number):
        source = SourceFactory.create(bare=True, knowledge_space=space)
        row = add_ref(source, "active")
        values[row.credential_ref] = {"token": f"made-up-{place}"}
        entries.append(Entry(scope_of_row(row), row.credential_ref, Plaintext.of(values[row.credential_ref])))
    store.put_many(entries)
    rows = LedgerRow.objects.filter(credential_ref__in=values)
    for ref, source_id in rows.values_list("credential_ref", "source_id"):
        execute("UPDATE sources SET credential_ref = %s WHERE id = %s", ref, source_id)
    SecretObject.objects.filter(pk__in=values).update(key_id=OLD_ID)
    return values


def last_line(outcome: Outcome) -> str:
    """Return the last line, without its seconds."""
    return re.sub(r" in [0-9.]+ s\b", " in T s", outcome.last_line)
