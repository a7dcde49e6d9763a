"""A ref that no source names any more: what the cleanup's next sweep retires is no finding while sweeps are made."""

from __future__ import annotations

import pytest

from kfs_credentials.models import Source
from kfs_credentials.verification import database
from kfs_credentials.verification.findings import FindingClass
from tests.cleanup.rows import bare_source, in_database, make_source, name_ref
from tests.verification.looks import classes

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("secrets_directory")]


def swept(ago: str) -> None:
    in_database("DELETE FROM kfs_credentials_round")
    in_database(
        "INSERT INTO kfs_credentials_round (name, found, covers_until) VALUES ('sweep', 0, now() - %s::interval)", ago
    )


def test_what_a_deletion_leaves_behind_is_a_finding_only_if_no_sweep_is_made() -> None:
    """An ORM or SQL that deletes a source says nothing to the ledger: the next sweep does."""
    Source.objects.filter(pk=make_source().pk).delete()
    assert classes() == ["ref_unnamed"]  # there was no sweep yet
    swept("47 hours")
    run = database.Verification("default")
    run.run()
    assert (run.findings.total, run.unswept) == (0, 1)
    swept("49 hours")
    assert classes() == ["ref_unnamed"]
    in_database("UPDATE kfs_credentials_round SET covers_until = NULL")
    assert classes() == ["ref_unnamed"]
    run = database.Verification("default", classes=[FindingClass.REF_CLAIMED])
    swept("1 second")
    run.run()
    assert run.unswept == 0


def test_a_ref_that_another_source_names_waits_for_no_sweep() -> None:
    source, other = make_source(), bare_source()
    name_ref(source, None)
    name_ref(other, source.credential_ref)
    swept("1 second")
    assert sorted(classes()) == ["ref_misplaced", "ref_unnamed"]
