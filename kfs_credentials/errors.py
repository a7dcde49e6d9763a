"""Every error this package raises, in one family.

No message, argument, cause or context of these errors ever holds a credential or a key: what comes from outside
(a store's client, a JSON parser) is translated at the edge, and its text stays behind.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import ClassVar

from django.core.exceptions import ImproperlyConfigured


class KfsCredentialsError(Exception):
    """The base of all errors of this package.

    `code` is stable and may be shown to a client, whose text an error message is not for. Where knowledge-fs has a
    code for the same, it is the same.
    """

    code: ClassVar[str] = "SOURCE_CREDENTIAL_ERROR"
    refusal: ClassVar[str | None] = None
    """Why a worker that meets this does not work, a `RefusalReason`; None if it is about one secret or one call."""


class CredentialsInClearWarning(UserWarning):
    """What is being serialized holds the credentials of a source that has not been moved, and so does what comes of it.

    Python shows it once a process. `python -W error::UserWarning manage.py dumpdata` ends there instead.
    """


# Values that a caller passed in.


class InvalidCredentials(KfsCredentialsError, ValueError):
    """The value cannot be stored as credentials; the message names the path, never the value."""

    code = "SOURCE_CREDENTIALS_INVALID"


class CredentialsTooLarge(InvalidCredentials):
    """The canonical bytes exceed the limit (setting MAX_SECRET_BYTES)."""

    code = "SOURCE_SECRET_TOO_LARGE"


class InvalidKey(KfsCredentialsError, ValueError):
    """A key of the ring is missing, malformed, of the wrong length or given twice."""

    refusal = "misconfigured"


class InvalidScope(KfsCredentialsError, ValueError):
    """A tenant, knowledge space or source id is blank or longer than 255 characters."""

    code = "SOURCE_SCOPE_INVALID"


class InvalidRef(KfsCredentialsError, ValueError):
    """Not a ref: `source-secret:v1:` and a lower-case version 4 UUID."""


class InvalidSetting(KfsCredentialsError, ImproperlyConfigured):
    """A setting in KFS_CREDENTIALS is not what it must be; the message names it, never its value."""

    refusal = "misconfigured"


# What a secret store answers.


class SecretStoreError(KfsCredentialsError):
    """The base of what a secret store raises."""

    code = "SOURCE_SECRET_STORE_FAILED"


class SecretNotFound(SecretStoreError):
    """The store holds no object for this ref."""

    code = "SOURCE_CREDENTIAL_UNAVAILABLE"


class SecretIntegrityError(SecretStoreError):
    """The object is there, but it is not what was put: damaged, of another scope, or sealed under a foreign key.

    `reason` is one of a fixed list and safe to show.
    """

    code = "SOURCE_SECRET_INTEGRITY_FAILED"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the stored secret cannot be trusted: {reason}")
        self.reason = reason


class SecretConflict(SecretStoreError):
    """The ref already holds other content, and the first bytes stand.

    `rounding_only`: both contents are the same to a double's precision, and only digits beyond it differ.
    """

    code = "SOURCE_SECRET_REF_CONFLICT"

    def __init__(self, *, rounding_only: bool = False) -> None:
        super().__init__("this ref already holds a different secret; the first one stands")
        self.rounding_only = rounding_only


class NotAsSaid(SecretStoreError):
    """The store said that it had put, replaced or erased this, and looking at it again shows that it has not.

    If that is so of all that it did in one call, that is `StoreMisconfigured`: then the store itself is to be doubted.
    """

    code = "SOURCE_SECRET_STORE_CONTRADICTED"


class SecretLost(NotAsSaid):
    """The store does not give back what it was to seal anew, nor what was put again in its place."""


class StoreUnavailable(SecretStoreError):
    """The store did not answer in time, or answered that it cannot serve now. Trying later is right.

    `retry_after`: seconds the store asked to be left alone, or None. `late`: it may be at work, and STORE_TIMEOUT is
    over: less in one call may be done in time.
    """

    code = "SOURCE_SECRET_STORE_UNAVAILABLE"
    refusal = "store_unavailable"

    def __init__(self, message: str, *, retry_after: float | None = None, late: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.late = late


class StoreFull(StoreUnavailable):
    """The store has no room left. Erasing makes some; trying later is right."""


class StoreDenied(SecretStoreError):
    """The store refuses this process. Trying again changes nothing; a person has to."""

    code = "SOURCE_SECRET_STORE_DENIED"
    refusal = "store_denied"


class StoreMisconfigured(SecretStoreError):
    """The store is not where, or not what, the settings say."""

    code = "SOURCE_SECRET_STORE_MISCONFIGURED"
    refusal = "store_misconfigured"


class StoreNotConfigured(StoreMisconfigured):
    """The settings of this process give no such store: another process may have it."""


class BindingProblem(StrEnum):
    """Why a database and a store are not taken for each other's."""

    UNBOUND = "unbound"  # the database has refs in use, and nobody has said which store is its own
    UNCONFIRMED = "unconfirmed"  # somebody has begun to bind it, and did not finish
    CLONE = "clone"  # the binding was made in another database: this is a copy, or was restored elsewhere
    ENVIRONMENT = "environment"  # the binding was made in another ENVIRONMENT: this is a copy of the whole server
    NO_PROBE = "no_probe"  # the store shows nothing: another directory or bucket, or one that is not mounted
    UNREADABLE = "unreadable"  # no key of the ring opens the probe
    OTHER = "other"  # the store is bound to another database
    OLD_STORE = "old_store"  # the store shows an older epoch: it was restored from a copy
    OLD_DATABASE = "old_database"  # the store shows a newer epoch: the database was restored from a copy


