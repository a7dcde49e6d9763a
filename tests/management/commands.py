"""Commands as a user runs them: in this process, or in one of their own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from django.core.management import load_command_class
from django.db import connections

ROOT = Path(__file__).resolve().parents[2]
MANAGE = [sys.executable, str(ROOT / "manage.py")]


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line of standard output."""
        return self.out.strip().splitlines()[-1]

    @property
    def json(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


Run = Callable[..., Outcome]
Admin = psycopg.Connection[Any]


def runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `manage.py` with these arguments in this process, system checks included."""

    def run(command: str, *arguments: object) -> Outcome:
        capsys.readouterr()
        app = "example_project" if command == "demo" else "kfs_credentials"
        code = 0
        try:
            load_command_class(app, command).run_from_argv(["manage.py", command, *map(str, arguments)])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def dsn() -> str:
    """Return how others connect to the tests' database."""
    return conninfo("default")


def conninfo(alias: str) -> str:
    """Return how others connect to a database that Django knows by `alias`."""
    parameters = _parameters(alias)
    return psycopg.conninfo.make_conninfo(dbname=parameters.pop("name"), **parameters)


def database_url(alias: str = "default") -> str:
    """Return the URL of a database that Django knows by `alias`."""
    parameters = _parameters(alias)
    name = quote(parameters.pop("name"), safe="")
    return f"postgres:///{name}?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in parameters.items())


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process of the example project: these variables, and nothing else of ours."""
    ours = ("KFS_", "KNOWLEDGE_", "DJANGO_", "DATABASE_URL", "PYTEST_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, **variables}


def _parameters(alias: str) -> dict[str, str]:
    settings = connections[alias].settings_dict
    return {key.lower(): str(settings[key]) for key in ("NAME", "USER", "PASSWORD", "HOST", "PORT") if settings[key]}
