"""The commands as processes: on a terminal, in a pipe, and when they are asked to end."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from kfs_credentials.models import Source
from kfs_credentials.models import SourceSecretLifecycleRef as LedgerRow
from kfs_credentials.stores.encrypted import EncryptedStore
from tests.cleanup.rows import PAST, add_ref, add_secret
from tests.cleanup.workers import time_passes
from tests.factories import SourceFactory
from tests.management.commands import MANAGE, Admin, database_url, environment
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

Start = Callable[..., "subprocess.Popen[str]"]
BACKFILL = "run_credential_backfill"
Wait = Callable[[int], None]


@pytest.fixture
def start(secrets_directory: Path, settings: Settings) -> Iterator[Start]:
    """Return a function that starts `manage.py` on the tests' database; none of them outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, term: str = "xterm", **options: Any) -> subprocess.Popen[str]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        variables = {
            "DATABASE_URL": database_url(),
            "KFS_SECRETS_DIR": str(secrets_directory),
            "KFS_CREDENTIALS_KEYS": settings.KFS_CREDENTIALS["KEYS"][0].hex(),
            "KFS_CREDENTIALS_POLL_INTERVAL": "0.05",
            "TERM": term,
            "COLUMNS": "100",
        }
        process = subprocess.Popen([*MANAGE, *map(str, arguments)], env=environment(**variables), text=True, **streams)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def wait_for(admin: Admin) -> Iterator[Callable[[str], Wait]]:
    """Return a function that, told of an event of a table, returns one that waits until it has come so often."""
    admin.execute(
        "CREATE FUNCTION kfs_tests_moved() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_notify('kfs_tests_moved', NEW.id::text); RETURN NULL; END $$"
    )

    def listen(event: str) -> Wait:
        admin.execute(f"CREATE TRIGGER kfs_tests_moved AFTER {event} EXECUTE FUNCTION kfs_tests_moved()")
        admin.execute("LISTEN kfs_tests_moved")

        def wait(count: int) -> None:
            told = sum(1 for _ in admin.notifies(timeout=PATIENCE, stop_after=count))
            assert told >= count, f"{told} moved, not {count}"

        return wait

    yield listen
    admin.execute("DROP FUNCTION kfs_tests_moved CASCADE")


@pytest.fixture
def wait_for_moves(wait_for: Callable[[str], Wait]) -> Wait:
    """Return a function that waits until so many more sources are moved."""
    return wait_for("UPDATE OF credential_ref ON sources FOR EACH ROW")


@pytest.fixture
def wait_for_erasures(wait_for: Callable[[str], Wait]) -> Wait:
    """Return a function that waits until so many more refs are erased, or their erasure confirmed."""
    return wait_for("UPDATE ON source_secret_lifecycle_refs FOR EACH ROW WHEN (NEW.state = 'deleted')")


def test_it_watches_and_moves_what_comes_later(start: Start, wait_for_moves: Wait) -> None:
    SourceFactory.create_batch(2)
    worker = start("run_credential_backfill", "--watch")
    wait_for_moves(2)
    SourceFactory.create()
    wait_for_moves(1)
    # Credentials that come back to a source without a ref, too.
    again = SourceFactory.create(bare=True)
    Source.objects.filter(pk=again.pk).update(metadata={"credentials": {"token": "made-up"}})
    wait_for_moves(1)
    worker.send_signal(signal.SIGTERM)
    out, err = worker.communicate(timeout=PATIENCE)
    assert worker.returncode == 4
    assert re.fullmatch(
        r"4 moved in [0-9.]+ s\. Ended early: interrupted by a signal\. 0 left, nothing lost; "
        r"`manage\.py run_credential_backfill` goes on\.\n",
        out,
    )
    assert err == ""


def test_a_cleanup_watches_and_erases_what_comes_later(
    start: Start, wait_for_erasures: Wait, store: EncryptedStore
) -> None:
    for _ in range(2):
        add_secret(store)
    worker = start("run_secret_cleanup", "--watch")
    wait_for_erasures(2)
    add_secret(store, None, "retired")
    LedgerRow.objects.filter(state="retired").update(next_delete_at=PAST)
    wait_for_erasures(1)
    time_passes()
    wait_for_erasures(3 + 3)  # time passed by an update of rows that are erased
    worker.send_signal(signal.SIGTERM)
    out, err = worker.communicate(timeout=PATIENCE)
    assert worker.returncode == 4
    assert re.fullmatch(
        r"3 erased, 3 confirmed in [0-9.]+ s\. Ended early: interrupted by a signal\. 0 left; "
        r"`manage\.py run_secret_cleanup` goes on\.\n",
        out,
    )
    assert err == ""
    assert list(store.list()) == []
    assert LedgerRow.objects.leased().count() == 0


def on_a_terminal(start: Start, term: str, command: str = BACKFILL) -> tuple[subprocess.Popen[str], str, str]:
    """Run a command whose standard error is a terminal; return it, its standard output, and what was shown."""
    terminal, standard_error = pty.openpty()
    worker = start(command, "--batch-size", 10, term=term, stderr=standard_error)
    os.close(standard_error)
    shown = b""
    with suppress(OSError):  # EIO: the process has ended
        while part := os.read(terminal, 65_536):
            shown += part
    os.close(terminal)
    out, _ = worker.communicate(timeout=PATIENCE)
    return worker, out, shown.decode()


def test_a_bar_on_a_terminal(start: Start) -> None:
    SourceFactory.create_batch(30)
    worker, out, shown = on_a_terminal(start, "xterm")
    assert worker.returncode == 0
    assert re.fullmatch(r"30 moved in [0-9.]+ s\. Nothing is left to move or to look at\.\n", out)
    assert "moving" in shown
    assert "30/30" in shown
    assert "/s" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is hidden for good"
    assert "Nothing is left" not in shown  # said once


def test_a_bar_for_a_cleanup(start: Start, store: EncryptedStore) -> None:
    for _ in range(30):
        add_ref(None, "deleted, due")
    worker, out, shown = on_a_terminal(start, "xterm", "run_secret_cleanup")
    assert worker.returncode == 0
    assert re.fullmatch(r"0 erased, 30 confirmed in [0-9.]+ s\. Every erasure is confirmed\.\n", out)
    assert "erasing" in shown
    assert "30/30" in shown


def test_no_bar_on_a_terminal_that_cannot_draw_one(start: Start) -> None:
    SourceFactory.create()
    worker, _, shown = on_a_terminal(start, "dumb")
    assert (worker.returncode, shown) == (0, "")


def test_whoever_reads_may_go(start: Start) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("credential_status", stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (4, "")
