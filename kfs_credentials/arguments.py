"""What callers of the services pass in: read, and refused with a message before anything is written."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from kfs_credentials.conf import NAME, settings
from kfs_credentials.crypto import Credentials, Plaintext, canonical_json, sensitive
from kfs_credentials.errors import (
    CredentialsRejected,
    CredentialsTooLarge,
    InvalidCredentials,
    InvalidMetadata,
    InvalidOperation,
    KfsCredentialsError,
)

Validator = Callable[[Credentials], object]
"""Called with new credentials before they become active; raises whatever it likes to refuse them."""

Id = uuid.UUID | str

LONGEST_OPERATION = 255
UNSTORABLE = "the character U+0000 and half surrogate pairs"


def own_id(tenant: str, given: Id, error: KfsCredentialsError) -> uuid.UUID:
    """Read an id of the tenant's. One that is no UUID belongs to nobody, and a tenant that is no text has none."""
    try:
        own = given if isinstance(given, uuid.UUID) else uuid.UUID(given)
    except (ValueError, TypeError, AttributeError):
        own = None
    if own is None or not _is_text(tenant):
        raise error
    return own


def checked_operation_id(given: str | None) -> str:
    """Return the id of an operation, a new one if none is given; raises `InvalidOperation`."""
    if given is None:
        return str(uuid.uuid4())
    if not _is_text(given) or not 1 <= len(given) <= LONGEST_OPERATION:
        raise InvalidOperation(
            f"operation_id must be text of 1 to {LONGEST_OPERATION} characters, without {UNSTORABLE}"
        )
    return given


def taken_apart(
    metadata: Mapping[str, Any] | None, credentials: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """Return the metadata without credentials, and the credentials, from wherever they were given.

    Raises `InvalidMetadata`.
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise InvalidMetadata(f"metadata must be a JSON object, not a value of type {type(metadata).__name__}")
    rest = dict(metadata or {})
    inside = rest.pop("credentials", None)
    if inside is not None and credentials is not None:
        raise InvalidMetadata("credentials are given twice, as an argument and in metadata: give them once")
    return rest, inside if credentials is None else credentials


def json_text(value: Any, what: str) -> str:
    """Return the JSON of a value, for a `jsonb` column; raises `InvalidMetadata`, which begins with `what`."""
    try:
        text = canonical_json(value, exact=True).decode()
    except InvalidCredentials as error:
        problem = str(error)
    else:
        # The writer escapes a backslash as two.
        if not re.search(r"\\u(0000|d[89a-f])", text.replace("\\\\", "")):
            return text
        problem = f"jsonb has no place for {UNSTORABLE}"
    raise InvalidMetadata(f"{what} cannot be stored: {problem}")


def _is_text(value: object) -> bool:
    """Return whether PostgreSQL can hold it as text."""
    return isinstance(value, str) and not re.search("[\x00\ud800-\udfff]", value)


def check_texts(**texts: object) -> None:
    """Raise `InvalidMetadata` unless PostgreSQL can hold each of these, given by name, as text."""
    for name, text in texts.items():
        if not _is_text(text):
            raise InvalidMetadata(f"{name} must be text, without {UNSTORABLE}")


@sensitive
def checked_credentials(credentials: Mapping[str, Any], validate: Validator | None) -> Plaintext:
    """Return the bytes of new credentials that are of the right size, and that the caller's validator accepts.

    Raises `InvalidCredentials`, `CredentialsTooLarge`, `CredentialsRejected`.
    """
    plaintext = Plaintext.of(credentials)
    if plaintext.size > settings.MAX_SECRET_BYTES:
        raise CredentialsTooLarge(
            f"the credentials have {plaintext.size:,} bytes, and {NAME}['MAX_SECRET_BYTES'] allows "
            f"{settings.MAX_SECRET_BYTES:,}"
        )
    if validate is not None:
        try:
            validate(Credentials(plaintext))
        except Exception as error:  # noqa: BLE001 - whatever it raises, its text may quote the credentials
            kind = type(error).__name__
        else:
            return plaintext
        raise CredentialsRejected(f"the new credentials were refused by their validator ({kind})")
    return plaintext
