"""Reads every object of every ref in use, and compares it with what was put.

A run notes how far it has got, and what it has found, after each batch: the next one goes on from there if it was cut
short. A bad object is looked at again, and stops nothing.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from kfs_credentials import sql
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials, Plaintext, Scope, UnknownKeyError, sensitive
from kfs_credentials.errors import (
    InvalidRef,
    InvalidScope,
    KfsCredentialsError,
    SecretIntegrityError,
    SecretNotFound,
    StoreUnavailable,
)
from kfs_credentials.models import Checkpoint
from kfs_credentials.moments import in_utc
from kfs_credentials.stores import Address, secret_stores
from kfs_credentials.transactions import TRIES, pause_before_try, short_transaction
from kfs_credentials.verification.findings import LISTED, Finding, FindingClass, Findings
from kfs_credentials.verification.reading import Pages
from kfs_credentials.worker import Pace

if TYPE_CHECKING:
    import uuid

AT_A_TIME = 100
"""Objects that are read in one call to the store."""
OF_OBJECTS = (
    FindingClass.OBJECT_MISSING,
    FindingClass.OBJECT_DAMAGED,
    FindingClass.OBJECT_KEY_UNKNOWN,
    FindingClass.OBJECT_UNREADABLE,
    FindingClass.OBJECT_SIZE,
)


class Object(NamedTuple):
    """A ref whose object is to be read, if it is `wanted`: else it is only the last one of a page."""

    ref: str
    wanted: bool
    needed: bool
    """In use, or the only copy of something. Of others, nothing may ever have been put."""
    tenant: str
    space: uuid.UUID
    source: uuid.UUID
    store: str
    size: int | None

    @property
    def weight(self) -> int:
        """The bytes that it may take up once it is read."""
        return self.size or settings.MAX_SECRET_BYTES

    def finding(self, what: FindingClass, detail: str = "") -> Finding:
        """Return what is wrong with it."""
        return Finding(what, self.tenant, str(self.source), self.ref, detail)


class CutShort(NamedTuple):
    """A run that was not made to its end."""

    begun_at: datetime
    position: str
    read: int
    classes: Sequence[str]
    """What it looked for: another run that looks for something else would have to begin from the start."""

    def looked_for(self, classes: Collection[FindingClass]) -> bool:
        """Return whether it looked for exactly these."""
        return set(self.classes) == {what.value for what in classes}


def name_of(tenant: str | None, space: uuid.UUID | None) -> str:
    """Return the name of the checkpoint of such runs: one that looks at a tenant says nothing about the others."""
    chosen = [f"tenant={tenant}"] if tenant is not None else []
    chosen += [f"space={space}"] if space is not None else []
    return ":".join(["verify:objects", *chosen])


def cut_short(using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> CutShort | None:
    """Return the last run of this kind if it was not made to its end."""
    found = Checkpoint.objects.using(using).filter(pk=name_of(tenant, space)).first()
    return None if found is None else _cut_short(found)


def _cut_short(checkpoint: Checkpoint) -> CutShort:
    data = checkpoint.data
    return CutShort(in_utc(checkpoint.started_at), checkpoint.position, data["read"], data.get("classes", ()))


def begin_anew(using: str, *, tenant: str | None = None, space: uuid.UUID | None = None) -> None:
    """Forget the last run of this kind."""
    with short_transaction(using):
        Checkpoint.objects.using(using).filter(pk=name_of(tenant, space)).delete()


@dataclass
class Reading:
    """One run through the objects of alias `using`. Goes on where the last one of its kind was cut short.

    `classes`: what to look for; a run that looked for others is not taken up. `sample`: read so many of them only,
    chosen at random; such a run is not taken up again. `rate`: objects a second. `progress` is called after each batch.
    """

    using: str
    tenant: str | None = None
    space: uuid.UUID | None = None
    classes: Collection[FindingClass] = OF_OBJECTS
    sample: int | None = None
    rate: float | None = None
    progress: Callable[[], None] = lambda: None
    findings: Findings = field(default_factory=Findings)
    read: int = 0

    def __post_init__(self) -> None:
        self.name = name_of(self.tenant, self.space)
        self.pages = Pages(self.using)
        self.pace = Pace(self.rate)
        self.batch = AT_A_TIME
        # What earlier parts of this run found beyond what they could keep.
        self.more: Counter[str] = Counter()

    def run(self) -> None:
        """Read all of them. Raises what concerns a store as a whole, and a database error: then it is cut short."""
        if self.sample is not None:
            chosen = self._choose(self.sample)
            for start in range(0, len(chosen), self.pages.most):
                self._read_all(self._page(only=chosen[start : start + self.pages.most]))
            return
        after = self._take_up()
        while page := self._page(after=after):
            after = page[-1].ref
            for part in self._parts(page):
                self._read_part(part)
                self._note(part[-1].ref)
            self._note(after)
        begin_anew(self.using, tenant=self.tenant, space=self.space)

    def _take_up(self) -> str | None:
        """Return where to begin, after having looked again at what an earlier part of this run found."""
        found = Checkpoint.objects.using(self.using).filter(pk=self.name).first()
        if found is None:
            return None
        if not _cut_short(found).looked_for(self.classes):
            begin_anew(self.using, tenant=self.tenant, space=self.space)
            return None
        self.read, self.more = found.data["read"], Counter(found.data["more"])
        for what, count in self.more.items():
            self.findings.counts[FindingClass(what)] += count
        if found.data["found"]:
            self._look_again(found.data["found"])
        return found.position

    def _note(self, position: str) -> None:
        kept = [finding.ref for finding in self.findings.listed()]
        beyond = {what.value: self.findings.counts[what] - len(kept) for what, kept in self.findings.kept.items()}
        more = {what: count for what, count in (Counter(beyond) | self.more).items() if count > 0}
        classes = [what.value for what in self.classes]
        data = json.dumps({"read": self.read, "found": kept, "more": more, "classes": classes})
        with short_transaction(self.using):
            sql.query(self.using, "verification/checkpoint", name=self.name, position=position, data=data)

    def _choose(self, number: int) -> list[str]:
        """Return so many refs, each of which could have been any (algorithm R), in order."""
        chosen: list[str] = []
        after, seen = None, 0
        while page := self._page(after=after):
            after = page[-1].ref
            for found in page:
                if not found.wanted:
                    continue
                seen += 1
                if len(chosen) < number:
                    chosen.append(found.ref)
                elif (place := random.randrange(seen)) < number:  # noqa: S311 - no secret
                    chosen[place] = found.ref
        return sorted(chosen)

    def _page(self, *, after: str | None = None, only: Sequence[str] | None = None) -> list[Object]:
        wanted = {"tenant": self.tenant, "space": self.space, "after": after, "only": only}

        def read(limit: int) -> list[Object]:
            return [Object(*row) for row in sql.query(self.using, "verification/objects", limit=limit, **wanted)]

        return self.pages.read(read, only=only)

    def _parts(self, page: Sequence[Object]) -> Iterator[list[Object]]:
        """Yield what one call to a store may read: no more than BATCH_BYTES, and no more than the rate lets pass."""
        part: list[Object] = []
        bytes_left = settings.BATCH_BYTES
        for found in page:
            if not found.wanted:
                continue
            if part and (len(part) >= self.pace.batch(self.batch) or found.weight > bytes_left):
                yield part
                part, bytes_left = [], settings.BATCH_BYTES
            part.append(found)
            bytes_left -= found.weight
        if part:
            yield part

    def _read_all(self, page: Sequence[Object]) -> None:
        for part in self._parts(page):
            self._read_part(part)

    def _read_part(self, part: Sequence[Object]) -> None:
        if suspects := [finding.ref for finding in self._examined(part) if finding.ref is not None]:
            self._look_again(suspects)
        self.read += len(part)
        self.progress()
        self.pace.spend(len(part))
        time.sleep(self.pace.delay())

    def _look_again(self, refs: Sequence[str]) -> None:
        """Read these again, those of them that are in use still: one may have been erased or replaced meanwhile."""
        for start in range(0, len(refs), LISTED):
            for part in self._parts(self._page(only=refs[start : start + LISTED])):
                for finding in self._examined(part):
                    self.findings.add(finding)

    @sensitive
    def _examined(self, part: Sequence[Object]) -> list[Finding]:
        """Read these objects; return what is wrong with them, among what is looked for."""
        found = []
        for alias in dict.fromkeys(one.store for one in part):
            ours = [one for one in part if one.store == alias]
            for one, outcome in zip(ours, self._outcomes(alias, ours), strict=True):
                if (finding := _examined(one, outcome)) is not None and finding.what in self.classes:
                    found.append(finding)
        return found

    @sensitive
    def _outcomes(self, alias: str, objects: Sequence[Object]) -> list[Credentials | KfsCredentialsError]:
        """Read these objects of one store, in order. Raises what concerns the store as a whole."""
        addresses: dict[int, Address] = {}
        outcomes: dict[int, Credentials | KfsCredentialsError] = {}
        for place, one in enumerate(objects):
            try:
                addresses[place] = Address(Scope(one.tenant, one.space, one.source), one.ref)
            except InvalidScope as error:
                outcomes[place] = error
        if addresses:
            read = self._get(alias, list(addresses.values()))
            outcomes |= dict(zip(addresses, read, strict=True))
        return [outcomes[place] for place in range(len(objects))]

    @sensitive
    def _get(self, alias: str, addresses: Sequence[Address]) -> list[Credentials | KfsCredentialsError]:
        """Get them; in smaller calls where the store does not answer in time, so that one object cannot hold up all."""
        store = secret_stores[alias]
        for failures in range(1, TRIES + 1):
            try:
                return store.get_many(addresses)
            except StoreUnavailable as error:
                unavailable = error
            if len(addresses) > 1:
                self.batch = max(1, min(self.batch, len(addresses) // 2))
                middle = len(addresses) // 2
                return [*self._get(alias, addresses[:middle]), *self._get(alias, addresses[middle:])]
            time.sleep(pause_before_try(failures))
        # It alone, several times. If the store as a whole can be used, it is this object.
        store.check()
        return [unavailable]


@sensitive
def _examined(one: Object, outcome: Credentials | KfsCredentialsError) -> Finding | None:
    """Return what is wrong with an object, if something is."""
    match outcome:
        case Credentials():
            size = Plaintext.of(outcome).size
            if one.needed and one.size not in (None, size):
                return one.finding(FindingClass.OBJECT_SIZE, f"{size} bytes, not {one.size}")
            return None
        case SecretNotFound():
            return one.finding(FindingClass.OBJECT_MISSING) if one.needed else None
        case UnknownKeyError():
            return one.finding(FindingClass.OBJECT_KEY_UNKNOWN, outcome.key_id)
        case SecretIntegrityError():
            return one.finding(FindingClass.OBJECT_DAMAGED, outcome.reason)
        case InvalidRef():
            return one.finding(FindingClass.OBJECT_UNREADABLE, "not a ref")
        case InvalidScope():
            return one.finding(FindingClass.OBJECT_UNREADABLE, "its tenant id is blank, or longer than 255 characters")
        case _:
            return one.finding(FindingClass.OBJECT_UNREADABLE, outcome.code)
