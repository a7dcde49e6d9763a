"""The SQL, in files: `schema/` for the migrations, one file each, and a folder for each state machine's statements."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

from django.db import connections


@cache
def read(name: str) -> str:
    """Return the text of a file here, by its path without the ending: `read("schema/0001_base")`."""
    return resources.files(__name__).joinpath(f"{name}.sql").read_text(encoding="utf-8")


def query(using: str, name: str, /, **parameters: Any) -> list[tuple[Any, ...]]:
    """Run the statement in a file on alias `using`, and return its rows. The names are those in the file."""
    with connections[using].cursor() as cursor:
        cursor.execute(read(name), parameters)
        return list(cursor.fetchall())


def run_block(using: str, name: str, /, **values: str) -> None:
    """Run the DO block in a file on alias `using`, inside the caller's transaction.

    Such a block takes no parameters. Its `values` are settings of the transaction, and gone with it: `kfs_credentials.`
    and the name.
    """
    with connections[using].cursor() as cursor:
        for setting, value in values.items():
            cursor.execute("SELECT set_config(%s, %s, true)", [f"kfs_credentials.{setting}", value])
        cursor.execute(read(name))
