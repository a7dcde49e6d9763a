"""`reencrypt_secrets`: what it moves, what it says, and its exit codes. How processes race is in tests/crashes."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.checks import CheckMessage

from kfs_credentials import services
from kfs_credentials.crypto import Plaintext, key_id
from kfs_credentials.models import (
    Attention,
    ClosedKey,
    Event,
    EventKind,
    Round,
    SecretObject,
    Source,
)
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.reencryption import Reencryption
from kfs_credentials.stores import Entry
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.bound import seal_anew
from tests.cleanup.rows import add_ref, add_secret, known, make_source, name_ref, ref_of, scope_of_row
from tests.factories import SourceFactory
from tests.invariants import check_invariants
from tests.keys import NEW, NEW_ID, OLD, OLD_ID, Change, execute, noted, path_of, sealed
from tests.management.commands import Run
from tests.management.reencryptions import AGAIN, COMMAND, REMOVE, add_many, last_line
from tests.management.rows import directory_contents, table_contents

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]

Files = Callable[[], list[Path]]


# It moves everything, and the old key can go.


def test_nothing_to_do(run: Run) -> None:
    """No refs at all, and one key."""
    outcome = run(COMMAND)
    assert (outcome.code, outcome.err) == (0, "")
    assert last_line(outcome) == (
        "0 rewritten, 0 skipped, 0 failed in T s. Everything is under the first key, and there is no other."
    )


def test_everything_is_moved_and_the_old_key_can_go(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], kfs_settings: Change, files: Files
) -> None:
    """By services and by the backfill, in use, replaced and reserved; afterwards the new key opens all of it."""
    by_service = [make_source(secret={"n": 2**70 + place}) for place in range(3)]
    services.rotate_credentials(tenant="tenant-a", source_id=by_service[0].pk, credentials={"token": "rotated"})
    for place in range(4):
        SourceFactory.create(credentials={"token": f"legacy-{place}"})
    assert run("run_credential_backfill").code == 0
    add_secret(store, None, "staged")
    sources = {source.pk: resolve(source) for source in Source.objects.all()}
    assert sealed(files()) == {OLD_ID: 9}
    kfs_settings(KEYS=[NEW])
    (message,) = (one for one in deployment_checks() if one.id != "kfs_credentials.E012")
    assert (message.id, "8 ref(s)" in message.msg) == ("kfs_credentials.E011", True)
    new_first()

    outcome = run(COMMAND)

    assert (outcome.code, outcome.err) == (0, "")
    assert last_line(outcome) == f"9 rewritten, 0 skipped, 0 failed in T s. {REMOVE}"
    assert sealed(files()) == noted() == {NEW_ID: 9}
    kfs_settings(KEYS=[NEW])
    assert deployment_checks() == []
    assert {source.pk: resolve(source) for source in Source.objects.all()} == sources
    assert check_invariants("default", store) == []
    outcome = run(COMMAND)
    assert last_line(outcome) == (
        "0 rewritten, 9 skipped, 0 failed in T s. Everything is under the first key, and there is no other."
    )


def deployment_checks() -> list[CheckMessage]:
    return checks.run_checks(tags=["kfs_credentials"], include_deployment_checks=True)


def resolve(source: Source) -> dict[str, Any]:
    return services.resolve_credentials(tenant="tenant-a", source_id=source.pk).reveal()


def test_a_second_run_touches_nothing(run: Run, new_first: Callable[[], None], secrets_directory: Path) -> None:
    """Neither a file nor what is noted about it."""
    make_source()
    new_first()
    run(COMMAND)
    before = directory_contents(secrets_directory), list(SecretObject.objects.values())
    outcome = run(COMMAND)
    assert last_line(outcome) == f"0 rewritten, 1 skipped, 0 failed in T s. {REMOVE}"
    assert (directory_contents(secrets_directory), list(SecretObject.objects.values())) == before


SITUATIONS = ("staged", "candidate", "active", "retired", "displaced", "abandoned")


def test_every_ref_that_is_not_being_erased_is_moved(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], secrets_directory: Path, kfs_settings: Change
) -> None:
    """What is being erased, or is erased, is left to the cleanup: its objects need no key."""
    moved = {situation: add_secret(store, None, situation) for situation in SITUATIONS[:4]}
    for situation in SITUATIONS[4:]:
        moved[situation] = add_secret(store, None, "retired", next_delete_at=None)
    SecretObject.objects.filter(pk=moved["displaced"].credential_ref).update(attention=Attention.DISPLACED)
    SecretObject.objects.filter(pk=moved["abandoned"].credential_ref).update(abandoned_at="2026-01-01T00:00Z")
    left = [add_secret(store, None, situation) for situation in ("deleting", "deleted", "final")]
    SecretObject.objects.update(key_id=OLD_ID)
    before = [path_of(secrets_directory, row.credential_ref).read_bytes() for row in left]
    new_first()

    outcome = run(COMMAND)

    assert outcome.code == 0
    assert last_line(outcome) == (
        f"6 rewritten, 0 skipped, 0 failed in T s. Keep for now: key {OLD_ID} (1 left). `manage.py run_secret_cleanup` "
        f"finishes what is being erased; then run {AGAIN}."
    )
    assert [path_of(secrets_directory, row.credential_ref).read_bytes() for row in left] == before
    kfs_settings(KEYS=[NEW])
    for row in moved.values():
        assert store.get(scope_of_row(row), row.credential_ref) == {"token": "made-up"}
        assert known(row.credential_ref).key_id == NEW_ID


def test_what_is_not_known_is_looked_at(run: Run, store: EncryptedStore, new_first: Callable[[], None]) -> None:
    """Refs of the Node service, with a row of ours or without one; one of them is under the new key already."""
    unknown, unregistered = (add_secret(store, None, "retired") for _ in range(2))
    SecretObject.objects.filter(pk=unregistered.credential_ref).delete()
    new_first()
    already = add_secret(store, None, "retired")
    outcome = run(COMMAND)
    assert last_line(outcome) == f"2 rewritten, 1 skipped, 0 failed in T s. {REMOVE}"
    assert [known(row.credential_ref).key_id for row in (unknown, unregistered, already)] == [NEW_ID] * 3
    assert known(unregistered.credential_ref).size == len('{"token":"made-up"}')


def test_recheck_finds_what_is_recorded_wrongly(run: Run, new_first: Callable[[], None], files: Files) -> None:
    """The Node service, with the old key, has used our reservation: the record says the new key, and is wrong."""
    make_source()
    new_first()
    SecretObject.objects.update(key_id=NEW_ID)
    assert last_line(run(COMMAND)).startswith("0 rewritten, 1 skipped,")
    assert sealed(files()) == {OLD_ID: 1}
    assert last_line(run(COMMAND, "--recheck")).startswith("1 rewritten, 0 skipped,")
    assert sealed(files()) == {NEW_ID: 1}


def test_the_keys_of_this_moment_are_used(run: Run, store: EncryptedStore, kfs_settings: Change, files: Files) -> None:
    """Not those of the moment at which the app was imported."""
    kfs_settings(KEYS=[OLD])
    seal_anew("default", store)
    make_source()
    newest = secrets.token_bytes(32)
    for ring in ([NEW, OLD], [newest, NEW]):
        kfs_settings(KEYS=ring)
        assert run(COMMAND).code == 0
        assert sealed(files()) == {key_id(ring[0]): 1}


def test_reserved_refs_without_an_object_are_told_apart(run: Run, new_first: Callable[[], None]) -> None:
    """Whoever reserved them may still put something there; what is noted then is noted as it is activated."""
    rows = [add_ref(None, situation) for situation in ("staged", "candidate", "retired")]
    SecretObject.objects.update(key_id=OLD_ID)
    make_source()
    new_first()
    outcome = run(COMMAND)
    assert outcome.code == 0
    assert last_line(outcome) == (
        "1 rewritten, 0 skipped, 0 failed, 2 reserved, with no object yet, 1 to be erased, with no object in T s. "
        f"{REMOVE}"
    )
    assert {known(row.credential_ref).key_id for row in rows} == {None}


# What cannot be moved.


def test_three_damaged_of_a_thousand(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], secrets_directory: Path, kfs_settings: Change
) -> None:
    """Each is reported with its reason, its rows stay as they are, and all others are moved."""
    values = add_many(store, 1000)
    cut, flipped, foreign = sorted(values)[100:900:300]
    whole = path_of(secrets_directory, cut).read_bytes()
    path_of(secrets_directory, cut).write_bytes(whole[:-40])
    envelope = json.loads(path_of(secrets_directory, flipped).read_bytes())
    envelope["tag"] = ("B" if envelope["tag"][0] == "A" else "A") + envelope["tag"][1:]
    path_of(secrets_directory, flipped).write_text(json.dumps(envelope))
    envelope = json.loads(path_of(secrets_directory, foreign).read_bytes())
    path_of(secrets_directory, foreign).write_text(json.dumps({**envelope, "kid": "0" * 16}))
    reasons = {
        cut: "the stored secret cannot be trusted: not an envelope",
        flipped: "the stored secret cannot be trusted: decryption failed",
        foreign: f"the stored secret cannot be trusted: unknown key {'0' * 16}, which is not in the key ring",
    }
    before = [
        LedgerRow.objects.filter(credential_ref__in=reasons).values(),
        SecretObject.objects.filter(pk__in=reasons).values(),
    ]
    rows = [list(one) for one in before]
    blobs = [path_of(secrets_directory, ref).read_bytes() for ref in reasons]
    new_first()

    for first, counts in ((True, "997 rewritten, 0 skipped, 3 failed"), (False, "0 rewritten, 997 skipped, 3 failed")):
        outcome = run(COMMAND)
        assert outcome.code == 3, first
        assert last_line(outcome) == (
            f"{counts} in T s. 3 stay as they are: keep their keys, put right what is said of each, then run {AGAIN}."
        )
        table = [tuple(re.split(r"  +", line, maxsplit=1)) for line in outcome.out.splitlines()[:-1]]
        assert table == [("ref", "stays as it is, since"), *sorted(reasons.items())]
        again = run(COMMAND, "--format", "json")
        assert again.json["failures"] == [{"ref": ref, "reason": reason} for ref, reason in sorted(reasons.items())]
    assert [list(one.all()) for one in before] == rows
    assert [path_of(secrets_directory, ref).read_bytes() for ref in reasons] == blobs
    kfs_settings(KEYS=[NEW])
    addresses = [Entry(scope_of_row(row), row.credential_ref, Plaintext.of({})) for row in LedgerRow.objects.all()]
    got = dict(zip([one.ref for one in addresses], store.get_many(addresses), strict=True))
    assert {ref: value for ref, value in got.items() if ref not in reasons} == {
        ref: value for ref, value in values.items() if ref not in reasons
    }


def test_a_missing_object_of_a_ref_in_use_is_a_failure(
    run: Run, new_first: Callable[[], None], secrets_directory: Path
) -> None:
    """Also of one that is kept for a person to choose."""
    gone, kept = make_source(), make_source()
    path_of(secrets_directory, ref_of(gone)).unlink()
    displaced = add_ref(None, "retired", next_delete_at=None)
    SecretObject.objects.filter(pk=displaced.credential_ref).update(attention=Attention.DISPLACED, key_id=OLD_ID)
    new_first()
    outcome = run(COMMAND)
    assert outcome.code == 3
    assert last_line(outcome).startswith("1 rewritten, 0 skipped, 2 failed in T s. 2 stay as they are:")
    assert known(ref_of(gone)).key_id == known(displaced.credential_ref).key_id == OLD_ID
    assert known(ref_of(kept)).key_id == NEW_ID


def test_none_found_is_an_error(run: Run, new_first: Callable[[], None], secrets_directory: Path) -> None:
    """Whoever bound this store has erred: nothing is taken for gone."""
    sources = [make_source() for _ in range(3)]
    new_first()
    elsewhere = secrets_directory / "elsewhere"
    elsewhere.mkdir()
    objects = path_of(secrets_directory, ref_of(sources[0])).parent
    for path in objects.glob("*.enc"):
        path.rename(elsewhere / path.name)
    outcome = run(COMMAND)
    assert outcome.code == 1
    assert re.sub(r" in [0-9.]+ s;", " in T s;", outcome.err.strip().splitlines()[-1]) == (
        "CommandError: 0 rewritten, 0 skipped, 3 failed in T s; then found 0 of 3: the database has so many refs in "
        "use that are to be sealed anew, and the store holds an object for none of them. See whether this is the right "
        "database (--database), and KFS_CREDENTIALS['STORES'] the place of its secrets, prefix included."
    )
    assert noted() == {OLD_ID: 3}
    for path in elsewhere.iterdir():
        path.rename(objects / path.name)
    assert run(COMMAND).code == 0


def test_what_the_store_has_lost_is_not_found(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when it was read, and is not any more: that is no sign of the right store."""
    make_source()
    new_first()
    real = store._read_back

    def read_back(entries: Any, *arguments: Any, **options: Any) -> Any:
        store.storage.remove_many([store._name(entry) for entry in entries])
        return real(entries, *arguments, **options)

    monkeypatch.setattr(store, "_read_back", read_back)
    monkeypatch.setattr(store, "_works", lambda **_: True)
    outcome = run(COMMAND)
    assert outcome.code == 1
    assert "found 0 of 1: " in outcome.err
    assert noted() == {OLD_ID: 1}


