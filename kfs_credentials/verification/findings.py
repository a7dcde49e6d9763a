"""What can be found, each with what to do about it; and a collection of findings that stays small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import models
from django.utils.translation import gettext_lazy as _

from kfs_credentials.crypto import validate_ref
from kfs_credentials.errors import InvalidRef
from kfs_credentials.redaction import short_ref

LISTED = 1000
"""The most findings of a class that are kept, and listed. All of them are counted."""


class FindingClass(models.TextChoices):
    """What can be wrong. The values are stable: scripts read them."""

    # Sources that name a ref.
    REF_UNKNOWN = "ref_unknown", _("a source names a ref that the ledger does not know")
    REF_MISPLACED = "ref_misplaced", _("a source names another source's ref")
    REF_NOT_ACTIVE = "ref_not_active", _("a source names a ref that is not active")
    PLAINTEXT_SAME = "plaintext_same", _("a source has a ref, and the same value in clear")
    PLAINTEXT_DIFFERS = "plaintext_differs", _("a source has a ref, and another value in clear")
    PLAINTEXT_NOT_COMPARED = "plaintext_not_compared", _("a source has a ref that cannot be read, and a value in clear")
    # The ledger.
    REF_UNNAMED = "ref_unnamed", _("a ref is active, and its source does not name it")
    REF_CLAIMED = "ref_claimed", _("a ref is in use, and was claimed for erasure before")
    REF_UNDATED = "ref_undated", _("a ref is retired, and its erasure has no time")
    REF_STUCK = "ref_stuck", _("a ref is not final, and its time never comes, or nobody can claim it within a day")
    ERASURE_UNPROVED = "erasure_unproved", _("a ref counts as erased for good, and no erasure was noted")
    # Jobs.
    JOB_IN_CLEAR = "job_in_clear", _("a job has succeeded, and its source has credentials in clear")
    JOB_CANDIDATE_LEFT = "job_candidate_left", _("a job is over, and its candidate is still reserved")
    JOB_CANDIDATE_LOST = "job_candidate_lost", _("a job is not over, and its candidate is not reserved")
    JOB_STUCK = "job_stuck", _("a job is not over, and nobody can claim it within a day")
    JOB_UNEXPLAINED = "job_unexplained", _("a job has failed without a code")
    # What lies in clear.
    UNSUPPORTED = "unsupported", _("credentials that are no object, which nobody has acknowledged")
    METADATA = "metadata", _("what looks like a secret, in metadata outside of credentials")
    METADATA_NOT_READ = "metadata_not_read", _("metadata that was not looked through")
    HISTORY_COPY = "history_copy", _("another table has credentials in clear")
    # The store: with --deep.
    OBJECT_MISSING = "object_missing", _("a ref is in use, and the store has nothing under it")
    OBJECT_DAMAGED = "object_damaged", _("an object is not what was put")
    OBJECT_KEY_UNKNOWN = "object_key_unknown", _("an object is sealed under a key that is not in KEYS")
    OBJECT_UNREADABLE = "object_unreadable", _("an object cannot be read")
    OBJECT_SIZE = "object_size", _("an object has another size than what was put")
    OBJECT_UNKNOWN = "object_unknown", _("an object has no row in the ledger")
    OBJECT_UNREGISTERED = "object_unregistered", _("an object has no row in the ledger, and a source names its ref")
    OBJECT_OF_FINAL = "object_of_final", _("an object is there, and its ref counts as erased for good")


class Finding(NamedTuple):
    """One of them. `ref` is None where there is none, `detail` a state, a shape, a path, a name; never a value."""

    what: FindingClass
    tenant: str | None = None
    source: str | None = None
    ref: str | None = None
    detail: str = ""

    @property
    def shown_ref(self) -> str:
        """The ref's start; nothing of what is no ref, which may be anything, a secret too."""
        return "" if self.ref is None else short_ref(self.ref) if _is_ref(self.ref) else NOT_A_REF

    def as_json(self) -> dict[str, Any]:
        """Return it for `--format json`, with the whole ref."""
        ref = self.ref if self.ref is None or _is_ref(self.ref) else NOT_A_REF
        return {
            "class": self.what.value,
            "tenant": self.tenant,
            "source": self.source,
            "ref": ref,
            "detail": self.detail,
        }


