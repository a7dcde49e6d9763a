"""The system checks: each with its message, and none with a key."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core import checks
from django.core.checks import CheckMessage
from django.db import IntegrityError, connection, connections
from django.test import override_settings

from kfs_credentials import sql
from kfs_credentials.checks import check_database, check_held_keys, invalid_indexes
from kfs_credentials.errors import StoreUnavailable
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.factories import SourceFactory

PROJECT = Path(__file__).parents[1]
EXAMPLE = "00112233445566778899aabbccddeeff" * 2
CANARY = "canary-4ac8d1"
KEYS_HINT = "The first key encrypts, all of them decrypt. Keep them with your other production secrets."
MAKE_ONE = "make one with `manage.py generate_secret_key`."


def found(*, databases: list[str] | None = None) -> list[CheckMessage]:
    """Return what the checks of this package find, by number: Django runs checks in no order."""
    messages = checks.run_checks(tags=["kfs_credentials"], databases=databases or [])
    ours = [message for message in messages if str(message.id).startswith("kfs_credentials.")]
    return sorted(ours, key=lambda message: str(message.id))


def said(messages: list[CheckMessage]) -> list[tuple[str, str]]:
    return [(str(message.id).removeprefix("kfs_credentials."), message.msg) for message in messages]


@pytest.fixture(autouse=True)
def _a_store_that_is_right(secrets_directory: Path) -> None:
    """What a test does not change is right."""


def test_nothing_is_found_where_all_is_right() -> None:
    assert found() == []


# Settings and keys.


def test_settings_that_are_wrong(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(LEASE=-1, BATCHSIZE=5, KEYS=CANARY)
    messages = found()

    assert said(messages) == [
        ("E001", "KFS_CREDENTIALS has no setting 'BATCHSIZE'. Did you mean 'BATCH_SIZE'?"),
        ("E001", "KFS_CREDENTIALS['KEYS'] must be a list of keys (32 bytes each, as bytes, 64 hex digits or base64)."),
        ("E001", "KFS_CREDENTIALS['LEASE'] must be a number of seconds above 0, or a timedelta."),
    ]
    assert CANARY not in repr(messages)


def test_settings_that_are_no_dictionary() -> None:
    with override_settings(KFS_CREDENTIALS=[CANARY]):
        messages = found()
    assert said(messages) == [("E001", "KFS_CREDENTIALS must be a dictionary.")]


def test_stores_that_are_none(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(STORES=["default"])
    assert said(found()) == [
        (
            "E001",
            "KFS_CREDENTIALS['STORES'] must be a dictionary of aliases, each with a BACKEND and, if needed, OPTIONS.",
        )
    ]


KEYS: dict[str, tuple[list[Any], str]] = {
    "missing": ([], f"KFS_CREDENTIALS['KEYS'] is empty: there is nothing to encrypt with; {MAKE_ONE}"),
    "short": (
        [CANARY],
        (
            "KFS_CREDENTIALS['KEYS'], key 1 of 1: A key must be 64 hex digits or base64 of 32 bytes, and these 13 "
            f"characters are neither; {MAKE_ONE}"
        ),
    ),
    "malformed": (
        ["a" * 64, "canary-4ac8d1".ljust(64, "?")],
        (
            "KFS_CREDENTIALS['KEYS'], key 2 of 2: A key must be 64 hex digits or base64 of 32 bytes, and these 64 "
            f"characters are neither; {MAKE_ONE}"
        ),
    ),
    "duplicate": (
        ["ca4a47" * 10 + "ffff", bytes.fromhex("ca4a47" * 10 + "ffff")],
        "KFS_CREDENTIALS['KEYS'], key 2 of 2 is the same as key 1: remove one.",
    ),
    "example": (
        [EXAMPLE.upper()],
        f"KFS_CREDENTIALS['KEYS'], key 1 of 1 is the example of the README, which is no secret; {MAKE_ONE}",
    ),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_are_wrong(kfs_settings: Callable[..., None], case: str) -> None:
    keys, message = KEYS[case]
    kfs_settings(KEYS=keys)
    messages = found()

    assert said(messages) == [("E002", message)]
    assert messages[0].hint == KEYS_HINT
    for text in (repr(messages), str(messages[0]), str(vars(messages[0]))):
        for key in keys:
            assert (key if isinstance(key, str) else key.hex()).casefold() not in text.casefold()
            assert repr(key) not in text


def test_keys_that_change_later_are_seen(kfs_settings: Callable[..., None]) -> None:
    kfs_settings(KEYS=["a" * 64])
    assert found() == []
    kfs_settings(KEYS=["a" * 63])
    assert [message.id for message in found()] == ["kfs_credentials.E002"]
    kfs_settings(KEYS=["b" * 64])
    assert found() == []


# Stores.


def store(backend: str = "kfs_credentials.stores.encrypted.EncryptedStore", **options: Any) -> dict[str, Any]:
    return {"BACKEND": backend, "OPTIONS": options}


def in_directory(location: Path) -> dict[str, Any]:
    backend = "kfs_credentials.stores.files.DurableFileStorage"
    return store(storage={"BACKEND": backend, "OPTIONS": {"location": str(location)}})


WHERE = "KFS_CREDENTIALS['STORES']['default']"
STORES: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({}, "KFS_CREDENTIALS['STORES'] has no 'default': say where the secrets go. The README shows how."),
    "not to be imported": (
        {"default": store("no.such.Store")},
        f"{WHERE}: 'no.such.Store' cannot be imported: No module named 'no'.",
    ),
    "no store": (
        {"default": store("django.core.files.storage.FileSystemStorage")},
        f"{WHERE}: 'django.core.files.storage.FileSystemStorage' is not a SecretStore.",
    ),
    "wrong options": (
        {"default": store(password=CANARY)},
        f"{WHERE}: EncryptedStore cannot be made from these OPTIONS; it takes storage, prefix.",
    ),
    "storage that cannot create once": (
        {"default": store(storage={"BACKEND": "django.core.files.storage.FileSystemStorage"})},
        (
            f"{WHERE}: FileSystemStorage cannot create a file once and durably, and a secret that is overwritten is "
            "lost. Use kfs_credentials.stores.files.DurableFileStorage."
        ),
    ),
}


@pytest.mark.parametrize("case", STORES)
def test_stores_that_cannot_be_made(kfs_settings: Callable[..., None], case: str) -> None:
    stores, message = STORES[case]
    kfs_settings(STORES=stores)
    messages = found()

    assert said(messages) == [("E003", message)]
    assert CANARY not in f"{messages} {vars(messages[0])}"


def test_stores_that_cannot_be_used(kfs_settings: Callable[..., None], secrets_directory: Path, tmp_path: Path) -> None:
    away, file = tmp_path / "away", tmp_path / "file"
    file.write_text("")
    stores = {"default": in_directory(away), "right": in_directory(secrets_directory), "other": in_directory(file)}
    kfs_settings(STORES=stores)

    assert said(found()) == [
        (
            "E004",
            (
                f"{WHERE}: the directory for secrets does not exist: {away}. Mount the volume that holds it, or make "
                f"it with `mkdir -m 700 {away}` if it is new."
            ),
        ),
        ("E004", f"KFS_CREDENTIALS['STORES']['other']: the place for secrets is not a directory: {file}."),
    ]


def test_a_store_that_does_not_answer_keeps_nobody_from_starting(
    secrets_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> None:
        raise StoreUnavailable("down for a moment")

    monkeypatch.setattr(EncryptedStore, "_check", down)
    (message,) = found()
    assert said([message]) == [("W010", f"{WHERE}: down for a moment")]
    assert not message.is_serious()


def test_a_directory_that_is_missing_and_a_key_that_is_wrong_are_both_said(
    kfs_settings: Callable[..., None], secrets_directory: Path
) -> None:
    secrets_directory.rmdir()
    kfs_settings(KEYS=[])
    assert [identity for identity, _ in said(found())] == ["E002", "E004"]


# The database.


class ToOther:
    """Routes this app to the alias `other`."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "kfs_credentials" else None

    db_for_write = db_for_read


