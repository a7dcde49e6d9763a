"""How things look on the pages: states, times, errors, JSON."""

from __future__ import annotations

import datetime as dt
import re

from django.contrib.admin.utils import display_for_value
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.timesince import timesince
from django.utils.translation import gettext, ngettext

from kfs_credentials.crypto import canonical_json
from kfs_credentials.models import JobError, RefError, RefState, RunState

NOTHING = "-"
LONGEST_NAME = 80
CODE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
SOME_DAY = dt.datetime(2001, 1, 1, tzinfo=dt.UTC)

TONES = {
    RunState.QUEUED: "waiting",
    RunState.RUNNING: "busy",
    RunState.SUCCEEDED: "good",
    RunState.FAILED: "bad",
    RefState.STAGED: "waiting",
    RefState.CANDIDATE: "waiting",
    RefState.ACTIVE: "good",
    RefState.RETIRED: "busy",
    RefState.DELETING: "busy",
    RefState.DELETED: "waiting",
}


def badge(text: str, tone: str) -> SafeString:
    """Return a text on a ground whose colour says how things stand: waiting, busy, good or bad."""
    return format_html('<span class="kfs-badge kfs-{}">{}</span>', tone, text)


def state_badge(state: RunState | RefState) -> SafeString:
    """Return the name of a state as a badge."""
    return badge(str(state.label), TONES[state])


def shortened(text: str) -> str:
    """Return a text that fits into a table."""
    return Truncator(text).chars(LONGEST_NAME)


def in_words(distance: dt.timedelta) -> str:
    """Return a length of time in its largest unit, whichever way it points: "3 hours"."""
    seconds = abs(int(distance.total_seconds()))
    if seconds < 60:
        return ngettext("%(count)d second", "%(count)d seconds", seconds) % {"count": seconds}
    return timesince(SOME_DAY, SOME_DAY + dt.timedelta(seconds=seconds), depth=1)


def from_now(moment: dt.datetime | None, distance: dt.timedelta | None) -> SafeString | str:
    """Return how far away a moment is, with the moment itself as a tooltip.

    `distance`: from now to the moment, by the database's clock: nobody else's counts.
    """
    if moment is None or distance is None:
        return NOTHING
    words = gettext("in %(time)s") if distance > dt.timedelta() else gettext("%(time)s ago")
    exact = display_for_value(moment, NOTHING)
    return format_html('<span title="{}">{}</span>', exact, words % {"time": in_words(distance)})


def lease(expires_at: dt.datetime | None, left: dt.timedelta | None) -> SafeString | str:
    """Return when a lease ends, or that it ran out; the arguments are those of `from_now`."""
    if left is None:
        return NOTHING
    what = gettext("lease ends") if left > dt.timedelta() else badge(gettext("lease expired"), "bad")
    return format_html("{} {}", what, from_now(expires_at, left))


def state(of: RunState | RefState, expires_at: dt.datetime | None, left: dt.timedelta | None) -> SafeString:
    """Return the name of a state as a badge, with the lease if there is one."""
    if expires_at is None:
        return state_badge(of)
    return format_html("{}<br>{}", state_badge(of), lease(expires_at, left))


def error(stored: str | None, *, code: bool = True) -> str:
    """Return what a stored error code means, and the code itself if it is asked for.

    The message that is stored beside the code is never shown: another program may have put anything into it.
    """
    if not stored:
        return NOTHING
    for errors in (JobError, RefError):
        if stored in errors.values:
            label = str(errors(stored).label)
            return f"{label} ({stored})" if code else label
    return stored if CODE.fullmatch(stored) else gettext("unknown")


def json_block(text: str) -> SafeString:
    """Return JSON text as it is, in a block of its own."""
    return format_html('<pre class="kfs-json">{}</pre>', text)


def pretty(value: object, margin: str = "") -> str:
    """Return a value as JSON text over several lines, every digit of its numbers included.

    Its nesting has to be bounded, as that of a redacted value is.
    """
    deeper = margin + "  "
    if isinstance(value, dict) and value:
        lines = [f"{deeper}{pretty(key)}: {pretty(member, deeper)}" for key, member in value.items()]
        return "\n".join(["{", ",\n".join(lines), margin + "}"])
    if isinstance(value, list) and value:
        lines = [f"{deeper}{pretty(item, deeper)}" for item in value]
        return "\n".join(["[", ",\n".join(lines), margin + "]"])
    return canonical_json(value, exact=True).decode()