def test_no_ledger_row_of_what_sources_name_is_an_error(run: Run, new_first: Callable[[], None]) -> None:
    """The ledger was emptied, or is another database's."""
    make_source()
    execute("DELETE FROM source_secret_lifecycle_refs")
    new_first()
    outcome = run(COMMAND)
    assert outcome.code == 1
    assert "found 0 of 1: " in outcome.err


# Keys are closed, and opened.

REFUSED = (
    f"Key {OLD_ID}, the first in KFS_CREDENTIALS['KEYS'], is closed: another run has moved everything away from it. If "
    "this process has an old key ring, put the new key first. To go back to this key, say --reopen."
)


def test_the_other_keys_are_closed_and_the_first_is_opened_again(
    run: Run, new_first: Callable[[], None], kfs_settings: Change, files: Files
) -> None:
    """Going back to the old key works, as it is what the operator has put first."""
    source = make_source()
    new_first()
    assert run(COMMAND, "--by", "Operator").code == 0
    assert ClosedKey.objects.values_list("key_id", "closed_by").get() == (OLD_ID, "Operator")
    kfs_settings(KEYS=[OLD, NEW])
    assert run("run_credential_backfill").code == 1
    for arguments in ([], ["--dry-run"]):
        refused = run(COMMAND, *arguments)
        assert (refused.code, refused.err.strip().splitlines()[-1]) == (1, f"CommandError: {REFUSED}")
    assert sealed(files()) == {NEW_ID: 1}
    (closed,) = (one for one in deployment_checks() if one.id == "kfs_credentials.E016")
    assert closed.msg == (
        f"Key {OLD_ID} is closed: `manage.py reencrypt_secrets` moves all secrets to another one, and nothing comes "
        "into use under this one any more. Put the new key first in this process's KFS_CREDENTIALS['KEYS'], and "
        "restart it."
    )
    assert run(COMMAND, "--by", "Operator", "--reopen").code == 0
    assert ClosedKey.objects.values_list("key_id", flat=True).get() == NEW_ID
    assert sealed(files()) == {OLD_ID: 1}
    assert make_source().credential_ref
    events = Event.objects.filter(actor="Operator").order_by("id").values_list("kind", "detail", "credential_ref")
    assert list(events) == [
        (EventKind.KEY_CLOSED, OLD_ID, None),
        (EventKind.REENCRYPTED, NEW_ID, ref_of(source)),
        (EventKind.KEY_CLOSED, NEW_ID, None),
        (EventKind.KEY_OPENED, OLD_ID, None),
        (EventKind.REENCRYPTED, OLD_ID, ref_of(source)),
    ]


