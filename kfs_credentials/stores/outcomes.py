"""What became of each item of a batch; and what a store should not raise, turned into an error that quotes nothing."""

from __future__ import annotations

import logging
import traceback
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kfs_credentials.crypto import validate_ref
from kfs_credentials.errors import InvalidRef, KfsCredentialsError, SecretStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kfs_credentials.stores.values import Address

logger = logging.getLogger(__name__)

T = TypeVar("T")
ItemT = TypeVar("ItemT")
AddressT = TypeVar("AddressT", bound="Address")
ErrorT = TypeVar("ErrorT", bound=BaseException)

Outcomes: TypeAlias = list[T | KfsCredentialsError]
"""What became of each item of a batch, in order: its result, or the error that it would raise alone."""


class _UnforeseenError(SecretStoreError):
    """The store failed in a way that nobody foresaw: most likely there is a mistake in it."""


def batch(function: Callable[[Sequence[AddressT]], Outcomes[T]], items: Sequence[AddressT]) -> Outcomes[T]:
    """Return the outcome of each item. The store sees only those whose ref is one."""
    refused = [_refusal(item.ref) for item in items]
    valid = [item for item, refusal in zip(items, refused, strict=True) if refusal is None]
    found = iter(each(function, valid))
    return [next(found) if refusal is None else bare(refusal) for refusal in refused]


def each(function: Callable[[Sequence[ItemT]], Outcomes[T]], items: Sequence[ItemT]) -> Outcomes[T]:
    """Return the outcome of each item; none of them has a context. Log what nobody foresaw."""
    outcomes = _outcomes(function, items) if items else []
    errors = [bare(outcome) for outcome in outcomes if isinstance(outcome, KfsCredentialsError)]
    if unforeseen := [error for error in errors if isinstance(error, _UnforeseenError)]:
        _log(unforeseen[0], f"{len(unforeseen)} of {len(items)} times, ")
    return outcomes


def _refusal(ref: str) -> InvalidRef | None:
    try:
        validate_ref(ref)
    except InvalidRef as error:
        return error
    return None


def _outcomes(function: Callable[[Sequence[ItemT]], Outcomes[T]], items: Sequence[ItemT]) -> Outcomes[T]:
    """Return the outcome of each item. If the store fails in an unforeseen way, find out at which of them."""
    try:
        return _translated(partial(function, items))
    except _UnforeseenError as error:
        if len(items) == 1:
            return [error]
    middle = len(items) // 2
    return _outcomes(function, items[:middle]) + _outcomes(function, items[middle:])


def alone(function: Callable[[], T]) -> T:
    """Return what a call that is no batch returns. Log what nobody foresaw."""
    try:
        return _translated(function)
    except _UnforeseenError as error:
        _log(error)
        raise


def _translated(function: Callable[[], T]) -> T:
    """Return what `function` returns; turn what it should not raise into an error that quotes nothing."""
    try:
        return function()
    except KfsCredentialsError:
        raise
    except Exception as error:  # noqa: BLE001 - a client library may raise anything, with any text
        unforeseen = _UnforeseenError(f"the secret store failed in an unexpected way ({type(error).__name__})")
        unforeseen.__traceback__ = error.__traceback__
    raise unforeseen


def _log(error: _UnforeseenError, times: str = "") -> None:
    # The lines of code, not the foreign error: its text could quote anything.
    logger.error("%s%s:\n%s", times, error, "".join(traceback.format_tb(error.__traceback__)))


def bare(error: ErrorT) -> ErrorT:
    """Return the error without what led to it and without the variables of its frames."""
    traceback.clear_frames(error.__traceback__)
    error.__cause__ = error.__context__ = None
    return error


def unwrap(outcome: T | KfsCredentialsError) -> T:
    """Return the result, or raise the error that is in its place."""
    if isinstance(outcome, KfsCredentialsError):
        raise outcome
    return outcome
