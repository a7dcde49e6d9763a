"""What a person decides about refs; see `kfs_credentials.ref_operations`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from kfs_credentials import ref_operations
from kfs_credentials.admin.confirm import Decision, Outcome, Rows
from kfs_credentials.ref_operations import RefResult


class RefDecision(Decision):
    """What all of them have in common."""

    permission = "settle"
    too_many = _("At most %(most)d refs can be decided about at once here. Filter the list, or select fewer of them.")
    stopped = _("That stopped: %(problem)s What was done before it stays done. Select the others again.")

    def done(self, count: int) -> str:
        """Return what became of so many refs, with `%(count)d`."""
        raise NotImplementedError

    def outcomes(self, result: RefResult) -> Iterator[Outcome]:
        """Say what became of the refs."""
        changed = ngettext(
            "%(count)d ref was left alone: row changed since you looked at it.",
            "%(count)d refs were left alone: rows changed since you looked at them.",
            result.changed,
        )
        missing = ngettext("%(count)d ref is gone.", "%(count)d refs are gone.", result.missing)
        yield Outcome(result.done, self.done(result.done))
        yield Outcome(result.changed, changed, messages.WARNING)
        yield Outcome(result.missing, missing, messages.WARNING)


class EraseAgain(RefDecision):
    """To try a failed erasure again at once."""

    name = "erase_again"
    button = _("Erase again")
    title = _("Erase again")
    none_selected = _("None of the selected refs is parked. Only a ref whose erasure failed can be erased again.")
    logged = _("Asked for another erasure.")

    def among(self, rows: Any) -> QuerySet[Any]:
        """Return the parked ones."""
        return ref_operations.parked(rows)

    def question(self, count: int) -> str:
        """Return what will happen to so many refs."""
        text = ngettext(
            "The object of this ref will be erased as soon as a worker comes to it. If the cause of the failure is "
            "not gone, that will fail again.",
            "The objects of these %(count)d refs will be erased as soon as a worker comes to them. If the cause of a "
            "failure is not gone, that will fail again.",
            count,
        )
        return text % {"count": count}

    def decide(self, using: str, rows: Rows, *, by: str, answers: Mapping[str, Any]) -> RefResult:
        """Let them be due."""
        return ref_operations.erase_again(using, rows)

    def done(self, count: int) -> str:
        """Return that they are due."""
        return ngettext(
            "%(count)d ref is due for erasure. If no worker is running: manage.py run_secret_cleanup.",
            "%(count)d refs are due for erasure. If no worker is running: manage.py run_secret_cleanup.",
            count,
        )


class Restore(RefDecision):
    """To let a source name this ref again instead of another."""

    name = "restore"
    button = _("Restore")
    title = _("Restore refs")
    none_selected = _(
        "None of the selected refs can be restored. That takes a displaced ref, or an active one whose source names "
        "a ref that is not in use."
    )
    logged = _("Asked to restore the ref.")

    def among(self, rows: Any) -> QuerySet[Any]:
        """Return those that their sources could name again."""
        return ref_operations.restorable(rows)

    def question(self, count: int) -> str:
        """Return what will happen to so many refs."""
        text = ngettext(
            "The source of this ref will name it again. The ref that the source names now will be erased after the "
            "grace, with its credentials.",
            "The sources of these %(count)d refs will name them again. The refs that the sources name now will be "
            "erased after the grace, with their credentials.",
            count,
        )
        return text % {"count": count}

    def decide(self, using: str, rows: Rows, *, by: str, answers: Mapping[str, Any]) -> RefResult:
        """Let their sources name them."""
        return ref_operations.restore(using, rows)

    def done(self, count: int) -> str:
        """Return that their sources name them."""
        return ngettext(
            "%(count)d ref is named by its source again.", "%(count)d refs are named by their sources again.", count
        )


class Discard(RefDecision):
    """To let a displaced ref go."""

    name = "discard"
    button = _("Discard")
    title = _("Discard displaced refs")
    none_selected = _("None of the selected refs can be discarded. That takes a displaced ref which no source names.")
    logged = _("Asked to discard the displaced ref.")

    def among(self, rows: Any) -> QuerySet[Any]:
        """Return the displaced ones."""
        return ref_operations.discardable(rows)

    def question(self, count: int) -> str:
        """Return what will happen to so many refs."""
        text = ngettext(
            "This ref will be erased after the grace, with its credentials. Its source keeps the ref that it names "
            "now.",
            "These %(count)d refs will be erased after the grace, with their credentials. Their sources keep the refs "
            "that they name now.",
            count,
        )
        return text % {"count": count}

    def decide(self, using: str, rows: Rows, *, by: str, answers: Mapping[str, Any]) -> RefResult:
        """Let them be erased."""
        return ref_operations.discard(using, rows)

    def done(self, count: int) -> str:
        """Return that they will be erased."""
        return ngettext(
            "%(count)d ref will be erased after the grace.", "%(count)d refs will be erased after the grace.", count
        )


class Reason(forms.Form):
    """Why an erasure is given up."""

    reason = forms.CharField(
        label=_("Reason"),
        max_length=1000,
        widget=forms.Textarea(attrs={"rows": 3, "cols": 80}),
        help_text=_("Everybody who may view the ref can read this: write no secret here."),
        error_messages={"required": _("Give a reason: nothing else will tell why the secret was not erased.")},
    )


class Abandon(RefDecision):
    """To give up on an erasure that fails."""

    name = "abandon"
    permission = "abandon"
    button = _("Give up")
    title = _("Give up on erasures")
    none_selected = _(
        "None of the selected refs can be given up. That takes a ref whose erasure failed, and which no source names."
    )
    logged = _("Asked to give up on the erasure.")
    form = Reason

    def among(self, rows: Any) -> QuerySet[Any]:
        """Return the parked ones that no source names."""
        return ref_operations.abandonable(rows)

    def question(self, count: int) -> str:
        """Return what will happen to so many refs."""
        text = ngettext(
            "The object of this ref will stay in the secret store, and be recorded as not erased. No worker will try "
            "to erase it again.",
            "The objects of these %(count)d refs will stay in the secret store, and be recorded as not erased. No "
            "worker will try to erase them again.",
            count,
        )
        return text % {"count": count}

    def decide(self, using: str, rows: Rows, *, by: str, answers: Mapping[str, Any]) -> RefResult:
        """Record them as not erased."""
        return ref_operations.abandon(using, rows, by=by, reason=answers["reason"])

    def done(self, count: int) -> str:
        """Return that they are recorded."""
        return ngettext("%(count)d ref is recorded as not erased.", "%(count)d refs are recorded as not erased.", count)


ERASE_AGAIN, RESTORE, DISCARD, ABANDON = EraseAgain(), Restore(), Discard(), Abandon()
