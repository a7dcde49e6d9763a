"""Every error this package raises, in one family.

No message, argument, cause or context of these errors ever holds a credential or a key: what comes from outside
(a store's client, a JSON parser) is translated at the edge, and its text stays behind.
"""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured


class KfsCredentialsError(Exception):
    """The base of all errors of this package."""


# Values that a caller passed in.


class InvalidCredentials(KfsCredentialsError, ValueError):
    """The value cannot be stored as credentials; the message names the path, never the value."""


class CredentialsTooLarge(InvalidCredentials):
    """The canonical bytes exceed the limit (setting MAX_SECRET_BYTES)."""


class InvalidKey(KfsCredentialsError, ValueError):
    """A key of the ring is missing, malformed, of the wrong length or given twice."""


class InvalidScope(KfsCredentialsError, ValueError):
    """A tenant, knowledge space or source id is blank or longer than 255 characters."""


class InvalidRef(KfsCredentialsError, ValueError):
    """Not a ref: `source-secret:v1:` and a lower-case version 4 UUID."""


class InvalidSetting(KfsCredentialsError, ImproperlyConfigured):
    """A setting in KFS_CREDENTIALS is not what it must be; the message names it, never its value."""


# What a secret store answers.


class SecretStoreError(KfsCredentialsError):
    """The base of what a secret store raises."""


class SecretNotFound(SecretStoreError):
    """The store holds no object for this ref."""


class SecretIntegrityError(SecretStoreError):
    """The object is there, but it is not what was put: damaged, of another scope, or sealed under a foreign key.

    `reason` is one of a fixed list and safe to show.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the stored secret cannot be trusted: {reason}")
        self.reason = reason


class SecretConflict(SecretStoreError):
    """The ref already holds other content, and the first bytes stand.

    `rounding_only`: both contents are the same to a double's precision, and only digits beyond it differ.
    """

    def __init__(self, *, rounding_only: bool = False) -> None:
        super().__init__("this ref already holds a different secret; the first one stands")
        self.rounding_only = rounding_only


class StoreUnavailable(SecretStoreError):
    """The store did not answer in time, or answered that it cannot serve now. Trying later is right.

    `retry_after`: seconds the store asked to be left alone, or None.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StoreDenied(SecretStoreError):
    """The store refuses this process. Trying again changes nothing; a person has to."""


class StoreMisconfigured(SecretStoreError):
    """The store is not where, or not what, the settings say."""


# Working together.


class LeaseLost(KfsCredentialsError):
    """The lease ran out, or its renewal failed or went unanswered: nothing may be written under it any more."""


class ImproperlyPrepared(KfsCredentialsError):
    """The database or the settings do not allow this command to work; the message says what to do."""
