"""No error takes a value along out of the store of files, of what it is made of, and of the cryptography below."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kfs_credentials
from kfs_credentials.crypto import Plaintext, Scope, new_ref
from kfs_credentials.stores import Address, Entry
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.leaks.canary import CREDENTIALS
from tests.leaks.frames import Run, leaks_at_each_line

SCOPE = Scope("tenant-a", "0d9bdd4c-5e0a-4d2a-9d6d-9a3a4f8c3c10", "5b0c0f0e-6a55-4f4b-8f0e-0d6a3d1f9b77")
PACKAGE = Path(kfs_credentials.__file__).parent
GUARDS = {"crypto/sensitive.py", "stores/threads.py"}
"""What keeps values from being shown: an error in its own lines would be one in the interpreter."""
FILES = sorted(
    {str(path.relative_to(PACKAGE)) for folder in ("stores", "crypto") for path in (PACKAGE / folder).glob("*.py")}
    - GUARDS
)

ENDS_A_THREAD = {"Call._run"}
"""A thread that ends here says nothing more, and whoever waits for it waits in vain, until its time is up."""


def put_and_get(store: EncryptedStore) -> Run:
    """Put two, once more (they are opened then, and compared), and get them, on two threads."""
    if not list(store.list()):
        store.put(SCOPE, new_ref(), CREDENTIALS)  # makes the directories: no later run gets there
    refs = [new_ref(), new_ref()]
    entries = [Entry(SCOPE, ref, Plaintext.of(CREDENTIALS)) for ref in refs]

    def run() -> None:
        for _ in range(2):
            store.put_many(entries)
        store.get_many([Address(SCOPE, ref) for ref in refs])

    return run


def replace(store: EncryptedStore) -> Run:
    ref = new_ref()
    store.put(SCOPE, ref, CREDENTIALS)
    return lambda: store.replace(SCOPE, ref)


@pytest.mark.parametrize("step", [put_and_get, replace], ids=lambda step: step.__name__)
def test_whatever_happens_at_whatever_line(
    step: Callable[[EncryptedStore], Run], store: EncryptedStore, caplog: pytest.LogCaptureFixture
) -> None:
    leaks_at_each_line(lambda: step(store), FILES, caplog, but=ENDS_A_THREAD)
