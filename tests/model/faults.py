"""What goes wrong, and when: one fault a step, in the database, in the store, or to the process itself.

All of it comes from outside: a backend that is terminated, an error that the server raises, a storage that answers
late or not at all. A process that is killed is one in which `Killed` is raised, and for which nothing works from then
on, so that no `finally` can do what a dead process would not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hypothesis import strategies as st

from kfs_credentials.errors import SecretStoreError, StoreDenied, StoreUnavailable
from kfs_credentials.stores.files import DurableFileStorage
from tests.cuts import terminate

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

AT_STATEMENT = ("terminated", "57014", "40P01", "killed at a statement")
"""What happens at the n-th statement of a step; a number is an SQLSTATE that the server raises."""
AT_COMMIT = ("commit refused", "commit unanswered", "killed before commit", "killed after commit")
IN_STORE = (
    *("unavailable", "half", "unanswered", "late", "denied", "unforeseen", "refused"),
    *("killed before", "killed half", "killed after", "killed, and late"),
)
"""What happens at the n-th call that writes to the store, or erases there."""
AT_READ = ("unread",)
HELD = ("held source", "held ref", "held job")
"""Somebody has the n-th row locked while the step is made."""


class Killed(BaseException):
    """The process is killed here."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and at which statement, commit, call or row of a step."""

    how: str
    at: int

    def __repr__(self) -> str:
        return f"Fault({self.how!r}, {self.at})"


FAULTY = st.one_of(
    st.builds(Fault, st.sampled_from(AT_STATEMENT), st.integers(0, 24)),
    st.builds(Fault, st.sampled_from(AT_COMMIT), st.integers(0, 2)),
    st.builds(Fault, st.sampled_from(IN_STORE), st.integers(0, 1)),
    st.builds(Fault, st.sampled_from(AT_READ), st.integers(0, 1)),
    st.builds(Fault, st.sampled_from(HELD), st.integers(0, 3)),
)
# Most steps go well, or nothing interesting is ever reached.
FAULT = st.integers(0, 5).flatmap(lambda number: FAULTY if number == 5 else st.none())


@dataclass
class Late:
    """A call that its caller has given up, and that is carried out later."""

    names: list[str]
    act: Callable[[], object]


@dataclass
class Faults:
    """The fault of this step, whether it has happened, and what is still to happen late."""

    fault: Fault | None = None
    spent: bool = False
    dead: bool = False
    late: list[Late] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def ordered(self, fault: Fault | None) -> Iterator[None]:
        """Let the fault happen in this block, at most once."""
        self.fault, self.spent, self.counts = fault, False, {}
        try:
            yield
        finally:
            self.fault = None

    def _comes(self, kinds: tuple[str, ...], what: str) -> str | None:
        """Count one more of `what`; return what goes wrong there, if anything."""
        count = self.counts[what] = self.counts.get(what, -1) + 1
        if self.fault is None or self.fault.how not in kinds or self.fault.at != count:
            return None
        self.spent = True
        return self.fault.how

    def kill(self, connection: Any = None) -> NoReturn:
        """Let the process die here. The server rolls back what it had open."""
        self.dead = True
        if connection is not None:
            terminate(connection)
        raise Killed

    # In the database.

    def execute(self, execute: Callable[..., Any], sql: str, parameters: Any, many: bool, context: Any) -> Any:
        """Be one of Django's execute wrappers."""
        connection = context["connection"]
        if self.dead:
            self.kill()
        match self._comes(AT_STATEMENT, "statement"):
            case "terminated":
                terminate(connection)
            case "killed at a statement":
                self.kill(connection)
            case str(state):
                execute(f"DO $$ BEGIN RAISE SQLSTATE '{state}'; END $$", None, False, context)
        return execute(sql, parameters, many, context)

    def at_commit(self) -> str | None:
        """Return what goes wrong at this commit, if anything."""
        if self.dead:
            self.kill()
        return self._comes(AT_COMMIT, "commit")

    # In the store, on the thread of the call.

    def write(self, items: Sequence[Any], act: Callable[..., list[T]], refused: Callable[[Any], T]) -> list[T]:
        """Do what the storage does with these items, or what goes wrong."""
        how = self._comes(IN_STORE, "write")
        if how in ("late", "killed, and late"):
            names = [item if isinstance(item, str) else item[0] for item in items]
            self.late.append(Late(names, functools.partial(act, items, at_all_costs=True)))
        if how in ("half", "killed half"):
            act(items[: len(items) // 2])
        if how in ("unanswered", "killed after"):
            act(items)
        match how:
            case None:
                return act(items)
            case "denied":
                raise StoreDenied("made up")
            case "unforeseen":
                raise RuntimeError("made up")
            case "refused":
                return [refused(item) for item in items]
            case str() if how.startswith("killed"):
                self.kill()
        raise StoreUnavailable("made up")

    def read(self) -> None:
        """Raise what goes wrong with a read, if anything."""
        if self._comes(AT_READ, "read"):
            raise StoreUnavailable("made up")


FAULTS = Faults()


def _refused(_: Any) -> SecretStoreError:
    return SecretStoreError("made up")


class FaultyStorage(DurableFileStorage):
    """The real storage of files, and the ordered faults."""

    def create_many(self, files: Any, **options: Any) -> Any:
        """Create, as ordered."""

        def create(some: Any, *, at_all_costs: bool = False) -> list[bool | SecretStoreError]:
            return super(FaultyStorage, self).create_many(some, **({} if at_all_costs else options))

        return FAULTS.write(files, create, _refused)

    def replace_many(self, files: Any, **options: Any) -> Any:
        """Replace, as ordered."""

        def replace(some: Any, *, at_all_costs: bool = False) -> list[bool | SecretStoreError]:
            return super(FaultyStorage, self).replace_many(some, **({} if at_all_costs else options))

        return FAULTS.write(files, replace, _refused) if files else replace(files)

    def remove_many(self, names: Any, **options: Any) -> Any:
        """Remove, as ordered."""

        def remove(some: Any, *, at_all_costs: bool = False) -> list[bool | SecretStoreError]:
            return super(FaultyStorage, self).remove_many(some, **({} if at_all_costs else options))

        return FAULTS.write(names, remove, _refused)

    def read(self, name: str, **options: Any) -> bytes:
        """Read, as ordered."""
        FAULTS.read()
        return super().read(name, **options)
