"""Keeping values out of error reports.

An error tracker sends the local variables of every frame of a traceback, and a debug page shows them. So
whatever holds a value for longer than one call is a `Secret`, whose repr shows nothing, and whatever works on
values is `sensitive`: by the time an error leaves it, no frame of this package remembers a value.

This guards against accidents. Code that looks for the value on purpose finds it: it runs in the same process.
"""

from __future__ import annotations

import functools
import traceback
from typing import TYPE_CHECKING, Never, ParamSpec, Self, TypeVar

from django.views.decorators.debug import sensitive_variables

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def sensitive(function: Callable[P, R]) -> Callable[P, R]:
    """Let no error of the function take a value along; for functions that work on credentials or keys.

    The error goes on with its message and its lines of code. It loses the local variables of every frame
    below the caller's, and the errors that came before it (`json.JSONDecodeError`, for one, keeps the whole
    document). While the function runs, Django's debug page and error mails hide its variables
    (`sensitive_variables`).
    """
    hidden = sensitive_variables()(function)

    @functools.wraps(function)
    def guard(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return hidden(*args, **kwargs)
        except BaseException as error:
            del args, kwargs  # this frame is still running, so that the next line does not clear it
            traceback.clear_frames(error.__traceback__)
            error.__cause__ = error.__context__ = None
            raise

    return guard


def hide(value: T) -> Callable[[], T]:
    """Return a function that returns the value: a holder that shows nothing, whichever way it is printed."""
    return lambda: value


class Secret:
    """The base of objects that hold something secret: they show nothing, and cannot be pickled."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: hidden>"

    def __sentry_repr__(self) -> str:
        """Show nothing in Sentry either, which would go through the members of a mapping otherwise."""
        return repr(self)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> Never:
        raise TypeError(f"{type(self).__name__} cannot be pickled: the pickle would hold the secret in clear.")
