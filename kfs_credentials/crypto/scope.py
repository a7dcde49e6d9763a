"""Whose secret it is, what it is called, and where it lies."""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass

from kfs_credentials.errors import InvalidRef, InvalidScope

MAX_LENGTH = 255
DEFAULT_PREFIX = "__knowledge-secrets/source/v1/"
MAX_PREFIX_LENGTH = 512

# What JavaScript's trim() removes (ECMA-262, WhiteSpace and LineTerminator). Python's strip() differs: it
# removes U+001C to U+001F and U+0085 too, and leaves U+FEFF.
JAVASCRIPT_WHITE_SPACE = (
    "\t\n\v\f\r \u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000\ufeff"
)

_REF = re.compile(r"source-secret:v1:[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, init=False)
class Scope:
    """Whose secret it is: authenticated with the ciphertext, and part of the fingerprint.

    Each id is text; the last two may also be given as UUIDs, which are written in lower case. White space
    around it is removed (as JavaScript's `trim()` does) and nothing else is changed: upper and lower case
    differ.

    Raises `InvalidScope` unless an id then has 1 to 255 UTF-16 code units.
    """

    tenant_id: str
    knowledge_space_id: str
    source_id: str

    def __init__(self, tenant_id: str, knowledge_space_id: str | uuid.UUID, source_id: str | uuid.UUID) -> None:
        # A frozen dataclass sets its own fields this way too.
        object.__setattr__(self, "tenant_id", _checked("tenant_id", tenant_id))
        object.__setattr__(self, "knowledge_space_id", _checked("knowledge_space_id", _text(knowledge_space_id)))
        object.__setattr__(self, "source_id", _checked("source_id", _text(source_id)))


def new_ref() -> str:
    """Return a new ref: `source-secret:v1:` and a random (version 4) UUID in lower case."""
    return f"source-secret:v1:{uuid.uuid4()}"


def validate_ref(ref: str) -> None:
    """Raise `InvalidRef` unless the text is a ref, exactly as `new_ref` makes them."""
    if not isinstance(ref, str) or not _REF.fullmatch(ref):
        kind, size = type(ref).__name__, f" of {len(ref)} characters" if isinstance(ref, str) else ""
        raise InvalidRef(f"A ref is 'source-secret:v1:' and a version 4 UUID in lower case, not this {kind}{size}.")


def object_name(ref: str, *, prefix: str = DEFAULT_PREFIX) -> str:
    """Return the name of the stored object: prefix, lower hex SHA-256 of the ref, `.enc`.

    `prefix` (1 to 512 characters) is put in front as it is: a directory has to end in a slash.

    Raises `InvalidRef`, and `ValueError` for a prefix that is too short or too long.
    """
    validate_ref(ref)
    if not 1 <= len(prefix) <= MAX_PREFIX_LENGTH:
        raise ValueError(f"The prefix must have 1 to {MAX_PREFIX_LENGTH} characters, not {len(prefix)}.")
    return f"{prefix}{hashlib.sha256(ref.encode()).hexdigest()}.enc"


def _text(given: str | uuid.UUID) -> str:
    return str(given) if isinstance(given, uuid.UUID) else given


def _checked(name: str, given: str) -> str:
    if not isinstance(given, str):
        raise InvalidScope(f"{name} must be text, not a value of type {type(given).__name__}.")
    text = given.strip(JAVASCRIPT_WHITE_SPACE)
    length = len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2
    if not 1 <= length <= MAX_LENGTH:
        raise InvalidScope(f"{name} must have 1 to {MAX_LENGTH} characters (UTF-16), not {length}.")
    return text
