"""Pages without counting millions of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.paginator import Paginator
from django.utils.functional import cached_property

if TYPE_CHECKING:
    Base = Paginator[Any]
else:
    Base = Paginator


class BoundedPaginator(Base):
    """Counts up to `MOST` rows, and pages through those alone. Who wants row 20,000 has to filter or search.

    Counting, and reading the last page, cost no more than reading `MOST` rows.
    """

    MOST = 10_000

    @cached_property
    def count(self) -> int:
        """How many rows there are, at most `MOST`."""
        return min(self._counted, self.MOST)

    @property
    def has_more(self) -> bool:
        """Whether there are rows that are not counted."""
        return self._counted > self.MOST

    @cached_property
    def _counted(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by().values("pk")[: self.MOST + 1].count())