@pytest.fixture
def sqlite() -> Iterator[None]:
    """An alias `other`, which is SQLite, and a router that sends this app there."""
    connections.settings["other"] = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "OPTIONS": {},
    }
    with override_settings(DATABASE_ROUTERS=[f"{__name__}.ToOther"]):
        yield
    connections["other"].close()
    connections["other"].connection = None  # SQLite keeps one that is in memory open
    del connections["other"]
    del connections.settings["other"]


@pytest.mark.usefixtures("sqlite")
def test_another_engine_than_postgresql() -> None:
    messages = found(databases=["other"])

    assert said(messages) == [("E005", "kfs_credentials needs PostgreSQL, and DATABASES['other'] is SQLite.")]
    assert messages[0].hint == "Route the app to a PostgreSQL database (DATABASE_ROUTERS), or change the ENGINE."


def test_psycopg2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    (message,) = found()

    assert said([message]) == [("E005", "kfs_credentials needs psycopg 3, and Django uses psycopg2 here.")]
    assert message.hint == 'Install it: pip install "kfs-credentials[binary]".'


@pytest.mark.django_db
def test_nothing_is_found_in_a_database_that_is_right() -> None:
    assert found(databases=["default"]) == []


@pytest.mark.django_db
def test_an_old_server(monkeypatch: pytest.MonkeyPatch) -> None:
    version = connection.get_database_version()[0]
    monkeypatch.setattr("kfs_credentials.checks.OLDEST_POSTGRESQL", version + 1)
    (message,) = found(databases=["default"])

    assert said([message]) == [
        (
            "E006",
            (
                f"kfs_credentials needs PostgreSQL {version + 1} or newer, and DATABASES['default'] is PostgreSQL "
                f"{version}."
            ),
        )
    ]
    assert found(databases=[]) == []


