"""Goes through sources, ledger and jobs, a page at a time, and finds what is not as it always has to be.

What a page finds is looked at again, in a fresh snapshot, before it counts: whoever moves rows in several transactions,
as knowledge-fs does, leaves a moment in between. What is a known time away is no finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kfs_credentials import sql
from kfs_credentials.conf import settings
from kfs_credentials.crypto import parse_json, sensitive
from kfs_credentials.errors import InvalidCredentials
from kfs_credentials.in_clear import InClear, Verdict, compared_in_parts, scrub_same
from kfs_credentials.models import KnowledgeSpace
from kfs_credentials.models.knowledge_space import being_deleted
from kfs_credentials.redaction import hidden_paths
from kfs_credentials.verification.findings import Finding, FindingClass, Findings
from kfs_credentials.verification.reading import Pages

if TYPE_CHECKING:
    import uuid

LONGEST_LEASE = 86400.0
"""Seconds. No lease is longer: a row whose time is that far ahead was edited by hand."""
SWEEPS = 2 * 86400.0
"""Seconds. A sweep is made more often than that wherever the cleanup runs, be it once a night."""
UNSWEPT = "unswept"
"""What refs.sql calls a ref that no source names any more, and that the next sweep retires."""
PLAINTEXT = "plaintext"
"""What named.sql calls credentials that lie beside a ref, until they are compared."""
BESIDE_A_REF = (
    FindingClass.PLAINTEXT_SAME,
    FindingClass.PLAINTEXT_DIFFERS,
    FindingClass.PLAINTEXT_NOT_COMPARED,
)
OF_VERDICT = {
    Verdict.SAME: FindingClass.PLAINTEXT_SAME,
    Verdict.DIFFERENT: FindingClass.PLAINTEXT_DIFFERS,
    Verdict.NOT_COMPARED: FindingClass.PLAINTEXT_NOT_COMPARED,
}
SCOPES = 1000
"""Knowledge spaces of a tenant that are read at a time."""
PATHS = 20
"""The most paths that are listed of one document."""
LONGEST_PATH = 200


class Row(NamedTuple):
    """A row of a page: what is wrong with it, None at the end of a page where nothing is."""

    key: Any
    problem: str | None
    tenant: str | None
    source: uuid.UUID | None
    ref: str | None
    detail: str | None
    seen: int


class Walk(NamedTuple):
    """A way through a table, by its key: a file of SQL, what is counted, and what can be found on the way."""

    file: str
    counted: str
    finds: Collection[str]


NAMED = Walk(
    "named",
    "refs of sources",
    {FindingClass.REF_UNKNOWN, FindingClass.REF_MISPLACED, FindingClass.REF_NOT_ACTIVE, PLAINTEXT},
)
REFS = Walk(
    "refs",
    "refs",
    {
        FindingClass.REF_UNNAMED,
        FindingClass.REF_CLAIMED,
        FindingClass.REF_UNDATED,
        FindingClass.REF_STUCK,
        FindingClass.ERASURE_UNPROVED,
    },
)
JOBS = Walk(
    "jobs",
    "jobs",
    {
        FindingClass.JOB_IN_CLEAR,
        FindingClass.JOB_CANDIDATE_LEFT,
        FindingClass.JOB_CANDIDATE_LOST,
        FindingClass.JOB_STUCK,
        FindingClass.JOB_UNEXPLAINED,
    },
)
IN_SOURCES = (FindingClass.UNSUPPORTED, FindingClass.METADATA, FindingClass.METADATA_NOT_READ)


@dataclass
class Verification:
    """One look at the tables of alias `using`, at one tenant or space if given.

    `classes`: what to look for. `scrub`: remove credentials in clear that are the same value as what the ref beside
    them resolves to. `progress` is called after each page.
    """

    using: str
    tenant: str | None = None
    space: uuid.UUID | None = None
    classes: Collection[FindingClass] = tuple(FindingClass)
    scrub: bool = False
    progress: Callable[[], None] = lambda: None
    findings: Findings = field(default_factory=Findings)
    looked_at: Counter[str] = field(default_factory=Counter)
    scrubbed: int = 0
    unswept: int = 0
    """Refs that no source names any more, and that the next sweep of the cleanup retires."""

    def __post_init__(self) -> None:
        self.pages = Pages(self.using)

    def run(self) -> None:
        """Go through all of it.

        Raises a database error where the database is out of reach, and what concerns the store as a whole where
        something lies in clear beside a ref.
        """
        for walk in (NAMED, REFS, JOBS):
            if self._wanted(walk):
                self._walk(walk)
        if any(what in self.classes for what in IN_SOURCES):
            for space in self._spaces():
                self._walk_sources(space)

    def _wanted(self, walk: Walk) -> set[str]:
        wanted: set[str] = {what for what in walk.finds if what in self.classes}
        beside = PLAINTEXT in walk.finds and (self.scrub or any(what in self.classes for what in BESIDE_A_REF))
        if FindingClass.REF_UNNAMED in wanted:
            wanted.add(UNSWEPT)
        return wanted | {PLAINTEXT} if beside else wanted

    def _walk(self, walk: Walk) -> None:
        wanted, after = self._wanted(walk), None
        while rows := self._page(walk, after=after):
            after = rows[-1].key
            self.looked_at[walk.counted] += rows[-1].seen
            if suspects := list({row.key for row in rows if row.problem in wanted}):
                again = self._page(walk, only=suspects)
                beside = []
                for row in again:
                    if row.problem not in wanted:
                        continue
                    if row.problem == PLAINTEXT:
                        beside.append(row.source)
                    elif row.problem == UNSWEPT:
                        self.unswept += 1
                    else:
                        self._found(row)
                if beside:
                    self._compare(beside)  # type: ignore[arg-type]  # each such row is a source's
            self.progress()

    def _page(self, walk: Walk, *, after: Any = None, only: Sequence[Any] | None = None) -> list[Row]:
        wanted = {
            "tenant": self.tenant,
            "space": self.space,
            "leaving": being_deleted(self.using),
            "longest_lease": LONGEST_LEASE,
            "sweeps": SWEEPS,
            "after": after,
            "only": only,
        }

        def read(limit: int) -> list[Row]:
            return [Row(*row) for row in sql.query(self.using, f"verification/{walk.file}", limit=limit, **wanted)]

        return self.pages.read(read, only=only)

    def _found(self, row: Row) -> None:
        self.findings.add(
            Finding(
                FindingClass(row.problem or ""),
                row.tenant,
                None if row.source is None else str(row.source),
                row.ref,
                row.detail or "",
            )
        )

    def _compare(self, sources: Sequence[uuid.UUID]) -> None:
        """Compare what lies in clear beside a ref with what the ref resolves to; scrub what is the same, if asked."""
        for part in compared_in_parts(self.using, sources):
            same = [found for found, verdict in part if verdict is Verdict.SAME and self.scrub]
            scrubbed = scrub_same(self.using, same) if same else set()
            self.scrubbed += len(scrubbed)
            for found, verdict in part:
                if found.source not in scrubbed:
                    self._found_beside(found, OF_VERDICT[verdict])

    def _found_beside(self, found: InClear, what: FindingClass) -> None:
        if what in self.classes:
            self.findings.add(Finding(what, found.tenant, str(found.source), found.ref, found.shape or ""))

    # All sources: what is no object, and what lies outside of `credentials`.

    def _spaces(self) -> Iterator[uuid.UUID | None]:
        """Yield the spaces to go through one by one; None for all sources."""
        if self.tenant is None:
            yield self.space
            return
        spaces = KnowledgeSpace.objects.using(self.using).filter(tenant_id=self.tenant).order_by("pk")
        spaces = spaces if self.space is None else spaces.filter(pk=self.space)
        while page := list(spaces.values_list("pk", flat=True)[:SCOPES]):
            yield from page
            spaces = spaces.filter(pk__gt=page[-1])

    def _walk_sources(self, space: uuid.UUID | None) -> None:
        after = None
        while rows := self._sources(space, after=after):
            after, *_, seen = rows[-1]
            self.looked_at["sources"] += seen
            if suspects := [source for source, _, unsupported, hidden, _ in rows if unsupported or hidden]:
                self._look_again(space, suspects)
            self.progress()

    def _look_again(self, space: uuid.UUID | None, suspects: Sequence[uuid.UUID]) -> None:
        after = None
        while rows := self._sources(space, after=after, only=suspects):  # they may have grown, and come in parts
            for source, tenant, unsupported, hidden, _ in rows:
                self._found_in_source(str(source), tenant, unsupported, hidden)
            after = rows[-1][0]

    def _sources(
        self, space: uuid.UUID | None, *, after: uuid.UUID | None = None, only: Sequence[uuid.UUID] | None = None
    ) -> list[tuple[uuid.UUID, str | None, str | None, list[str] | None, int]]:
        """Return a page: source, tenant, the shape of unsupported credentials, paths, and how many were looked at."""
        leaving, metadata = being_deleted(self.using), FindingClass.METADATA in self.classes
        wanted = {"space": space, "leaving": leaving, "metadata": metadata, "after": after, "only": only}

        def read(limit: int) -> list[Any]:
            return sql.query(self.using, "verification/sources", limit=limit, bytes=settings.BATCH_BYTES, **wanted)

        return [
            (source, tenant, shape, _paths(document) if suspicious else None, seen)
            for source, tenant, shape, suspicious, document, seen in self.pages.read(read, only=only)
        ]

    def _found_in_source(self, source: str, tenant: str | None, shape: str | None, paths: list[str] | None) -> None:
        found = []
        if shape is not None:
            found.append(Finding(FindingClass.UNSUPPORTED, tenant, source, detail=shape))
        for path in paths or ():
            what = FindingClass.METADATA if path.startswith("$") else FindingClass.METADATA_NOT_READ
            found.append(Finding(what, tenant, source, detail=path))
        for finding in found:
            if finding.what in self.classes:
                self.findings.add(finding)


@sensitive
def _paths(document: str | None) -> list[str]:
    """Return where something looks like a secret; or why it is not known, which does not begin with a `$`."""
    if document is None:
        return ["larger than BATCH_BYTES"]
    try:
        paths = hidden_paths(parse_json(document))
    except InvalidCredentials:
        return ["nested too deep"]
    paths = [path if len(path) <= LONGEST_PATH else f"{path[: LONGEST_PATH - 1]}…" for path in paths]
    if len(paths) > PATHS:
        return [*paths[: PATHS - 1], f"$: and {len(paths) - PATHS + 1} more"]
    return paths
