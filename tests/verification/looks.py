"""What the tests of the verification share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections

from kfs_credentials.verification.findings import Finding, FindingClass
from kfs_credentials.verification.run import Run


def found(**options: Any) -> list[Finding]:
    """Verify, and return all findings, the history of other tests' tables aside."""
    run = Run("default", **options)
    run.run()
    return list(run.findings.listed())


def classes(**options: Any) -> list[str]:
    """Verify, and return the classes of all findings."""
    return [finding.what.value for finding in found(**options)]


def only(*what: FindingClass) -> dict[str, Any]:
    """Return the option that looks for these alone."""
    return {"classes": what}


def elsewhere(*statements: tuple[str, Any]) -> None:
    """Run statements as somebody else, in a session of their own; each has one parameter."""
    other = connections.create_connection("default")
    try:
        with other.cursor() as cursor:
            for statement, parameter in statements:
                cursor.execute(statement, [parameter])
    finally:
        other.close()


@contextmanager
def before_statement(part: str, number: int, act: Callable[[], None]) -> Iterator[None]:
    """Let something happen right before the statement that has `part` in it is run for the `number`th time."""
    times = 0

    def wrapper(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        nonlocal times
        if part in str(sql):
            times += 1
            if times == number:
                act()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper):
        yield
    assert times >= number, f"{part!r} was run {times} times"
