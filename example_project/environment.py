"""Reads the settings from the environment, by django-environ. Errors name the variable, and never quote its value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import environ
from django.core.exceptions import ImproperlyConfigured

from example_project import postgres
from kfs_credentials.conf import Setting, Settings
from kfs_credentials.crypto import parse_key
from kfs_credentials.errors import InvalidKey

if TYPE_CHECKING:
    from collections.abc import Callable

BASE_DIR = Path(__file__).resolve().parent.parent
DEMO_DIR = BASE_DIR / ".demo"
"""What `make demo` makes: key, database, secrets. Not in git; `make clean` removes it."""
DEMO_KEY_FILE = DEMO_DIR / "key"

PREFIX = "KFS_CREDENTIALS_"
POSTGRESQL = ("postgres", "postgresql", "pgsql", "psql")
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

# What knowledge-fs's own service reads, so that one environment file serves both (its intervals are milliseconds).
THEIR_KEY = "KNOWLEDGE_SOURCE_SECRET_KEY"
THEIR_PREFIX = "KNOWLEDGE_SOURCE_CREDENTIAL_BACKFILL_"
THEIR_MILLISECONDS = {"INTERVAL_MS": "POLL_INTERVAL", "LEASE_MS": "LEASE"}
THEIR_NUMBERS = {"DISCOVERY_BATCH": "BATCH_SIZE", "CLAIM_BATCH": "BATCH_SIZE", "MAX_RETRIES": "MAX_ATTEMPTS"}

env = environ.Env()


def database() -> dict[str, Any]:
    """Return the entry of DATABASES that DATABASE_URL gives, else that of the demo's own server, which is started.

    Raises `ImproperlyConfigured` if neither can be had.
    """
    url = env.str("DATABASE_URL", default="")
    if not url:
        return _own_database()
    try:
        # By itself, django-environ would warn with all of a URL whose scheme it does not know.
        if urlsplit(url).scheme in POSTGRESQL:
            return dict(env.db_url("DATABASE_URL"))
    except ValueError:
        pass
    raise ImproperlyConfigured(
        "DATABASE_URL must be postgres://USER:PASSWORD@HOST:PORT/NAME, or postgres:///NAME?host=DIRECTORY for a "
        "socket, with each special character of a password as % and two hex digits."
    )


def _own_database() -> dict[str, str]:
    try:
        return postgres.running(DEMO_DIR / "postgres").django_database()
    except postgres.PostgresError as error:
        raise ImproperlyConfigured(f"There is no DATABASE_URL, and no server could be started: {error}") from None


def keys() -> list[str]:
    """Return the keys that the environment gives, else the demo's if there is one.

    Raises `ImproperlyConfigured` for a key of knowledge-fs's service that is none. Ours are looked at by the
    system check, so that `generate_secret_key` works while one of them is wrong.
    """
    if PREFIX + "KEYS" in env:
        given = env.str(PREFIX + "KEYS").split(",")
        return [key.strip() for key in given if key.strip()]
    if THEIR_KEY not in env:
        return DEMO_KEY_FILE.read_text().split() if DEMO_KEY_FILE.exists() else []
    key = env.str(THEIR_KEY)
    try:
        parse_key(key)
    except InvalidKey as error:
        problem = f"{THEIR_KEY}: {error}"
    else:
        return [key]
    raise ImproperlyConfigured(problem)


def secrets_directory() -> str:
    """Return what KFS_SECRETS_DIR gives, else the demo's; raises `ImproperlyConfigured` for a relative path."""
    directory = env.str("KFS_SECRETS_DIR", default="") or str(DEMO_DIR / "secrets")
    if not Path(directory).is_absolute():
        raise ImproperlyConfigured("KFS_SECRETS_DIR must be an absolute path.")
    return directory


def credentials_settings() -> dict[str, Any]:
    """Return the entries of KFS_CREDENTIALS that the environment gives, but for KEYS; an empty value gives none.

    KFS_CREDENTIALS_<NAME> goes before what knowledge-fs's service reads. STORES is JSON, durations are seconds.
    Raises `ImproperlyConfigured` for a value that the setting does not take.
    """
    known = Settings.all()
    given: dict[str, Any] = {}
    for theirs, name in THEIR_MILLISECONDS.items():
        given |= _read(THEIR_PREFIX + theirs, known[name], lambda text: float(text) / 1000, "of milliseconds")
    for theirs, name in THEIR_NUMBERS.items():
        for value in _read(THEIR_PREFIX + theirs, known[name], int).values():
            given[name] = max(value, given.get(name, value))  # two of theirs are one of ours
    for variable in sorted(os.environ):
        name = variable.removeprefix(PREFIX)
        if variable == name or name == "KEYS":
            continue
        if name in known:
            given |= _read(variable, known[name], _reader(known[name].default))
        else:
            given[name] = None  # the system check says that there is no such setting
    return given


def _read(
    variable: str, setting: Setting[Any], parse: Callable[[str], Any], unit: str = "of seconds"
) -> dict[str, Any]:
    if not env.str(variable, default="").strip():
        return {}
    try:
        return {setting.name: setting.read(env(variable, cast=lambda text: parse(text.strip())))}
    except (TypeError, ValueError, ArithmeticError):
        expected = setting.expects.removesuffix(", or a timedelta").replace("of seconds", unit)
    # Out here, where the error has no context: that would quote the value.
    raise ImproperlyConfigured(f"{variable} must be {expected}.")


def _reader(default: object) -> Callable[[str], Any]:
    """Return how a setting with this default is read from text."""
    if isinstance(default, bool):
        return _boolean
    if isinstance(default, int | str):
        return type(default)
    return json.loads if isinstance(default, dict) else float


def _boolean(text: str) -> bool:
    try:
        return BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError from None
