"""A batch of jobs on its way, and what is decided about each: everything here is looked at, nothing is written."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from kfs_credentials.binding import Watch
from kfs_credentials.conf import settings
from kfs_credentials.crypto import (
    Credentials,
    KeyRing,
    Plaintext,
    Scope,
    fingerprint,
    fingerprint_matches,
    new_ref,
    parse_json,
)
from kfs_credentials.crypto.sensitive import Secret, hide, sensitive
from kfs_credentials.errors import (
    CredentialsTooLarge,
    InvalidCredentials,
    InvalidScope,
    KfsCredentialsError,
    NotAsSaid,
    SecretConflict,
    SecretIntegrityError,
)
from kfs_credentials.leases import Lease
from kfs_credentials.models import JobError, RefState
from kfs_credentials.models.backfill import NOT_FINGERPRINTED
from kfs_credentials.stores import Receipt
from kfs_credentials.stores.calls import Call

T = TypeVar("T")


class Legacy(Secret):
    """Legacy credentials as PostgreSQL printed them. Its repr shows nothing.

    `text` is None if they are larger than a batch may be: then they were not read.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | None) -> None:
        self._text = hide(text)

    def same_as(self, other: Legacy) -> bool:
        """Return whether both are the same: `jsonb` prints one value in one way, so the texts tell.

        Two that were not read count as the same: neither of them can be stored.
        """
        return self._text() == other._text()

    @sensitive
    def plaintext(self) -> Plaintext:
        """Return the canonical bytes; raises `InvalidCredentials`, `CredentialsTooLarge`."""
        text = self._text()
        if text is None:
            raise CredentialsTooLarge("the credentials are larger than KFS_CREDENTIALS['BATCH_BYTES']")
        return Plaintext.of(parse_json(text))  # type: ignore[arg-type]


@sensitive
def made(make: Callable[..., T], rows: Iterable[Sequence[Any]]) -> list[T]:
    """Return `make(*row)` for each row. The rows hold credentials, and no error takes one along."""
    return [make(*row) for row in rows]


class Put(enum.Enum):
    """What became of an item before it is settled."""

    NOTHING = "nothing"  # there was nothing to put, or no time to
    STORED = "stored"  # durable at the candidate's address
    STALE = "stale"  # the candidate was reserved for another value
    RETRY = "retry"  # failed, may succeed later
    FAILED = "failed"  # failed, and would again
    READ = "read"  # not put: the source names the candidate already, and it can be read
    MISSING = "missing"  # not put: the source names the candidate already, and it cannot be read, or must not be


@dataclass(slots=True)
class Item:
    """One job of a batch, on its way."""

    job_id: uuid.UUID
    tenant_id: str
    space_id: uuid.UUID
    source_id: uuid.UUID
    ref: str
    fingerprint: str
    retry_count: int = 0
    version: int = 1
    legacy: Legacy | None = None
    plaintext: Plaintext | None = None
    put: Put = Put.NOTHING
    error: JobError | None = None
    receipt: Receipt | None = None
    usable: bool = True  # by its ledger row, as it was when the job was claimed
    named: bool = False  # by its source, then

    @classmethod
    def discovered(
        cls, source_id: uuid.UUID, space_id: uuid.UUID, tenant_id: str, version: int, credentials: str | None
    ) -> Item:
        """Make it of the columns of `discover.sql`; job and ref are new."""
        legacy = Legacy(credentials)
        return cls(uuid.uuid4(), tenant_id, space_id, source_id, new_ref(), "", version=version, legacy=legacy)

    @classmethod
    def claimed(
        cls,
        job_id: uuid.UUID,
        tenant_id: str,
        space_id: uuid.UUID,
        source_id: uuid.UUID,
        ref: str,
        fingerprint: str,
        retry_count: int,
        is_legacy: bool,  # noqa: FBT001
        credentials: str | None,
        usable: bool,  # noqa: FBT001
        named: bool,  # noqa: FBT001
    ) -> Item:
        """Make it of the columns of `read.sql`."""
        legacy = Legacy(credentials) if is_legacy else None
        item = cls(job_id, tenant_id, space_id, source_id, ref, fingerprint, retry_count, legacy=legacy)
        item.usable, item.named = usable, named
        return item

    @property
    def size(self) -> int | None:
        """The plaintext's bytes, None if there is none."""
        return None if self.plaintext is None else self.plaintext.size

    @property
    def scope(self) -> Scope:
        """Whose secret it is; raises `InvalidScope`."""
        return Scope(self.tenant_id, self.space_id, self.source_id)

    def prepare(self) -> None:
        """Make the plaintext of the legacy credentials, or note why there is none."""
        try:
            self.scope  # noqa: B018 - reading it is the check
            if self.legacy is not None:
                self.plaintext = self.legacy.plaintext()
        except InvalidScope:
            self.out_of_reach(JobError.SCOPE_INVALID)
        except CredentialsTooLarge:
            self.failed(JobError.TOO_LARGE)
        except InvalidCredentials:
            self.failed(JobError.INVALID)

    def failed(self, error: JobError) -> None:
        """Note a failure that would come again."""
        self.put, self.error = Put.FAILED, error

    def out_of_reach(self, error: JobError) -> None:
        """Note that this can be neither put nor read, whether its source names the candidate already or not."""
        self.put, self.error = (Put.MISSING if self.named else Put.FAILED), error

    def retry(self, error: JobError) -> None:
        """Note a failure that may pass."""
        self.put, self.error = Put.RETRY, error

    def fingerprint_now(self, ring: KeyRing) -> str:
        """Return the fingerprint of the plaintext, or the mark that there is none."""
        return NOT_FINGERPRINTED if self.plaintext is None else fingerprint(ring, self.scope, self.plaintext)

    def is_fingerprinted(self, ring: KeyRing) -> bool:
        """Return whether the candidate was reserved for the value that is there now."""
        return self.plaintext is None or fingerprint_matches(ring, self.scope, self.plaintext, self.fingerprint)

    @property
    def to_put(self) -> bool:
        """Whether the plaintext is to be put: never under a ref whose ledger row does not allow it."""
        return self.put is Put.NOTHING and self.plaintext is not None and self.usable

    @property
    def to_read(self) -> bool:
        """Whether the source names the candidate and nothing was put: it is only taken as it is if it can be read."""
        is_known = self.put in (Put.STORED, Put.READ, Put.MISSING)
        return not is_known and self.plaintext is None and self.usable and self.named

    def read_outcome(self, outcome: Credentials | KfsCredentialsError) -> None:
        """Note what the store answered when the candidate was read."""
        if isinstance(outcome, Credentials):
            self.put = Put.READ
        else:
            self.put, self.error = Put.MISSING, JobError.TRANSITION_CONFLICT

    def put_outcome(self, outcome: Receipt | KfsCredentialsError) -> None:
        """Note what the store answered for this item."""
        self.plaintext = None
        match outcome:
            case Receipt():
                self.put, self.receipt = Put.STORED, outcome
            case SecretConflict(rounding_only=True):
                # The Node service put the same value here, rounded: ours keeps every digit, under a fresh ref.
                self.put = Put.STALE
            case SecretConflict():
                self.failed(JobError.CONFLICT)
            case SecretIntegrityError():
                self.failed(JobError.INTEGRITY)
            case CredentialsTooLarge():
                self.failed(JobError.TOO_LARGE)
            case InvalidCredentials():
                self.failed(JobError.INVALID)
            case NotAsSaid():
                self.retry(JobError.NOT_AS_SAID)
            case _:
                self.retry(JobError.UNEXPECTED)


