"""A database with secrets in its store, and what can happen to either of them."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from django.db import connections

from example_project.postgres_binaries import find_binaries
from kfs_credentials.errors import BindingProblem
from tests.management.commands import Run, conninfo
from tests.migrations.hosts import Host

Settings = Callable[..., None]

TENANT = "tenant-a"
TABLES = (
    "knowledge_spaces",
    "sources",
    "source_credential_backfills",
    "source_secret_lifecycle_refs",
    "kfs_credentials_secret_object",
    "kfs_credentials_binding",
    "kfs_credentials_round",
    "kfs_credentials_pause",
    "kfs_credentials_closed_key",
)


def add_sources(host: Host, count: int) -> list[Any]:
    """Make legacy sources in a space of their own; return their ids."""
    space = host.value(
        "INSERT INTO knowledge_spaces (id, tenant_id, slug, name, created_at, updated_at) "
        "VALUES (gen_random_uuid(), %s, gen_random_uuid(), 'Space', now(), now()) RETURNING id",
        [TENANT],
    )
    return [
        source
        for (source,) in host.rows(
            "INSERT INTO sources SELECT gen_random_uuid(), %s, 'drive', 'active', 'Source', 'https://files.example/', "
            "jsonb_build_object('credentials', jsonb_build_object('token', 'made-up-' || n)), '[]', 1, now(), now() "
            "FROM generate_series(1, %s) AS n RETURNING id",
            [space, count],
        )
    ]


def bring_back(host: Host, credentials: str) -> Any:
    """Let credentials, as JSON, lie in clear in a source that has a ref; return its id."""
    return host.value(
        "UPDATE sources SET metadata = jsonb_build_object('credentials', %s::jsonb) WHERE id IN "
        "(SELECT id FROM sources WHERE credential_ref IS NOT NULL ORDER BY id LIMIT 1) RETURNING id",
        [credentials],
    )


def retire(host: Host, count: int) -> None:
    """Take the refs of so many sources away from them, and let their erasure be due."""
    host.run(
        "UPDATE sources SET credential_ref = NULL WHERE id IN "
        f"(SELECT id FROM sources WHERE credential_ref IS NOT NULL LIMIT {count})",
        "UPDATE source_secret_lifecycle_refs AS ledger SET state = 'retired', next_delete_at = now() - interval '1 s' "
        "WHERE state = 'active' AND NOT EXISTS (SELECT FROM sources WHERE credential_ref = ledger.credential_ref)",
    )


def erase(run: Run, host: Host) -> None:
    """Erase one ref: a batch, and so an epoch."""
    retire(host, 1)
    outcome = run("run_secret_cleanup", "--database", host.alias, "--due")
    assert outcome.code == 0, outcome


def contents(host: Host, directory: Path) -> Any:
    """Return all rows, with the place and transaction of each, and the bytes of all objects."""
    rows = {
        table: host.rows(f"SELECT ctid::text, xmin::text, t::text FROM {table} AS t ORDER BY 3") for table in TABLES
    }
    files = {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return rows, files


@contextmanager
def dumped(host: Host, path: Path) -> Iterator[Path]:
    """Dump a database with pg_dump, for `restore`."""
    connections[host.alias].close()
    arguments = ["--clean", "--if-exists", "--file", str(path), "--dbname", conninfo(host.alias)]
    subprocess.run([_program(host, "pg_dump"), *arguments], check=True, capture_output=True, timeout=60)
    yield path


def restore(host: Host, dump: Path) -> None:
    """Restore a dump into a database."""
    arguments = ["--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(dump), "--dbname", conninfo(host.alias)]
    subprocess.run([_program(host, "psql"), *arguments], check=True, capture_output=True, timeout=60)


def _program(host: Host, name: str) -> str:
    with psycopg.connect(conninfo(host.alias)) as session:
        major = session.info.server_version // 10000
    return str(find_binaries(major=major).directory / name)


@dataclass
class Scene:
    """What a mishap is about."""

    origin: Host
    copy: Host
    directory: Path
    scratch: Path
    run: Run
    change: Settings


def another_directory(scene: Scene) -> Host:
    """Let STORES name a directory that somebody else has made."""
    elsewhere = scene.scratch / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    storage = {
        "BACKEND": "kfs_credentials.stores.files.DurableFileStorage",
        "OPTIONS": {"location": str(elsewhere)},
    }
    backend = "kfs_credentials.stores.encrypted.EncryptedStore"
    scene.change(STORES={"default": {"BACKEND": backend, "OPTIONS": {"storage": storage}}})
    return scene.origin


def an_empty_directory(scene: Scene) -> Host:
    """Let the mount point be there, and the volume not."""
    scene.directory.rename(scene.scratch / "volume")
    scene.directory.mkdir(mode=0o700)
    return scene.origin


def another_key(scene: Scene) -> Host:
    """Let the process have another key."""
    scene.change(KEYS=[secrets.token_bytes(32)])
    return scene.origin


def a_copy_of_the_database(scene: Scene) -> Host:
    """Copy the database with pg_dump, and leave the store as it is."""
    with dumped(scene.origin, scene.scratch / "dump.sql") as dump:
        restore(scene.copy, dump)
    return scene.copy


def an_older_store(scene: Scene) -> Host:
    """Restore the store from a copy that two batches of erasures are missing from."""
    shutil.copytree(scene.directory, scene.scratch / "copy")
    erase(scene.run, scene.origin)
    erase(scene.run, scene.origin)
    shutil.rmtree(scene.directory)
    shutil.copytree(scene.scratch / "copy", scene.directory)
    return scene.origin


def a_slightly_older_store(scene: Scene) -> Host:
    """Restore the store from a copy that a single batch of erasures is missing from."""
    shutil.copytree(scene.directory, scene.scratch / "copy")
    erase(scene.run, scene.origin)
    shutil.rmtree(scene.directory)
    shutil.copytree(scene.scratch / "copy", scene.directory)
    return scene.origin


def another_environment(scene: Scene) -> Host:
    """Run a copy of the whole server elsewhere, where ENVIRONMENT says so."""
    scene.change(ENVIRONMENT="staging")
    return scene.origin


def an_older_database(scene: Scene) -> Host:
    """Restore the database, in its own place, from a dump that a batch of erasures is missing from."""
    with dumped(scene.origin, scene.scratch / "dump.sql") as dump:
        erase(scene.run, scene.origin)
        restore(scene.origin, dump)
    return scene.origin


def a_new_binding_elsewhere(scene: Scene) -> Host:
    """Let a copy of the database take the store over."""
    copy = a_copy_of_the_database(scene)
    assert scene.run("bind_secret_store", "--database", copy.alias, "--yes").code == 0
    return scene.origin


def a_lost_binding(scene: Scene) -> Host:
    """Lose the database's half."""
    scene.origin.run("DELETE FROM kfs_credentials_binding")
    return scene.origin


