"""Credentials, and their bytes, in objects that show nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast

from kfs_credentials.errors import InvalidCredentials

from .canonical import careful, plain
from .parsing import parse
from .sensitive import Secret, hide, sensitive


class Plaintext(Secret):
    """The canonical bytes of credentials, made once, for the functions that need them: `fingerprint`, `seal`.

    Made by `Plaintext.of`. Its repr shows nothing; it cannot be pickled.
    """

    __slots__ = ("_exact", "_rounded")

    def __init__(self, exact: bytes, rounded: bytes) -> None:
        self._exact = hide(exact)
        self._rounded = hide(rounded)

    @classmethod
    @sensitive
    def of(cls, credentials: Mapping[str, Any] | Plaintext) -> Plaintext:
        """Return the canonical bytes of credentials: a JSON object, as `canonical_json` describes it.

        Raises `InvalidCredentials` with the path of what JSON cannot hold, or if the value is no object.
        """
        if isinstance(credentials, Plaintext):
            return credentials
        if isinstance(credentials, Credentials):
            return credentials._plaintext  # noqa: SLF001 - the two classes are one thing
        if not isinstance(credentials, Mapping):
            kind = type(credentials).__name__
            raise InvalidCredentials(f"Credentials must be a JSON object, not a value of type {kind}.")
        exact = rounded = plain(credentials)
        if exact is None or rounded is None:
            exact = careful(credentials, exact=True)
            rounded = careful(credentials, exact=False)
        return cls(exact, exact if exact == rounded else rounded)

    @property
    def exact(self) -> bytes:
        """The bytes that are stored: canonical JSON with every digit."""
        return self._exact()

    @property
    def rounded(self) -> bytes:
        """The bytes that the fingerprint covers: canonical JSON; the object `exact` itself if the same."""
        return self._rounded()

    @property
    def size(self) -> int:
        """The number of bytes that are stored."""
        return len(self._exact())


class Credentials(Secret, Mapping[str, Any]):
    """Credentials in clear: a read-only mapping that shows them to nobody but who takes out a member, or all.

    Its repr, str and format show nothing; JSON encoders and pickle refuse it; copying gives the same
    object. What is taken out is a copy: changing it changes nothing here. Equal to any mapping with the
    same members.

    The values are those of `parse_json`: integers are int, other numbers float where that is the same number,
    else Decimal. Other types become what JSON has for them: a tuple a list, 1.0 the int 1.

    Raises `InvalidCredentials` with the path of what JSON cannot hold, or if the value is no mapping.
    """

    __slots__ = ("_plaintext", "_values")

    @sensitive
    def __init__(self, credentials: Mapping[str, Any] | Plaintext) -> None:
        self._plaintext = Plaintext.of(credentials)
        self._values = hide(cast("dict[str, Any]", parse(self._plaintext.exact)))

    @sensitive
    def reveal(self) -> dict[str, Any]:
        """Return the credentials as a plain dict, a fresh copy. From here on, the caller keeps them safe."""
        return cast("dict[str, Any]", _copy(self._values()))

    @sensitive
    def __getitem__(self, key: str) -> Any:
        return _copy(self._values()[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __contains__(self, key: object) -> bool:
        return key in self._values()

    @sensitive
    def __eq__(self, other: object) -> bool:
        if isinstance(other, Credentials):
            return self._values() == other._values()
        if isinstance(other, Mapping):
            return self._values() == dict(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]


CredentialsLike: TypeAlias = Mapping[str, Any] | Credentials | Plaintext
"""What `fingerprint` and `seal` take: any mapping that is a JSON object, or its bytes, made before."""


def _copy(value: object) -> object:
    # No comprehensions, which are frames too in Python 3.11: with one frame a level, MAX_DEPTH fits the
    # stack.
    if isinstance(value, dict):
        return dict(zip(value, map(_copy, value.values()), strict=True))
    if isinstance(value, list):
        return list(map(_copy, value))
    return value
