"""The example project's settings come from the environment; what is wrong there is said by its name, never quoted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from example_project import environment
from kfs_credentials.conf import Settings

ROOT = Path(__file__).resolve().parents[1]
KEY, OTHER_KEY = "1a" * 32, "2b" * 32
STORES = {"default": {"BACKEND": "kfs_credentials.stores.encrypted.EncryptedStore", "OPTIONS": {}}}

# A value of each setting, and what the package is to get.
VALUES: dict[str, tuple[str, object]] = {
    "STORES": (json.dumps(STORES), STORES),
    "ENVIRONMENT": ("staging", "staging"),
    "MAX_SECRET_BYTES": ("1000", 1000),
    "BATCH_SIZE": ("7", 7),
    "BATCH_BYTES": ("70000", 70000),
    "STORE_THREADS": ("3", 3),
    "STORE_TIMEOUT": ("1.5", 1.5),
    "LEASE": ("90", 90.0),
    "MAX_ATTEMPTS": ("9", 9),
    "RETRY_BASE": ("0", 0.0),
    "RETRY_MAX": (" 30 ", 30.0),
    "POLL_INTERVAL": ("0.05", 0.05),
    "RECOVER_AFTER": ("1", 1.0),
    "ERASE_GRACE": ("1e3", 1000.0),
    "LATE_WRITE_HORIZON": ("2", 2.0),
    "PARK_AFTER": ("4", 4),
    "LEDGER_RETENTION": ("5", 5.0),
    "EVENT_RETENTION": ("6", 6.0),
    "LOCK_TIMEOUT": ("0.5", 0.5),
    "RATE_LIMIT": ("12.5", 12.5),
    "LEGACY_READS": ("no", False),
}


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("KFS_", "KNOWLEDGE_", "DATABASE_URL")):
            monkeypatch.delenv(name)


def test_without_an_environment() -> None:
    assert environment.credentials_settings() == {}


def test_there_is_a_value_for_each_setting() -> None:
    assert {"KEYS", *VALUES} == set(Settings.all())


@pytest.mark.parametrize(("name", "text", "value"), [(name, *pair) for name, pair in VALUES.items()], ids=VALUES)
def test_each_setting(monkeypatch: pytest.MonkeyPatch, settings: Any, name: str, text: str, value: object) -> None:
    monkeypatch.setenv(f"KFS_CREDENTIALS_{name}", text)
    assert environment.credentials_settings() == {name: value}
    settings.KFS_CREDENTIALS = environment.credentials_settings()
    assert getattr(Settings(), name) == value


@pytest.mark.parametrize("name", VALUES)
def test_an_empty_value_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"KFS_CREDENTIALS_{name}", " ")
    assert environment.credentials_settings() == {}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("LEASE", "canary", "a number of seconds above 0"),
        ("LEASE", "0", "a number of seconds above 0"),
        ("LEASE", "10 canary", "a number of seconds above 0"),
        ("LEASE", "inf", "a number of seconds above 0"),
        ("ERASE_GRACE", "-1", "a number of seconds, 0 or more"),
        ("BATCH_SIZE", "1.5", "a whole number, 1 or more"),
        ("BATCH_SIZE", "0", "a whole number, 1 or more"),
        ("BATCH_SIZE", "1,000", "a whole number, 1 or more"),
        ("MAX_SECRET_BYTES", "64K", "a whole number, 2 or more"),
        ("LEGACY_READS", "canary", "True or False"),
        ("RATE_LIMIT", "0", "None, or a number of secrets a second above 0"),
        ("STORES", "{canary", "a dictionary of aliases, each with a BACKEND and, if needed, OPTIONS"),
        ("STORES", '{"default": "canary"}', "a dictionary of aliases, each with a BACKEND and, if needed, OPTIONS"),
    ],
)
def test_a_value_that_the_setting_does_not_take(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, expected: str
) -> None:
    monkeypatch.setenv(f"KFS_CREDENTIALS_{name}", text)
    with pytest.raises(ImproperlyConfigured) as caught:
        environment.credentials_settings()
    assert str(caught.value) == f"KFS_CREDENTIALS_{name} must be {expected}."
    assert caught.value.__context__ is None, "the context would quote the value"


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "ON"])
def test_what_is_true(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KFS_CREDENTIALS_LEGACY_READS", text)
    assert environment.credentials_settings() == {"LEGACY_READS": True}


def test_a_setting_that_there_is_not_is_left_to_the_system_check(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    monkeypatch.setenv("KFS_CREDENTIALS_LAESE", "canary")
    settings.KFS_CREDENTIALS = environment.credentials_settings()
    assert Settings().problems() == ["KFS_CREDENTIALS has no setting 'LAESE'. Did you mean 'LEASE'?"]


# Keys.


@pytest.mark.parametrize("text", [f"{KEY},{OTHER_KEY}", f" {KEY} , {OTHER_KEY} ", f"{KEY},\n{OTHER_KEY},"])
def test_keys_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KFS_CREDENTIALS_KEYS", text)
    assert environment.keys() == [KEY, OTHER_KEY]


@pytest.mark.parametrize("text", ["", " , "])
def test_empty_keys_are_never_the_demos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setattr(environment, "DEMO_KEY_FILE", tmp_path / "key")
    assert environment.keys() == [KEY]
    monkeypatch.setenv("KFS_CREDENTIALS_KEYS", text)
    assert environment.keys() == []


def test_no_keys_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "DEMO_KEY_FILE", tmp_path / "key")
    assert environment.keys() == []


def test_the_key_of_knowledge_fs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOWLEDGE_SOURCE_SECRET_KEY", KEY)
    assert environment.keys() == [KEY]
    monkeypatch.setenv("KFS_CREDENTIALS_KEYS", OTHER_KEY)
    assert environment.keys() == [OTHER_KEY]


def test_a_key_of_knowledge_fs_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOWLEDGE_SOURCE_SECRET_KEY", "canary")
    with pytest.raises(ImproperlyConfigured) as caught:
        environment.keys()
    assert str(caught.value).startswith("KNOWLEDGE_SOURCE_SECRET_KEY: A key must be 64 hex digits or base64")
    assert "canary" not in str(caught.value)
    assert caught.value.__context__ is None


# What knowledge-fs's own service reads.


@pytest.mark.parametrize(
    ("theirs", "text", "value"),
    [
        ("INTERVAL_MS", "1500", {"POLL_INTERVAL": 1.5}),
        ("INTERVAL_MS", "0", {"POLL_INTERVAL": 0.0}),
        ("LEASE_MS", "30000", {"LEASE": 30.0}),
        ("DISCOVERY_BATCH", "100", {"BATCH_SIZE": 100}),
        ("CLAIM_BATCH", "5", {"BATCH_SIZE": 5}),
        ("MAX_RETRIES", "5", {"MAX_ATTEMPTS": 5}),
        ("MAX_RETRIES", "", {}),
    ],
)
def test_the_names_of_knowledge_fs(
    monkeypatch: pytest.MonkeyPatch, theirs: str, text: str, value: dict[str, object]
) -> None:
    monkeypatch.setenv(f"KNOWLEDGE_SOURCE_CREDENTIAL_BACKFILL_{theirs}", text)
    assert environment.credentials_settings() == value


def test_two_of_theirs_are_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOWLEDGE_SOURCE_CREDENTIAL_BACKFILL_DISCOVERY_BATCH", "100")
    monkeypatch.setenv("KNOWLEDGE_SOURCE_CREDENTIAL_BACKFILL_CLAIM_BATCH", "5")
    assert environment.credentials_settings() == {"BATCH_SIZE": 100}


def test_ours_go_before_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOWLEDGE_SOURCE_CREDENTIAL_BACKFILL_LEASE_MS", "30000")
    monkeypatch.setenv("KFS_CREDENTIALS_LEASE", "90")
    assert environment.credentials_settings() == {"LEASE": 90.0}


@pytest.mark.parametrize(
    ("theirs", "text", "expected"),
    [
        ("LEASE_MS", "canary", "a number of milliseconds above 0"),
        ("INTERVAL_MS", "-1", "a number of milliseconds, 0 or more"),
        ("DISCOVERY_BATCH", "0", "a whole number, 1 or more"),
        ("MAX_RETRIES", "2.5", "a whole number, 1 or more"),
    ],
)
def test_a_value_of_theirs_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, theirs: str, text: str, expected: str
) -> None:
    monkeypatch.setenv(f"KNOWLEDGE_SOURCE_CREDENTIAL_BACKFILL_{theirs}", text)
    with pytest.raises(ImproperlyConfigured) as caught:
        environment.credentials_settings()
    assert str(caught.value) == f"KNOWLEDGE_SOURCE_CREDENTIAL_BACKFILL_{theirs} must be {expected}."


# The database and the directory.


def test_a_database_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://somebody:p%40ss@db.example:5433/knowledge")
    assert environment.database() == {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "knowledge",
        "USER": "somebody",
        "PASSWORD": "p@ss",
        "HOST": "db.example",
        "PORT": 5433,
    }


def test_a_database_url_with_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql:///knowledge?host=/run/postgresql&user=somebody")
    database = environment.database()
    assert database["NAME"] == "knowledge"
    assert database["OPTIONS"] == {"host": "/run/postgresql", "user": "somebody"}


@pytest.mark.parametrize(
    "url",
    [
        "canary",
        "canary:canary@localhost/knowledge",
        "sqlite:///canary.sqlite3",
        "mysql://somebody:canary@localhost/knowledge",
        "postgres://somebody:can/ary@localhost/knowledge",
        "postgres://somebody:x@localhost:canary/knowledge",
        "postgres://[canary/knowledge",
    ],
)
def test_a_database_url_that_is_none(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    with pytest.raises(ImproperlyConfigured) as caught:
        environment.database()
    assert str(caught.value) == (
        "DATABASE_URL must be postgres://USER:PASSWORD@HOST:PORT/NAME, or postgres:///NAME?host=DIRECTORY for a "
        "socket, with each special character of a password as % and two hex digits."
    )
    assert caught.value.__context__ is None


def test_the_directory_for_the_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.secrets_directory() == str(environment.DEMO_DIR / "secrets")
    monkeypatch.setenv("KFS_SECRETS_DIR", "/var/lib/secrets")
    assert environment.secrets_directory() == "/var/lib/secrets"
    monkeypatch.setenv("KFS_SECRETS_DIR", "secrets")
    with pytest.raises(ImproperlyConfigured, match=r"^KFS_SECRETS_DIR must be an absolute path\.$"):
        environment.secrets_directory()


# From outside.


def manage(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `manage.py` with these variables, on a database that is out of reach."""
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
            "DATABASE_URL": "postgres://nobody@localhost:1/none",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("KFS_CREDENTIALS_LEASE", "canary", "KFS_CREDENTIALS_LEASE must be a number of seconds above 0."),
        ("KFS_SECRETS_DIR", "canary", "KFS_SECRETS_DIR must be an absolute path."),
        ("DATABASE_URL", "canary", "DATABASE_URL must be postgres://USER:PASSWORD@HOST:PORT/NAME"),
        ("KNOWLEDGE_SOURCE_SECRET_KEY", "canary", "KNOWLEDGE_SOURCE_SECRET_KEY: A key must be 64 hex digits"),
    ],
)
def test_a_command_says_which_variable_is_wrong(variable: str, text: str, message: str) -> None:
    outcome = manage("credential_status", **{variable: text})
    assert outcome.returncode == 1
    assert outcome.stderr.startswith(message)
    assert outcome.stderr.count("\n") == 1, "one sentence, and no traceback"
    assert "canary" not in outcome.stderr


def test_keys_that_are_none_are_named_by_their_place(tmp_path: Path) -> None:
    outcome = manage("credential_status", KFS_CREDENTIALS_KEYS=f"{KEY},canary", KFS_SECRETS_DIR=str(tmp_path))
    assert outcome.returncode == 1
    assert "KFS_CREDENTIALS['KEYS'], key 2 of 2: A key must be 64 hex digits" in outcome.stderr
    assert "canary" not in outcome.stderr
    # Help is at hand.
    assert manage("generate_secret_key", KFS_CREDENTIALS_KEYS="canary").returncode == 0


def test_a_password_is_in_no_message(tmp_path: Path) -> None:
    outcome = manage(
        "credential_status",
        DATABASE_URL="postgres://somebody:canary@localhost:1/none",
        KFS_CREDENTIALS_KEYS=KEY,
        KFS_SECRETS_DIR=str(tmp_path),
    )
    assert outcome.returncode == 5
    assert "out of reach" in outcome.stderr
    assert "canary" not in outcome.stderr
