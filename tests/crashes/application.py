"""An application: a process that calls the services, one call after the other, and writes down what it is answered."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import DatabaseError, InterfaceError, close_old_connections

from kfs_credentials import services
from kfs_credentials.conf import settings
from kfs_credentials.crypto import Credentials
from kfs_credentials.errors import KfsCredentialsError
from kfs_credentials.models import Source

UNANSWERED = "the database is out of reach"
"""The answer after which nobody knows whether a call was carried out."""


def perform(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Make the calls (a function of `kfs_credentials.services`, its arguments), and print one JSON object for each.

    A line is printed once the call has returned: what it says has been acknowledged. Calls of which there is no line
    may have been carried out or not; at most one of them was begun.
    """
    for function, arguments in calls:
        sys.stdout.write(json.dumps(answer(function, arguments)) + "\n")
        sys.stdout.flush()


def answer(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make one call to the services; return what it was answered, or the name of the error.

    Arguments in capitals are settings, for this call alone.
    """
    close_old_connections()  # as Django does before each request
    for_this_call = {name: value for name, value in arguments.items() if name.isupper()}
    arguments = {name: value for name, value in arguments.items() if name not in for_this_call}
    try:
        with settings.overridden(for_this_call):
            result = getattr(services, function)(**arguments)
    except KfsCredentialsError as error:
        return {"error": type(error).__name__}
    except (DatabaseError, InterfaceError):
        return {"error": UNANSWERED}
    match result:
        case Source():
            return {"source": str(result.pk), "ref": result.credential_ref, "version": result.version}
        case Credentials():
            return {"credentials": dict(result)}  # made up, as all values here are
    return {}
