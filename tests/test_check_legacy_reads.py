"""The system check that keeps LEGACY_READS on for as long as somebody needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.core import checks
from django.db import connections
from django.test import override_settings

from kfs_credentials.checks import check_legacy_reads
from kfs_credentials.models import Source
from tests.factories import SourceFactory
from tests.test_checks import found, said

pytestmark = pytest.mark.usefixtures("secrets_directory")


@pytest.mark.django_db
def test_what_lies_in_clear_is_moved_before_it_is_no_longer_read(kfs_settings: Callable[..., None]) -> None:
    assert check_legacy_reads() == []
    SourceFactory.create_batch(2)
    SourceFactory.create(bare=True)
    SourceFactory.create(status="deleting")
    assert check_legacy_reads() == []

    kfs_settings(LEGACY_READS=False)
    (message,) = check_legacy_reads()

    assert said([message]) == [
        (
            "E013",
            (
                "KFS_CREDENTIALS['LEGACY_READS'] is False, and 2 source(s) in DATABASES['default'] have credentials in "
                "clear and no ref: `resolve_credentials` refuses them."
            ),
        )
    ]
    assert message.is_serious()
    assert message.hint == (
        "Leave it True until `manage.py run_credential_backfill` has moved them; `manage.py credential_status` says "
        "what is left."
    )
    deployed = checks.run_checks(tags=["kfs_credentials"], include_deployment_checks=True)
    assert "kfs_credentials.E013" in [found.id for found in deployed]
    # A web process starts nevertheless.
    assert found() == []
    Source.objects.legacy().delete()
    assert check_legacy_reads() == []


def test_what_lies_in_clear_in_a_database_that_is_out_of_reach(
    django_db_blocker: Any, kfs_settings: Callable[..., None]
) -> None:
    kfs_settings(LEGACY_READS=False)
    connections.settings["other"] = {**connections.settings["default"], "HOST": "/nonexistent"}
    try:
        with django_db_blocker.unblock(), override_settings(DATABASE_ROUTERS=["tests.test_checks.ToOther"]):
            (message,) = check_legacy_reads()
    finally:
        del connections["other"]
        del connections.settings["other"]

    assert said([message]) == [
        (
            "W014",
            "DATABASES['other'] could not be asked whether credentials still lie in clear (OperationalError).",
        )
    ]
    assert message.hint == "Check again once it can be reached, and is migrated."