NOT_A_REF = "(not a ref: it is not shown)"


def _is_ref(ref: str) -> bool:
    try:
        validate_ref(ref)
    except InvalidRef:
        return False
    return True


@dataclass
class Findings:
    """Counts of all findings, and the first LISTED of each class."""

    counts: Counter[FindingClass] = field(default_factory=Counter)
    kept: dict[FindingClass, list[Finding]] = field(default_factory=dict)

    def add(self, finding: Finding) -> None:
        """Count it, and keep it if there is room."""
        self.counts[finding.what] += 1
        kept = self.kept.setdefault(finding.what, [])
        if len(kept) < LISTED:
            kept.append(finding)

    def listed(self, most: int = LISTED) -> Iterable[Finding]:
        """Yield the first `most` of each class, in the order of the classes."""
        for what in FindingClass:
            yield from self.kept.get(what, [])[:most]

    @property
    def total(self) -> int:
        """How many there are."""
        return self.counts.total()


def what_to_do(finding: Finding, command: Callable[[str], str]) -> str:
    """Return what a person does about a finding. `command`: makes of `run_secret_cleanup` how to call it."""
    match finding.what:
        case FindingClass.PLAINTEXT_SAME:
            return command("verify_credentials --scrub-same")
        case FindingClass.PLAINTEXT_DIFFERS | FindingClass.PLAINTEXT_NOT_COMPARED:
            return f"{command(f'settle_credential_conflict --source {finding.source} --keep ref')}, or --keep plaintext"
        case FindingClass.REF_UNKNOWN | FindingClass.REF_NOT_ACTIVE | FindingClass.REF_UNNAMED:
            return command("run_secret_cleanup --due")
        case FindingClass.REF_UNDATED | FindingClass.JOB_CANDIDATE_LEFT | FindingClass.OBJECT_UNREGISTERED:
            return command("run_secret_cleanup --due")
        case FindingClass.OBJECT_OF_FINAL | FindingClass.ERASURE_UNPROVED:
            return command("run_secret_cleanup")
        case FindingClass.REF_MISPLACED:
            return "correct the source's row: rotate_credentials gives it a ref of its own"
        case FindingClass.REF_CLAIMED:
            return "rotate_credentials gives the source a fresh ref, with what resolve_credentials returns"
        case FindingClass.JOB_IN_CLEAR | FindingClass.JOB_CANDIDATE_LOST:
            return command("run_credential_backfill")
        case FindingClass.REF_STUCK | FindingClass.JOB_STUCK:
            return "correct the times of this row: somebody has edited it, or the database's clock was wrong"
        case FindingClass.JOB_UNEXPLAINED:
            return command(f"retry_credential_backfill {finding.source}")
        case FindingClass.UNSUPPORTED:
            return command(f"settle_unsupported_credentials {finding.source} --wrap KEY")
        case FindingClass.METADATA | FindingClass.METADATA_NOT_READ:
            return "look at it: a secret belongs into metadata.credentials; `--skip metadata` leaves this class out"
        case FindingClass.HISTORY_COPY:
            return "remove it there; `--skip history_copy` leaves this class out"
        case FindingClass.OBJECT_MISSING | FindingClass.OBJECT_DAMAGED:
            return "restore this object from a backup of the store, or enter the credentials anew: rotate_credentials"
        case FindingClass.OBJECT_KEY_UNKNOWN:
            return "put this key back into KFS_CREDENTIALS['KEYS'], behind the others"
        case FindingClass.OBJECT_UNREADABLE | FindingClass.OBJECT_SIZE:
            return "find out why, or enter the credentials anew: rotate_credentials"
        case FindingClass.OBJECT_UNKNOWN:
            return (
                "find out whose it is (another database that uses this store?); then "
                f"{command('verify_credentials --deep --erase-unknown')}"
            )
