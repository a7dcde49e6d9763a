"""One verification: its parts, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError, InterfaceError

from kfs_credentials import sql
from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.pause import check_not_paused
from kfs_credentials.verification.database import Verification
from kfs_credentials.verification.deep import OF_OBJECTS, CutShort, Reading, begin_anew, cut_short
from kfs_credentials.verification.findings import FindingClass, Findings
from kfs_credentials.verification.leftovers import Leftovers, look_at_heap, look_at_history
from kfs_credentials.verification.objects import LISTED_OBJECTS, Listing

if TYPE_CHECKING:
    import uuid


class Run:
    """One verification of alias `using`, or of one tenant or space; what it has found so far is in its members.

    `classes`: what to look for. `scrub`: see `Verification`. `deep`: read the objects and list the stores; `sample` and
    `rate`: see `Reading`, `erase`: see `Listing`. `show` is called after each step.
    """

    def __init__(
        self,
        using: str,
        *,
        tenant: str | None = None,
        space: uuid.UUID | None = None,
        classes: Collection[FindingClass] = tuple(FindingClass),
        scrub: bool = False,
        deep: bool = False,
        sample: int | None = None,
        rate: float | None = None,
        erase: bool = False,
    ) -> None:
        self.using = using
        self.selected: dict[str, Any] = {"tenant": tenant, "space": space}
        self.classes = classes
        self.deep = deep
        self.show: Callable[[], None] = lambda: None
        self.findings = Findings()
        self.resumed: CutShort | None = None
        self.given_up: CutShort | None = None
        self.leftovers: Leftovers | None = None
        shared: dict[str, Any] = {"progress": self._show, "findings": self.findings}
        self.verification = Verification(using, **self.selected, classes=classes, scrub=scrub, **shared)
        of_objects = [what for what in OF_OBJECTS if what in classes]
        self.reading = Reading(using, **self.selected, classes=of_objects, sample=sample, rate=rate, **shared)
        listed = [what for what in LISTED_OBJECTS if what in classes]
        self.listing = Listing(using, classes=listed, erase=erase, **shared)
        self._estimate: int | None = None

    def _show(self) -> None:
        self.show()

    def look_back(self, *, must: bool = False, restart: bool = False) -> None:
        """Find out whether the last deep run was cut short, and is to be taken up: `resumed`.

        `restart`: it is not. One that looked for other classes is not taken up either, but `given_up`. Raises
        `ImproperlyPrepared` if one `must` be taken up, and there is none.
        """
        if self.reading.sample is not None or not (self.reading.classes or must):
            return
        if restart:
            begin_anew(self.using, **self.selected)
        found = cut_short(self.using, **self.selected)
        if must and found is None:
            raise ImproperlyPrepared("No deep run was cut short: leave out --resume, and one begins from the start.")
        if found is None or found.looked_for(self.reading.classes):
            self.resumed = found
        elif must:
            raise ImproperlyPrepared(
                f"The deep run that was cut short looked for {', '.join(found.classes)}: give it the same --only or "
                "--skip, or leave out --resume, and one begins from the start."
            )
        else:
            self.given_up = found

    def run(self) -> None:
        """Do it; what was found until something is raised is kept.

        Raises what concerns a store as a whole, `WorkersPaused` if it is to erase, and a database error.
        """
        if self.listing.erase:
            check_not_paused(self.using)  # hours before it would be found out
        self.verification.run()
        if FindingClass.HISTORY_COPY in self.classes:
            for finding in look_at_history(self.using):
                self.findings.add(finding)
        self.leftovers = look_at_heap(self.using)
        if not self.deep:
            return
        if self.reading.classes:
            self.reading.run()
        # Whose an object is that no row accounts for cannot be told.
        whole = self.selected == {"tenant": None, "space": None}
        if whole and (self.listing.classes or self.listing.erase):
            self.listing.run()

    @property
    def looked_at(self) -> dict[str, int]:
        """How much was looked at, by what it is."""
        rows = self.verification.looked_at
        counts = {"sources": rows["sources"], "refs": rows["refs"], "jobs": rows["jobs"]}
        if self.deep:
            counts |= {"objects_read": self.reading.read, "objects_listed": self.listing.seen}
        return counts

    @property
    def done(self) -> int:
        """How much was looked at, for progress."""
        return sum(self.verification.looked_at.values()) + self.reading.read + self.listing.seen

    def count_left(self) -> int | None:
        """Return about how much is left, for progress; None if that is not known now."""
        if self._estimate is None:
            try:
                ((self._estimate,),) = sql.query(self.using, "verification/estimate")
            except (DatabaseError, InterfaceError):
                return None
        return max(0, self._estimate - self.done)
