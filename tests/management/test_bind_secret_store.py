"""Binding: what an operator sees, and is asked. What resolves which mishap: tests/binding."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from kfs_credentials.models import Binding, Event
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.backfill.runs import execute
from tests.cleanup.rows import add_secret
from tests.management.commands import Run

pytestmark = pytest.mark.django_db(transaction=True)


class Terminal(io.StringIO):
    """A terminal on which somebody has typed something."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def lost(store: EncryptedStore) -> EncryptedStore:
    """A store with two secrets in use; the database's half of the binding is lost."""
    add_secret(store, None, "active")
    add_secret(store, None, "active")
    execute("DELETE FROM kfs_credentials_binding")
    return store


def environment(store: EncryptedStore) -> str:
    seen: Any = store.read_probe()
    return str(seen.environment_id)


def test_they_know_each_other(run: Run, store: EncryptedStore) -> None:
    outcome = run("bind_secret_store")
    assert (outcome.code, outcome.err) == (0, "")
    known = f"environment {environment(store)}, epoch 0"
    assert outcome.out == (
        f"database  default  {known}\nstore     default  {known}\nsecrets            none in use\n"
        "They know each other. Nothing was changed.\n"
    )


def test_it_shows_and_asks(run: Run, lost: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(lost)
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    outcome = run("bind_secret_store", "--by", "somebody")
    assert outcome.code == 0
    assert outcome.err == (
        "This binds them: whoever else uses the store 'default' is refused from then on. Type yes to go on: "
    )
    assert outcome.out == (
        "database  default  is not bound\n"
        f"store     default  environment {before}, epoch 0\n"
        "secrets            2 of 2 in use that were tried can be read\n"
        "The problem: this database is not bound to the store.\n"
        "Bound. See `manage.py credential_status`.\n"
    )
    binding = Binding.objects.get()
    assert (binding.bound_by, binding.epoch, str(binding.environment_id)) == ("somebody", 1, environment(lost))
    assert binding.confirmed_at is not None
    assert binding.lease_token is None
    assert Event.objects.filter(kind="bound", actor="somebody").count() == 1
    assert "store default: bound by somebody at " in run("credential_status").out


def test_another_answer(run: Run, lost: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("default\n"))
    outcome = run("bind_secret_store")
    assert outcome.code == 1
    assert outcome.err.endswith("CommandError: Not confirmed. Nothing was changed.\n")
    assert not Binding.objects.exists()


def test_nobody_to_ask(run: Run, lost: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    outcome = run("bind_secret_store")
    assert outcome.code == 1
    assert outcome.err == (
        "CommandError: This binds them: whoever else uses the store 'default' is refused from then on. Nobody can be "
        "asked here: give --yes if that is right. Nothing was changed.\n"
    )
    assert not Binding.objects.exists()


def test_the_dry_run_changes_nothing(run: Run, lost: EncryptedStore) -> None:
    outcome = run("bind_secret_store", "--dry-run")
    assert outcome.code == 0
    assert outcome.out.endswith("not bound to the store.\nNothing was changed.\n")
    assert not Binding.objects.exists()


def test_not_one_can_be_read(run: Run, lost: EncryptedStore, files: Any) -> None:
    for path in files():
        path.unlink()
    outcome = run("bind_secret_store", "--yes")
    assert outcome.code == 1
    assert outcome.err == (
        "CommandError: Not one of 2 secrets in use that were tried can be read from this store: it is not theirs, or "
        "the key is not. Nothing was changed. If they are lost, say --none-readable.\n"
    )
    assert not Binding.objects.exists()
    assert run("bind_secret_store", "--yes", "--none-readable").code == 0
    assert Binding.objects.exists()


def test_no_such_store(run: Run, store: EncryptedStore) -> None:
    outcome = run("bind_secret_store", "--store", "archive")
    assert (outcome.code, outcome.err) == (
        1,
        "CommandError: KFS_CREDENTIALS['STORES'] has no 'archive'. It has: default.\n",
    )


def test_a_store_that_is_not_there(run: Run, store: EncryptedStore, secrets_directory: Path, tmp_path: Path) -> None:
    secrets_directory.rename(tmp_path / "elsewhere")
    outcome = run("bind_secret_store", "--yes")
    assert outcome.code == 1
    assert "the directory for secrets does not exist" in outcome.err


def test_cut_short_in_the_middle(run: Run, lost: EncryptedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it was done again, nothing is put or erased."""

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lost, "start_replace_probe", killed)
        outcome = run("bind_secret_store", "--yes")
    assert (outcome.code, outcome.err) == (4, "CommandError: Interrupted. It is safe to run this again.\n")
    refused = run("run_secret_cleanup")
    assert refused.code == 1
    assert "somebody has begun to bind this database to the store, and did not finish" in refused.err
    assert "NOT FINISHED" in run("credential_status").out
    assert run("bind_secret_store", "--yes").code == 0
    assert run("run_secret_cleanup", "--due").code in (0, 3)
