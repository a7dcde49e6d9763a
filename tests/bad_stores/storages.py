"""Storages that misbehave, as `OPTIONS` tell them to: what a store is made of may lie, or answer a byte at a time.

A storage lies about objects by the first hexadecimal digit of their names, `lies`: a dictionary of digits and lies.
About objects of at most `spared` bytes it does not lie. What it has to remember for that lies beside its directory, so
that all processes lie alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from kfs_credentials.errors import SecretNotFound, SecretStoreError
from kfs_credentials.stores.encrypted import PROBE_NAME
from kfs_credentials.stores.files import DurableFileStorage
from kfs_credentials.stores.values import Beside

DIGITS = "0123456789abcdef"
TRIAL = 225
"""More bytes than an object has that a store puts to try itself out, and fewer than any of a scene has."""

PUTS = ("nothing", "half", "other bytes", "other name", "another's", "taken")
"""What it has stored of what it says is stored; `taken`: it says that the name was taken, and has nothing."""
OVERWRITES = "overwrites"
"""It says that an object is new, and it was not."""
GETS = ("other bytes read", "another's read", "old read")
DELETES = ("kept", "kept, absent", "comes back")
"""It says that it has erased, or that nothing was there, and keeps it; or has it again once it is asked for a list."""
REPLACEMENTS = ("old kept", "lost", "lost for good", "half new", "half new for good")
PROBES = ("old probe", "probe kept")


def all_lie(lie: str) -> dict[str, str]:
    """Return the `lies` of a storage that lies about every object."""
    return dict.fromkeys(DIGITS, lie)


class LyingStorage(DurableFileStorage):
    """Does what it is told, but for what it lies about. `probe`: a lie about the probe."""

    def __init__(self, location: str, lies: dict[str, str] | None = None, probe: str = "", spared: int = 0) -> None:
        super().__init__(location)
        self.lies = lies or {}
        self.spared = spared
        self.probe = probe
        self.kept = Path(f"{location}-kept")

    def lie(self, name: str, content: bytes | None = None) -> str:
        """Return the lie about an object; empty if there is none."""
        base = Path(name).name
        if base == PROBE_NAME:
            return self.probe
        path = Path(self.path(name))
        size = len(content) if content is not None else path.stat().st_size if path.exists() else self.spared + 1
        return self.lies.get(base[0], "") if size > self.spared else ""

    def create_many(self, files: Sequence[tuple[str, bytes]], **options: Any) -> list[bool | SecretStoreError]:
        told = [self.lie(name, content) for name, content in files]
        for (name, _), lie in zip(files, told, strict=True):
            if lie == OVERWRITES:
                super().remove_many([name])
        real = [self._to_store(name, content, lie) for (name, content), lie in zip(files, told, strict=True)]
        stored = super().create_many([file for file in real if file is not None], **self._options(options))
        answers = iter(stored)
        outcomes = [True if file is None else next(answers) for file in real]
        return [
            lie != "taken" if lie in (*PUTS, "lost for good") else outcome
            for lie, outcome in zip(told, outcomes, strict=True)
        ]

    def _to_store(self, name: str, content: bytes, lie: str) -> tuple[str, bytes] | None:
        if lie == "half":
            return name, content[: len(content) // 2]
        if lie == "other bytes":
            return name, content[::-1]
        if lie == "other name":
            return name[:-5] + ("0" if name[-5] != "0" else "1") + name[-4:], content
        if lie == "another's":
            others = sorted(
                path for path in Path(self.path(name)).parent.glob("*.enc") if path.name[0] not in self.lies
            )
            return (name, others[0].read_bytes()) if others else None
        if lie in ("nothing", "taken") or (lie == "lost for good" and (self.kept / Path(name).name).exists()):
            return None
        return name, content

    def read(self, name: str, *, beside: str | None = None) -> bytes:
        content = super().read(name, beside=beside)
        lie = self.lie(name)
        if lie == "other bytes read":
            return content[::-1]
        if lie == "another's read":
            others = sorted(path for path in Path(self.path(name)).parent.glob("*.enc") if path.name != Path(name).name)
            return others[0].read_bytes()
        if lie in ("old read", "old probe"):
            return self._first(name, content)
        return content

    def read_many(self, names: Sequence[str], *, check: Callable[[], None] = lambda: None) -> list[bytes | None]:
        found: list[bytes | None] = []
        for name in names:
            check()
            found.append(None)
            with suppress(SecretStoreError):
                found[-1] = self.read(name)
        return found

    def replace_many(self, files: Sequence[tuple[str, bytes, bytes]], **options: Any) -> list[bool | SecretStoreError]:
        told = [self.lie(name, content) for name, _, content in files]
        real = [
            (name, old, self._to_replace(name, content, lie))
            for (name, old, content), lie in zip(files, told, strict=True)
            if lie not in ("old kept", "probe kept")
        ]
        done = options.pop("done", lambda _: None)
        lost: list[str] = []

        def lose(name: str) -> None:
            if self.lie(name) in ("lost", "lost for good"):
                lost.append(name)
            done(name)

        try:
            answers = iter(super().replace_many(real, done=lose, **self._options(options)))
        finally:
            for name in lost:
                self._keep(name)
                super().remove_many([name])
        return [True if lie in ("old kept", "probe kept") else next(answers) for lie in told]

    def _to_replace(self, name: str, content: bytes, lie: str) -> bytes:
        half = content[: len(content) // 2]
        if lie == "half new" and not (self.kept / Path(name).name).exists():
            self._keep(name)
            return half
        return half if lie == "half new for good" else content

    def remove_many(self, names: Sequence[str], **options: Any) -> list[bool | SecretStoreError]:
        told = [self.lie(name) for name in names]
        for name, lie in zip(names, told, strict=True):
            if lie == "comes back":
                self._keep(name)
        real = [name for name, lie in zip(names, told, strict=True) if not lie.startswith("kept")]
        answers = iter(super().remove_many(real, **self._options(options)))
        said = {"kept": True, "kept, absent": False}
        outcomes = [said[lie] if lie in said else next(answers) for lie in told]
        return [True if lie == "was there" else outcome for lie, outcome in zip(told, outcomes, strict=True)]

    def names(self, directory: str) -> Iterator[str]:
        for path in self.kept.glob("*.enc"):
            if self.lie(path.name) == "comes back":
                path.rename(Path(self.path(directory)) / path.name)
        names = [name for name in super().names(directory) if self.lie(name) != "hidden"]
        if "phantoms" in self.lies.values():
            names += [digit * 64 + ".enc" for digit in DIGITS]
        if "circles" in self.lies.values():
            yield from itertools.cycle(names)
        yield from sorted(names, reverse=True)

    def get_modified_time(self, name: str) -> datetime:
        lie = self.lie(name)
        if lie == "year 1":
            return datetime.min  # noqa: DTZ901 - a storage may well
        if lie == "text":
            return "yesterday"  # type: ignore[return-value]
        if lie == "overflow":
            raise OverflowError("no such time")
        return super().get_modified_time(name)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Let the probe that is looked at beside others be as old as the one that is read."""
        beside = options.get("beside")
        if beside is not None and self.probe == "old probe":
            look = beside.look
            options["beside"] = Beside(beside.name, lambda blob: look(blob and self._first(beside.name, blob)))
        return options

    def _keep(self, name: str) -> None:
        self.kept.mkdir(exist_ok=True)
        with suppress(SecretNotFound):
            (self.kept / Path(name).name).write_bytes(super().read(name))

    def _first(self, name: str, content: bytes) -> bytes:
        """Return what was read under this name when it was first read."""
        self.kept.mkdir(exist_ok=True)
        first = self.kept / Path(name).name
        if not first.exists():
            first.write_bytes(content)
        return first.read_bytes()


