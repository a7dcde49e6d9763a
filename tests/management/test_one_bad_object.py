"""One object that the file system does not give out: each command names it, and does the others."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from kfs_credentials import services
from kfs_credentials.errors import SecretStoreError
from kfs_credentials.models import Pause, Source
from tests.cleanup.rows import SECRET, make_source, ref_of
from tests.keys import NEW_ID, OLD_ID, noted, path_of
from tests.management.commands import Run
from tests.management.reencryptions import AGAIN, COMMAND, last_line

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]


@pytest.fixture(params=[errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def bad(
    request: pytest.FixtureRequest,
    new_first: Callable[[], None],
    secrets_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Source:
    """The one of five sources whose object the operating system does not read. How it comes to that: tests/stores."""
    sources = [make_source() for _ in range(5)]
    name, real = path_of(secrets_directory, ref_of(sources[2])).name, Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == name:
            raise OSError(request.param, "made up")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    return sources[2]


SAYS = "the file system does not read this object ("


def test_reencrypt_secrets(run: Run, bad: Source, new_first: Callable[[], None]) -> None:
    """The others are moved, and no worker is paused."""
    new_first()
    outcome = run(COMMAND)
    assert outcome.code == 3
    assert last_line(outcome) == (
        "4 rewritten, 0 skipped, 1 failed in T s. 1 stay as they are: keep their keys, put right what is said of each, "
        f"then run {AGAIN}."
    )
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("source-secret:"))
    assert line.startswith(f"{ref_of(bad)}  {SAYS}")
    assert noted() == {NEW_ID: 4, OLD_ID: 1}
    assert not Pause.objects.exists()


def test_verify_credentials(run: Run, bad: Source) -> None:
    """The one is a finding, and all were read."""
    value = run("verify_credentials", "--deep", "--format", "json").json
    assert [(one["class"], one["ref"]) for one in value["findings"]] == [("object_unreadable", ref_of(bad))]


def test_resolve(bad: Source) -> None:
    """The application is told that this one cannot be read; the store as a whole is not at fault."""
    with pytest.raises(SecretStoreError) as caught:
        services.resolve_credentials(tenant="tenant-a", source_id=bad.pk)
    assert type(caught.value) is SecretStoreError
    assert str(caught.value).startswith(SAYS)
    other = Source.objects.exclude(pk=bad.pk).first()
    assert other is not None
    assert services.resolve_credentials(tenant="tenant-a", source_id=other.pk).reveal() == SECRET
