"""Reading JSON as PostgreSQL's jsonb holds it: no number loses a digit."""

from __future__ import annotations

import json

from kfs_credentials.errors import InvalidCredentials

from .numbers import NotJSONError, parse_fraction, parse_integer, refuse_constant
from .sensitive import sensitive

_DECODER = json.JSONDecoder(parse_int=parse_integer, parse_float=parse_fraction, parse_constant=refuse_constant)


@sensitive
def parse_json(text: str | bytes) -> object:
    """Return the value of a JSON text (RFC 8259; bytes are UTF-8 without a byte order mark).

    Objects become dicts (the last of equal keys stands), arrays lists. Integers become int, of any length;
    other numbers float where `Decimal(repr(float))` equals them, else Decimal.

    Raises `InvalidCredentials`, which may say where but never quotes, for anything else: trailing text,
    NaN, Infinity, numbers that jsonb cannot hold, broken UTF-8, nesting too deep for the stack. 500 levels
    can be read where 400 frames of the 1,000 that Python allows by default are in use.
    """
    return parse(text)


def parse(text: str | bytes) -> object:
    """Do what `parse_json` says, for callers that are `sensitive` themselves."""
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except UnicodeDecodeError as error:
        problem = f"it is not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        problem = f"it is not JSON at character {error.pos}"
    except NotJSONError as error:
        problem = str(error)
    except RecursionError:
        problem = "it is nested too deep for the stack that is left"
    raise InvalidCredentials(f"The text cannot be read: {problem}.")