class DrippingStorage(DurableFileStorage):
    """Takes and gives a byte at a time, as long as `<location>-drips` exists: no byte is late, no call gets done."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.drips = Path(f"{location}-drips")

    def _drip(self, content: bytes) -> None:
        for _ in content:
            if not self.drips.exists():
                return
            time.sleep(0.01)

    def create_many(self, files: Sequence[tuple[str, bytes]], **options: Any) -> list[bool | SecretStoreError]:
        for _, content in files:
            self._drip(content)
        return super().create_many(files, **options)

    def read(self, name: str, *, beside: str | None = None) -> bytes:
        content = super().read(name, beside=beside)
        if Path(name).name != PROBE_NAME:
            self._drip(content)
        return content

    def remove_many(self, names: Sequence[str], **options: Any) -> list[bool | SecretStoreError]:
        for name in names:
            self._drip(name.encode())
        return super().remove_many(names, **options)


class SlowStorage(DurableFileStorage):
    """Takes its time for each object that it writes or removes, one after the other, and does nothing else wrong."""

    def __init__(self, location: str, seconds: float) -> None:
        super().__init__(location)
        self.seconds = seconds

    def create_many(self, files: Sequence[tuple[str, bytes]], **options: Any) -> list[bool | SecretStoreError]:
        time.sleep(self.seconds * len(files))
        return super().create_many(files, **options)

    def replace_many(self, files: Sequence[tuple[str, bytes, bytes]], **options: Any) -> list[bool | SecretStoreError]:
        time.sleep(self.seconds * len(files))
        return super().replace_many(files, **options)

    def remove_many(self, names: Sequence[str], **options: Any) -> list[bool | SecretStoreError]:
        time.sleep(self.seconds * len(names))
        return super().remove_many(names, **options)
