"""A user model that is nothing like Django's."""

import uuid

from django.contrib.auth.models import AbstractBaseUser, PermissionsMixin
from django.db import models


class Person(AbstractBaseUser, PermissionsMixin):
    """A user, by e-mail address."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    email = models.EmailField(unique=True)

    USERNAME_FIELD = "email"

    def __str__(self) -> str:
        return self.email