def test_a_command_with_an_old_ring_says_so(run: Run, new_first: Callable[[], None], kfs_settings: Change) -> None:
    """It ends with 1, before it touches a row."""
    make_source()
    SourceFactory.create()
    new_first()
    run(COMMAND)
    kfs_settings(KEYS=[OLD, NEW])
    outcome = run("run_credential_backfill")
    assert outcome.code == 1
    assert re.search(rf"^CommandError: Key {OLD_ID} is closed: .* and\s+restart\s+it\.$", outcome.err)


def test_a_cleanup_with_an_old_ring_that_has_to_make_a_copy_says_so(
    run: Run, store: EncryptedStore, new_first: Callable[[], None], kfs_settings: Change
) -> None:
    """It erases without any key; a source whose ref was claimed for erasure gets its copy by another worker."""
    source = make_source()
    row = add_secret(store, source, "deleting")
    name_ref(source, row.credential_ref)
    new_first()
    run(COMMAND)
    kfs_settings(KEYS=[OLD, NEW])
    outcome = run("run_secret_cleanup", "--due")
    assert outcome.code == 1
    assert re.search(rf"0 erased.* in [0-9.]+ s; then Key {OLD_ID} is closed: ", outcome.err)
    kfs_settings(KEYS=[NEW, OLD])
    assert "1 source rescued by a copy" in run("run_secret_cleanup", "--due").out
    assert known(ref_of(source)).key_id == NEW_ID


def test_one_run_at_a_time(run: Run, new_first: Callable[[], None]) -> None:
    """Two of them with different rings would undo each other's work. A dead one is waited for as long as its lease."""
    make_source()
    new_first()
    first = Reencryption(using="default", worker="first", lease=60.0, by="tests")
    first.begin()
    before = table_contents()
    outcome = run(COMMAND)
    assert outcome.code == 1
    assert outcome.err.strip().endswith(
        "Another reencrypt_secrets is at work on the database 'default', or was until a moment ago. Wait for its end; "
        "if it was killed, for 60 s (KFS_CREDENTIALS['LEASE'])."
    )
    assert table_contents() == before
    execute("UPDATE kfs_credentials_round SET lease_expires_at = now() - interval '1 second'")
    assert run(COMMAND).code == 0
    assert Round.objects.get(pk=Round.REENCRYPTION).lease_token is None