@dataclass(slots=True)
class Batch:
    """Items under one lease, and the call to the store that is at work on them."""

    lease: Lease
    items: list[Item]
    watch: Watch
    putting: list[Item] = field(default_factory=list)
    call: Call[list[Receipt | KfsCredentialsError]] | None = None


class Move(enum.Enum):
    """What is right for a job, once its rows are locked. Also the names under which moves are counted."""

    ACTIVATE = "moved"
    ADOPT = "already moved"
    REFRESH = "refreshed"
    ABANDON = "abandoned"
    RETRY = "to retry"
    RELEASE = "released"
    FAIL = "failed"


class SourceNow(NamedTuple):
    """A source under its lock."""

    version: int
    ref: str | None
    legacy: Legacy | None
    deleting: bool = False

    @classmethod
    def by_id(
        cls,
        source_id: uuid.UUID,
        version: int,
        ref: str | None,
        is_legacy: bool,  # noqa: FBT001
        credentials: str | None,
        deleting: bool,  # noqa: FBT001
    ) -> tuple[uuid.UUID, SourceNow]:
        """Make it of the columns of `lock_sources.sql`; with the id of the source."""
        return source_id, cls(version, ref, Legacy(credentials) if is_legacy else None, deleting)


Decision = tuple[Move, JobError | None]
"""A move, and the error that a job fails with if it fails."""


def decide(
    item: Item, ledger: str | None, source: SourceNow | None, *, locked_elsewhere: bool, leaving: bool = False
) -> Decision:
    """Return what is right for a job.

    `ledger`: the state of the candidate's ledger row, None if there is none of this source. `source`: the source under
    its lock, None if it could not be locked; `locked_elsewhere`: because somebody else has it, not because it is gone.
    `leaving`: the source or its space is being deleted, and gets no new secret.
    """
    if source is None:
        return (Move.RELEASE if locked_elsewhere else Move.ABANDON), None
    if source.ref == item.ref and ledger in (RefState.CANDIDATE, RefState.ACTIVE):
        match item.put:
            case Put.STORED | Put.READ:
                return Move.ADOPT, None
            case Put.MISSING:
                return Move.FAIL, item.error
            case _:
                # Not looked at, or not as it should be, and in use only since then: the next claim reads it.
                return Move.RELEASE, None
    if source.ref is not None or source.legacy is None:
        return Move.ABANDON, None
    if leaving or source.deleting:
        return Move.RELEASE, None
    if ledger is None:
        return Move.FAIL, JobError.LEDGER_MISSING
    if ledger != RefState.CANDIDATE or item.put is Put.STALE:
        return _refresh(item)
    if item.legacy is not None and not source.legacy.same_as(item.legacy):
        return _refresh(item)
    match item.put:
        case Put.STORED:
            return Move.ACTIVATE, None
        case Put.FAILED:
            return Move.FAIL, item.error
        case Put.RETRY if item.retry_count + 1 >= settings.MAX_ATTEMPTS:
            return Move.FAIL, item.error
        case Put.RETRY:
            return Move.RETRY, item.error
        case _:
            return Move.RELEASE, None


def _refresh(item: Item) -> Decision:
    # Bounded: a source whose credentials never hold still would be copied for ever.
    if item.retry_count + 1 >= settings.MAX_ATTEMPTS:
        return Move.FAIL, JobError.UNSTABLE
    return Move.REFRESH, None
