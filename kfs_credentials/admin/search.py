"""What a person may search for: an id, a ref, or the start of a ref. All of them are found by indexes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from django.db.models import Q

from kfs_credentials import sql
from kfs_credentials.crypto import validate_ref
from kfs_credentials.errors import InvalidRef
from kfs_credentials.models import KnowledgeSpace, Source
from kfs_credentials.redaction import short_ref

PREFIX = "source-secret:v1:"
LOWEST = "00000000-0000-4000-8000-000000000000"
HIGHEST = "ffffffff-ffff-4fff-bfff-ffffffffffff"


@dataclass(frozen=True)
class Refs:
    """The refs from `first` to `last`: one, or all with the same start."""

    first: str
    last: str

    @classmethod
    def starting_with(cls, ref: str) -> Refs | None:
        """Return the refs that start with `ref`; None if a ref cannot.

        As a range and not as LIKE, which cannot use an index in the order of a language. Refs differ in their
        hexadecimal digits alone, and every language has those in the same order.
        """
        start = ref.removeprefix(PREFIX)
        found = cls(ref + LOWEST[len(start) :], ref + HIGHEST[len(start) :])
        try:
            validate_ref(found.first)
        except InvalidRef:
            return None
        return found

    def __call__(self, column: str) -> Q:
        """Return the condition that `column` holds one of them."""
        if self.first == self.last:
            return Q((column, self.first))
        return Q((f"{column}__gte", self.first), (f"{column}__lte", self.last))


@dataclass(frozen=True)
class Term:
    """What was searched for: an id (which may be that of a ref, too), or refs."""

    id: uuid.UUID | None
    refs: Refs

    def ids(self, *columns: str) -> Q:
        """Return the condition that one of the columns holds the id; never true if the term is no id."""
        if self.id is None:
            return Q(pk__in=())
        return Q(*((column, self.id) for column in columns), _connector=Q.OR)

    @classmethod
    def read(cls, text: str, *, full_refs: bool) -> Term | None:
        """Return what the text stands for; None if it is neither an id nor the start of a ref.

        `full_refs`: whether the reader may see full refs. Who may not cannot find the rest of one by trying
        longer and longer starts, either: a start counts only as far as it is shown anyway.
        """
        text = text.strip().lower()
        if text.startswith(PREFIX):
            start = text.rstrip("….")
            if not full_refs and len(start) < len(PREFIX + LOWEST):
                start = short_ref(start).rstrip("…")
            refs = Refs.starting_with(start)
            return cls(None, refs) if refs else None
        try:
            found = uuid.UUID(text)
        except ValueError:
            return None
        return cls(found, Refs(f"{PREFIX}{found}", f"{PREFIX}{found}"))


def known_scopes(using: str, of: uuid.UUID) -> list[tuple[str, uuid.UUID]]:
    """Return tenant and space of the source or the space with this id; empty if there is neither.

    The indexes of jobs and refs begin with these two.
    """
    sources = Source.objects.using(using).filter(pk=of)
    spaces = KnowledgeSpace.objects.using(using).filter(pk=of)
    return [
        *sources.values_list("knowledge_space__tenant_id", "knowledge_space_id"),
        *spaces.values_list("tenant_id", "pk"),
    ]


def recorded_scopes(using: str, of: uuid.UUID) -> list[tuple[str, uuid.UUID]]:
    """Return the tenant and space of every ref of a source or a space that is gone."""
    return [(tenant, space) for tenant, space in sql.query(using, "admin/scopes", id=of)]


def in_scopes(scopes: Iterable[tuple[str, uuid.UUID]], of: uuid.UUID) -> Q:
    """Return the condition that a row belongs to the source or the space with this id, which these scopes hold."""
    found = Q(pk__in=())
    for tenant, space in scopes:
        scope = Q(tenant_id=tenant, knowledge_space_id=space)
        found |= scope if space == of else scope & Q(source_id=of)
    return found
