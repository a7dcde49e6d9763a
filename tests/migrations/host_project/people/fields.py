"""A primary key that is nothing like a number."""

from typing import Any

from django.db import models


class RandomKey(models.BigAutoField):  # type: ignore[type-arg]
    """A key of a project's own, for DEFAULT_AUTO_FIELD; it has to be some AutoField."""

    def db_type(self, connection: Any) -> str:
        return "uuid"
