"""Numbers as JSON text, rounded to a double or with every digit, and back."""

from __future__ import annotations

import math
import sys
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal

import rfc8785

MAX_SAFE_INTEGER = 2**53 - 1
"""Up to here each integer is a double, and ECMAScript prints all its digits."""

# What PostgreSQL's numeric, and with it jsonb, can hold (PostgreSQL documentation, "Numeric Types").
MAX_INTEGER_DIGITS = 131_072
MAX_FRACTION_DIGITS = 16_383
INTEGER_LIMIT = 10**MAX_INTEGER_DIGITS

NOT_FINITE = "NaN and infinities are not JSON"
TOO_MANY_DIGITS = (
    f"the number has more digits than PostgreSQL's numeric can hold "
    f"({MAX_INTEGER_DIGITS:,} before the point, {MAX_FRACTION_DIGITS:,} after it)"
)

# Without limit or trap: the current context may round, and belongs to the caller.
_ALL_DIGITS = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])


class NotJSONError(Exception):
    """JSON cannot hold the value, and the message says why. Becomes `InvalidCredentials`, with the path."""


def rounded_text(number: float | Decimal) -> str:
    """Return the number as ECMAScript prints it after rounding to a double; in full if it is beyond doubles.

    The text depends on the number alone, not on its type. A number too small for a double is 0, and so is -0.
    """
    if isinstance(number, int):
        if -MAX_SAFE_INTEGER <= number <= MAX_SAFE_INTEGER:
            return str(int(number))
        number = Decimal(_checked_integer(number))
    if isinstance(number, Decimal):
        number = _checked_decimal(number)
        double = float(number)
        return f"{number:f}" if math.isinf(double) else _double_text(double)
    return _double_text(number)


def exact_text(number: float | Decimal) -> str:
    """Return the number with every digit: an int in full, a Decimal laid out as ECMAScript does a double."""
    if isinstance(number, int):
        # Not `str(int)`, which stops at 4,300 digits.
        return str(Decimal(_checked_integer(number)))
    if isinstance(number, Decimal):
        number = _checked_decimal(number)
        return f"{number:f}" if -7 < number.adjusted() < 21 else f"{number:e}"
    return _double_text(number)


def parse_integer(token: str) -> int:
    """Return the integer of a JSON token, of any length that jsonb can hold."""
    if len(token) <= sys.int_info.str_digits_check_threshold:
        return int(token)
    if len(token.lstrip("-")) > MAX_INTEGER_DIGITS:
        raise NotJSONError(TOO_MANY_DIGITS)
    # Not `int(str)`, which stops at 4,300 digits.
    return int(Decimal(token))


def parse_fraction(token: str) -> float | Decimal:
    """Return the number of a JSON token with a point or an exponent.

    A float if it is the same number, that is, if its shortest text (`repr`) has the same value; else a
    Decimal.
    """
    double = float(token)
    if repr(double) == token:
        return double
    number = Decimal(token, _ALL_DIGITS)  # NaN if the exponent is beyond what Decimal can hold
    if number.is_nan():
        raise NotJSONError(TOO_MANY_DIGITS)
    number = _checked_decimal(number)
    return double if Decimal(repr(double)) == number else number


def refuse_constant(_token: str) -> None:
    """Refuse NaN, Infinity and -Infinity, which Python's parser lets through."""
    raise NotJSONError(NOT_FINITE)


def _checked_integer(number: int) -> int:
    if not -INTEGER_LIMIT < number < INTEGER_LIMIT:
        raise NotJSONError(TOO_MANY_DIGITS)
    return number


def _checked_decimal(number: Decimal) -> Decimal:
    """Return the number without trailing zeros, and 0 without sign; short enough to be written in full."""
    if not number.is_finite():
        raise NotJSONError(NOT_FINITE)
    if not number:
        return Decimal(0)
    if number.adjusted() >= MAX_INTEGER_DIGITS:
        raise NotJSONError(TOO_MANY_DIGITS)
    number = number.normalize(_ALL_DIGITS)
    if -int(number.as_tuple().exponent) > MAX_FRACTION_DIGITS:
        raise NotJSONError(TOO_MANY_DIGITS)
    return number


def _double_text(double: float) -> str:
    """Return the double's shortest text, as ECMAScript's Number::toString (RFC 8785, section 3.2.2.3)."""
    if not math.isfinite(double):
        raise NotJSONError(NOT_FINITE)
    return rfc8785.dumps(float(double)).decode()
