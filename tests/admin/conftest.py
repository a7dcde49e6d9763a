"""Who looks at the pages, and where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db.models import Model
from django.test import Client
from django.urls import reverse

MakeClient = Callable[..., Client]


def list_page(model: type[Model], query: str = "") -> str:
    return reverse(f"admin:kfs_credentials_{model._meta.model_name}_changelist") + query


def page_of(row: Any, kind: str = "change") -> str:
    from django.contrib.admin.utils import quote

    return reverse(f"admin:kfs_credentials_{row._meta.model_name}_{kind}", args=[quote(row.pk)])


@pytest.fixture
def client_with(db: None) -> MakeClient:
    """Log in a member of staff who may view everything of ours, and has the permissions that are given."""

    def make(*codenames: str) -> Client:
        ours = Permission.objects.filter(content_type__app_label="kfs_credentials")
        user = User.objects.create_user(f"staff-{User.objects.count()}", is_staff=True)
        viewing = ours.filter(codename__regex="^view_").exclude(codename="view_full_ref")
        assert viewing.count() == 14
        user.user_permissions.set([*viewing, *ours.filter(codename__in=codenames)])
        client = Client()
        client.force_login(user)
        return client

    return make