class BindingBroken(StoreMisconfigured):
    """The database and the store do not know each other, or not any more: nothing is put and nothing is erased."""

    refusal = "wrong_store"

    def __init__(self, problem: BindingProblem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


class SecretRetained(SecretStoreError):
    """The store may not erase this object now, or only hides it.

    `until`: an aware datetime from which on it may, None if that is not known.
    """

    code = "SOURCE_SECRET_RETAINED"

    def __init__(self, until: datetime | None = None) -> None:
        super().__init__("the secret store may not erase this object yet")
        self.until = until


# What the services answer.


class ServiceError(KfsCredentialsError):
    """The base of what only the services raise."""

    code = "SOURCE_CREDENTIAL_MUTATION_FAILED"


class SourceNotFound(ServiceError):
    """The tenant has no such source. Another tenant's source is not told apart from none."""

    code = "SOURCE_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("this tenant has no such source")


class SpaceNotFound(ServiceError):
    """The tenant has no such knowledge space. Another tenant's space is not told apart from none."""

    code = "KNOWLEDGE_SPACE_NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("this tenant has no such knowledge space")


class SourceExists(ServiceError):
    """There is a source of this id already."""

    code = "SOURCE_EXISTS"


class BeingDeleted(ServiceError):
    """A deletion is at work on the source or its knowledge space: its secrets stay as they are until it is done."""

    code = "SOURCE_BEING_DELETED"

    def __init__(self) -> None:
        super().__init__("the source or its knowledge space is being deleted")


class VersionConflict(ServiceError):
    """The source has another version than the caller has seen. Read it again, and decide anew."""

    code = "SOURCE_VERSION_CONFLICT"

    def __init__(self, expected: int, found: int) -> None:
        super().__init__(f"the source has version {found}, not {expected}: somebody else has changed it")
        self.expected = expected
        self.found = found


class NoCredentials(ServiceError):
    """The source has no credentials that could be read; the message says why."""

    code = "SOURCE_CREDENTIALS_MISSING"


class CredentialsRejected(ServiceError):
    """The caller's validator refused the new credentials. What it said is left out: it may quote them."""

    code = "SOURCE_CREDENTIAL_TEST_FAILED"


class InvalidMetadata(ServiceError, ValueError):
    """The metadata cannot be stored; the message says why."""

    code = "SOURCE_METADATA_INVALID"


class InvalidOperation(ServiceError, ValueError):
    """The id of an operation cannot be stored; the message says why."""

    code = "SOURCE_OPERATION_INVALID"


class OperationOver(ServiceError):
    """The operation of this id was given up, or is about another source: it cannot be repeated."""


class SourceBusy(ServiceError):
    """Somebody else holds the rows. Trying again is right."""

    code = "SOURCE_BUSY"


class MutationFailed(ServiceError):
    """The database refused the change; the message has the error's class, never its text, which quotes rows."""


# Working together.


class LeaseLost(KfsCredentialsError):
    """The lease ran out, or its renewal failed or went unanswered: nothing may be written under it any more."""


class WorkersPaused(KfsCredentialsError):
    """Somebody has paused the workers of this database; the message says who and why."""

    refusal = "paused"


class ImproperlyPrepared(KfsCredentialsError):
    """The database or the settings do not allow this command to work; the message says what to do."""


class NotMigrated(ImproperlyPrepared):
    """The database lacks migrations of this package, or is none that it works on."""

    refusal = "not_migrated"


class RowsHidden(ImproperlyPrepared):
    """Row-level security hides rows, and what cannot be seen would be taken for deleted."""

    refusal = "rows_hidden"


class InvalidIndex(ImproperlyPrepared):
    """An index is there and not valid."""

    refusal = "invalid_index"


class DatabaseRefused(ImproperlyPrepared):
    """The database refused a statement of a worker, and only a person can help."""

    refusal = "database_refused"


class KeyClosed(ImproperlyPrepared):
    """`reencrypt_secrets` has moved everything away from this key, and nothing comes into use under it any more.

    The process has an old key ring. Doing it again in this process changes nothing.
    """

    code = "SOURCE_SECRET_KEY_CLOSED"
    refusal = "key_closed"

    def __init__(self, key_id: str) -> None:
        super().__init__(
            f"Key {key_id} is closed: `manage.py reencrypt_secrets` moves all secrets to another one, and nothing "
            "comes into use under this one any more. Put the new key first in this process's KFS_CREDENTIALS['KEYS'], "
            "and restart it."
        )
        self.key_id = key_id
