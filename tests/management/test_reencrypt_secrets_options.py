"""The options of `reencrypt_secrets`, what it prints, and what `credential_status` says of keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from kfs_credentials.conf import settings as ours
from kfs_credentials.models import (
    ClosedKey,
    SecretObject,
)
from kfs_credentials.stores import secret_stores
from kfs_credentials.stores.encrypted import EncryptedStore
from kfs_credentials.stores.values import Probe
from tests.bound import bind_at_once, seal_anew
from tests.cleanup.rows import add_secret, make_source
from tests.keys import NEW, NEW_ID, OLD_ID, Change, sealed
from tests.management.commands import Run
from tests.management.reencryptions import COMMAND, REMOVE, add_many, last_line
from tests.management.rows import directory_contents, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

Files = Callable[[], list[Path]]


# Options and output.


def test_a_dry_run_counts_and_touches_nothing(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], secrets_directory: Path
) -> None:
    """No key is closed either."""
    make_source()
    add_secret(store, None, "retired")
    new_first()
    before = table_contents(), directory_contents(secrets_directory), ClosedKey.objects.count()
    outcome = run(COMMAND, "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        f"2 refs to move to key {NEW_ID}: 1 under key {OLD_ID}, 1 under unknown keys. Nothing was changed.\n"
    )
    assert (table_contents(), directory_contents(secrets_directory), ClosedKey.objects.count()) == before


def test_json(run: Run, new_first: Callable[[], None]) -> None:
    """The last line is on standard error then."""
    make_source()
    new_first()
    outcome = run(COMMAND, "--format", "json")
    value = outcome.json
    assert value.pop("seconds") >= 0
    assert value == {
        "result": {
            "rewritten": 1,
            "skipped": 0,
            "failed": 0,
            "reserved": 0,
            "absent": 0,
            "erased": 0,
            "end": "drained",
        },
        "failures": [],
        "keys": [
            {
                "key_id": which,
                "live": live,
                "retired": 0,
                "candidate": 0,
                "in_ring": True,
                "first": which == NEW_ID,
                "closed": which == OLD_ID,
            }
            for which, live in ((NEW_ID, 1), (OLD_ID, 0))
        ],
    }
    assert re.sub(r"in [0-9.]+ s", "in T s", outcome.err) == f"1 rewritten, 0 skipped, 0 failed in T s. {REMOVE}\n"


def test_batches_and_bytes(
    run: Run,
    store: EncryptedStore,
    new_first: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    kfs_settings: Change,
) -> None:
    """A batch has no more rows than --batch-size, nor more bytes than BATCH_BYTES, and one row at least."""
    add_many(store, 7)
    new_first()
    sizes: list[int] = []
    real = store._replace_many

    def replace_many(addresses: Any, **options: Any) -> Any:
        sizes.append(len(addresses))
        return real(addresses, **options)

    monkeypatch.setattr(store, "_replace_many", replace_many)
    assert run(COMMAND, "--batch-size", 3).code == 0
    assert sizes == [3, 3, 1]
    sizes.clear()
    monkeypatch.setattr("kfs_credentials.reencryption.PAGE", 4)
    kfs_settings(BATCH_BYTES=65536, MAX_SECRET_BYTES=65536)
    SecretObject.objects.update(size=40_000)
    assert run(COMMAND, "--recheck").code == 0
    assert sizes == [1] * 7


def test_the_rate(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands above RATE_LIMIT for this run."""
    add_many(store, 3)
    new_first()
    seen: list[float | None] = []
    real = store._replace_many

    def replace_many(addresses: Any, **options: Any) -> Any:
        seen.append(ours.RATE_LIMIT)
        return real(addresses, **options)

    monkeypatch.setattr(store, "_replace_many", replace_many)
    assert run(COMMAND, "--rate", 1000).code == 0
    assert seen == [1000.0]


def test_one_store_of_several(run: Run, tmp_path: Path, new_first: Callable[[], None], kfs_settings: Change) -> None:
    """Each ref is looked for in the store that is recorded for it; --store leaves the others out."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    stores: Any = django_settings.KFS_CREDENTIALS["STORES"]
    storage = {"BACKEND": "kfs_credentials.stores.files.DurableFileStorage", "OPTIONS": {"location": str(other)}}
    kfs_settings(STORES={**stores, "other": {**stores["default"], "OPTIONS": {"storage": storage}}})
    bind_at_once("default", secret_stores["other"])
    make_source()
    row = add_secret(secret_stores["other"], None, "retired")
    SecretObject.objects.filter(pk=row.credential_ref).update(store="other", key_id=OLD_ID)
    new_first()
    left = f"Keep for now: key {OLD_ID} (1 left)."
    assert last_line(run(COMMAND, "--store", "other")).startswith(f"1 rewritten, 0 skipped, 0 failed in T s. {left}")
    assert sealed(list(other.rglob("*.enc"))) == {NEW_ID: 1}
    # Of both: when it is said that a key can go, no probe is under it any more.
    probes = [secret_stores[alias].read_probe() for alias in ("default", "other")]
    assert [isinstance(probe, Probe) and probe.key_id for probe in probes] == [NEW_ID, NEW_ID]
    assert last_line(run(COMMAND)) == f"1 rewritten, 1 skipped, 0 failed in T s. {REMOVE}"
    outcome = run(COMMAND, "--store", "nowhere")
    assert (outcome.code, outcome.err.strip()) == (
        1,
        "CommandError: KFS_CREDENTIALS['STORES'] has no 'nowhere': say where the secrets go. The README shows how.",
    )


def test_the_help_says_what_is_closed_and_opened(run: Run) -> None:
    """And in which order keys are changed."""
    text = " ".join(run(COMMAND, "--help").out.split())
    assert "To go back to an older key, put it first and say --reopen." in text
    assert "put the new one behind the old one everywhere, then first everywhere, then run this" in text


def test_the_status_shows_what_each_key_holds(
    run: Run, store: EncryptedStore, kfs_settings: Change, new_first: Callable[[], None]
) -> None:
    """Also which is missing, and that this has to be looked at."""
    make_source()
    new_first()
    out = run("credential_status").out
    assert re.search(r"^key +live +retired +candidate$", out, re.MULTILINE)
    assert re.search(rf"^{NEW_ID} +0 +0 +0 +the first: it encrypts$", out, re.MULTILINE)
    assert re.search(rf"^{OLD_ID} +1 +0 +0$", out, re.MULTILINE)
    kfs_settings(KEYS=[NEW])
    seal_anew("default", store)
    outcome = run("credential_status", "--check")
    assert outcome.code == 3
    assert re.search(rf"^{OLD_ID} +1 +0 +0 +not in KFS_CREDENTIALS\['KEYS'\]$", outcome.out, re.MULTILINE)
    assert outcome.last_line == (
        "Nothing is left to move. To look at: 1 ref under keys that are not in KFS_CREDENTIALS['KEYS'] (put these "
        "back, behind the others)."
    )