@pytest.mark.django_db
def test_row_level_security() -> None:
    role = f"kfs_limited_{uuid.uuid4().hex}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute("ALTER TABLE sources ENABLE ROW LEVEL SECURITY")
        assert found(databases=["default"]) == []  # it hides nothing from the owner

        cursor.execute(f"SET LOCAL ROLE {role}")
        messages = found(databases=["default"])
        cursor.execute("RESET ROLE")

    assert said(messages) == [
        (
            "E007",
            (
                "Row-level security hides rows of sources from this role, and a source that cannot be seen would be "
                "taken for one that was deleted."
            ),
        )
    ]
    assert messages[0].hint == (
        "Use a role with BYPASSRLS, or the owner of the tables without FORCE ROW LEVEL SECURITY."
    )


@pytest.fixture
def invalid_index(transactional_db: None) -> Iterator[str]:
    """An index that could not be built: two sources have the same type."""
    SourceFactory.create_batch(2, type="online_drive")
    with connection.cursor() as cursor:
        with pytest.raises(IntegrityError):
            cursor.execute("CREATE UNIQUE INDEX CONCURRENTLY hosts_own_idx ON sources (type)")
        assert invalid_indexes("default") == []  # the host's own business
        cursor.execute("DROP INDEX hosts_own_idx, kfs_credentials_legacy_idx")
        with pytest.raises(IntegrityError):
            cursor.execute("CREATE UNIQUE INDEX CONCURRENTLY kfs_credentials_legacy_idx ON sources (type)")
        yield "kfs_credentials_legacy_idx"
        cursor.execute("DROP INDEX kfs_credentials_legacy_idx")
        cursor.execute(sql.read("schema/0002_source_indexes"))


def test_an_index_that_is_invalid(invalid_index: str) -> None:
    (message,) = found(databases=["default"])

    assert said([message]) == [
        (
            "E008",
            "The index kfs_credentials_legacy_idx is INVALID: an interrupted CREATE INDEX CONCURRENTLY left it behind.",
        )
    ]
    assert (
        message.hint
        == "DROP INDEX CONCURRENTLY kfs_credentials_legacy_idx; then build it again as the migration has it."
    )


def test_what_keys_hold_in_a_database_that_is_out_of_reach(django_db_blocker: Any) -> None:
    """Whether a key may go is not known then. What it says otherwise is in tests/test_keys.py."""
    connections.settings["other"] = {**connections.settings["default"], "HOST": "/nonexistent"}
    try:
        with django_db_blocker.unblock(), override_settings(DATABASE_ROUTERS=[f"{__name__}.ToOther"]):
            (message,) = check_held_keys()
    finally:
        del connections["other"]
        del connections.settings["other"]

    assert said([message]) == [
        (
            "W012",
            "DATABASES['other'] could not be asked which keys its secrets are sealed under (OperationalError).",
        )
    ]


def test_a_database_that_is_out_of_reach(django_db_blocker: Any) -> None:
    connections.settings["other"] = {**connections.settings["default"], "HOST": "/nonexistent"}
    try:
        with django_db_blocker.unblock(), override_settings(DATABASE_ROUTERS=[f"{__name__}.ToOther"]):
            (message,) = check_database(databases=["other"])
    finally:
        del connections["other"]
        del connections.settings["other"]

    assert said([message]) == [
        (
            "W009",
            "DATABASES['other'] could not be asked for its version, row-level security and indexes (OperationalError).",
        )
    ]
    assert message.hint == "Check again once it can be reached."


# As an operator runs them: the example project, in a process of its own.


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    server = connection.get_connection_params()
    known = {
        f"PG{name.upper()}": str(server[name]) for name in ("host", "port", "user", "password") if server.get(name)
    }
    others = {
        name: value for name, value in os.environ.items() if not name.startswith(("KFS_", "KNOWLEDGE_", "DJANGO_"))
    }
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=PROJECT,
        env={**others, "DATABASE_URL": f"postgres:///{server['dbname']}", **known, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.django_db
def test_manage_py_check_finds_nothing_where_all_is_right(secrets_directory: Path) -> None:
    done = manage(
        *["check", "--database", "default"], KFS_SECRETS_DIR=str(secrets_directory), KFS_CREDENTIALS_KEYS="a" * 64
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "System check identified no issues (0 silenced).\n", "")


@pytest.mark.django_db
def test_manage_py_check_names_what_is_wrong_and_no_key(tmp_path: Path) -> None:
    done = manage("check", KFS_SECRETS_DIR=str(tmp_path / "away"), KFS_CREDENTIALS_KEYS=EXAMPLE)

    assert done.returncode == 1
    assert "(kfs_credentials.E002) KFS_CREDENTIALS['KEYS'], key 1 of 1 is the example of the README" in done.stderr
    assert f"(kfs_credentials.E004) {WHERE}: the directory for secrets does not exist: {tmp_path}/away." in done.stderr
    assert EXAMPLE not in done.stdout + done.stderr


def test_manage_py_check_database_sees_an_invalid_index(invalid_index: str, secrets_directory: Path) -> None:
    right = {"KFS_SECRETS_DIR": str(secrets_directory), "KFS_CREDENTIALS_KEYS": "a" * 64}
    done = manage("check", "--database", "default", **right)

    assert done.returncode == 1
    assert f"(kfs_credentials.E008) The index {invalid_index} is INVALID" in done.stderr
    assert manage("check", **right).returncode == 0
