"""What every source must be: the judge. It believes nobody but what was acknowledged, and what old writers committed.

A value is the credentials' only member, `{"token": VALUE}`; each is used once, and has `MARK` in it, so that it can be
searched for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import uuid4

MARK = "tortured-"
TENANT = "a tenant"

Value = str
"""The credentials' only member, or the error's name that an application gets instead."""

GONE = "SourceNotFound"
REVOKED = "NoCredentials"
UNREADABLE = "SecretNotFound"
"""Of a source that names a ref again which was erased before: an old writer brought it back too late."""


def new_value() -> Value:
    """Return a value that was never used."""
    return f"{MARK}{uuid4().hex}"


@dataclass
class Known:
    """What is known of one source."""

    space: str
    may_be: set[Value]
    """What an application may be answered: more than one where nobody was told what became of a call."""
    ever: set[Value] = field(default_factory=set)
    """What it may have been at any time: a ref that an old writer has displaced may hold any of it."""
    must_keep: Value | None = None
    """What was displaced last, and must be readable: nobody but an old writer has touched the source since."""
    shared: bool = False
    """Several write it at a time: of what each of them means it to be, nobody knows what comes last."""

    def becomes(self, *may_be: Value) -> None:
        """Note that it was changed, by whomever; or may be, if it is shared."""
        self.ever |= self.may_be
        self.may_be = self.may_be.union(may_be) if self.shared else set(may_be)
        self.must_keep = None

    def is_now(self, value: Value) -> None:
        """Note what it is, when nobody is at work on it."""
        self.ever |= self.may_be
        self.may_be, self.must_keep = {value}, None


class Memory:
    """All sources that there are or were, by space. An application has whole spaces to itself, and a shared one."""

    def __init__(self) -> None:
        self.sources: dict[str, Known] = {}
        self.spaces: dict[str, set[str]] = {}
        self.free: set[str] = set()
        """The spaces that no application has."""
        self.shared: set[str] = set()
        """The spaces that all of them have, and the old application too, at the same time."""
        self.lost: list[str] = []
        """What is not as it must be, in sentences."""

    def add_space(self, space: str, *, shared: bool = False) -> None:
        """Note a space, empty and free, or shared."""
        self.spaces[space] = set()
        (self.shared if shared else self.free).add(space)

    def add(self, source: str, space: str, value: Value) -> None:
        """Note a source that is there."""
        before = self.sources.get(source)
        if before is not None and before.shared:
            before.becomes(value)
        else:
            # Made anew under the same id, it has what waits for a person from before.
            known = Known(space, {value}, before.ever if before else set(), shared=space in self.shared)
            self.sources[source] = known
        self.spaces[space].add(source)

    def forget(self, source: str) -> None:
        """Note that a source is gone, by whatever way."""
        known = self.sources[source]
        known.becomes(GONE)
        self.spaces[known.space].discard(source)

    def forget_space(self, space: str) -> None:
        """Note that a space is gone, and all that was in it."""
        for source in list(self.spaces[space]):
            self.forget(source)
        del self.spaces[space]
        self.free.discard(space)

    def saw(self, source: str | None, answer: Value) -> None:
        """Note what an application was answered, which must be one of what may be."""
        known = self.sources.get(source or "")
        may_be = known.may_be if known else {GONE}
        if answer not in may_be:
            self.lost.append(f"source {source} is {shown({answer})}, and must be {shown(may_be)}")

    def vanished(self, source: str) -> None:
        """Note that the row of a source is not there: somebody has deleted it, or it is lost."""
        if GONE in self.sources[source].may_be:
            return
        self.lost.append(f"source {source} is gone, and nobody has deleted it")
        self.forget(source)


def shown(values: set[Value]) -> str:
    """Return values as they can be printed; all of them are made up."""
    return " or ".join(sorted(values)) or "nothing"
