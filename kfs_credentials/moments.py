"""Moments that the database told, as every process sees them the same.

How long ago one was is for the database to say: two moments of a project whose USE_TZ is off, or whose DATABASES have a
TIME_ZONE, are hours on a wall to Python, and their distance is wrong by one hour when the clocks change between them.
"""

from __future__ import annotations

from datetime import UTC, datetime

from django.utils import timezone


def in_utc(moment: datetime) -> datetime:
    """Return a moment that the ORM or a cursor has read as an aware one in UTC, also where USE_TZ is off."""
    return (moment if timezone.is_aware(moment) else timezone.make_aware(moment)).astimezone(UTC)
