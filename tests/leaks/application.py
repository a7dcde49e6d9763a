"""An application that calls the services, and shows all that it can show without asking for a value.

What it is answered it prints in every way in which somebody may do so by accident; of each error it writes down what an
error tracker would.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kfs_credentials import services
from kfs_credentials.crypto import Credentials
from tests.leaks.frames import everything_shown

logger = logging.getLogger("tests.leaks.application")


def perform(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Make the calls: a function of `kfs_credentials.services`, and its arguments."""
    for function, arguments in calls:
        try:
            result = getattr(services, function)(**arguments, **_more(function))
        except Exception as error:
            _print(*everything_shown(error))
            logger.exception("%s failed", function, extra={"error": error})
        else:
            _print(function, repr(result), str(result), f"{result}", repr(vars(result)) if vars_of(result) else "")
            _print(repr(copy.deepcopy(result)), repr([result]), repr({"result": result}))
            logger.debug("%s returned %r", function, result, extra={"result": result})


def vars_of(result: object) -> bool:
    """Whether it has variables of its own."""
    return hasattr(result, "__dict__")


def _more(function: str) -> dict[str, Callable[[Credentials], None]]:
    return {"validate": _accept} if function in ("create_source", "rotate_credentials") else {}


def _accept(credentials: Credentials) -> None:
    logger.debug("validates %s %r", credentials, credentials)


def _print(*texts: str) -> None:
    sys.stdout.write("".join(f"{text}\n" for text in texts))
    sys.stdout.flush()