def a_binding_cut_short(scene: Scene) -> Host:
    """Leave the database's half as a binding leaves it that was killed before it wrote the other one."""
    scene.origin.run(
        "UPDATE kfs_credentials_binding SET environment_id = gen_random_uuid(), epoch = epoch + 1, confirmed_at = NULL"
    )
    return scene.origin


MISHAPS: dict[str, tuple[Callable[[Scene], Host], BindingProblem]] = {
    "another directory": (another_directory, BindingProblem.NO_PROBE),
    "an empty directory": (an_empty_directory, BindingProblem.NO_PROBE),
    "another key": (another_key, BindingProblem.UNREADABLE),
    "a copy of the database": (a_copy_of_the_database, BindingProblem.CLONE),
    "an older store": (an_older_store, BindingProblem.OLD_STORE),
    "a store that one batch is missing from": (a_slightly_older_store, BindingProblem.OLD_STORE),
    "another environment": (another_environment, BindingProblem.ENVIRONMENT),
    "an older database": (an_older_database, BindingProblem.OLD_DATABASE),
    "a new binding elsewhere": (a_new_binding_elsewhere, BindingProblem.OTHER),
    "a lost binding": (a_lost_binding, BindingProblem.UNBOUND),
    "a binding cut short": (a_binding_cut_short, BindingProblem.UNCONFIRMED),
}
"""What happens, and which problem that is."""
