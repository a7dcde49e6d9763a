"""What a person decides about rows: select in the list, confirm, done.

The confirmation carries the row versions that it showed, signed, so it does nothing when it is out of date or sent
twice.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from django import forms
from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import label_for_field
from django.core import signing
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import DatabaseError, InterfaceError, transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext

from kfs_credentials.admin.base import ReadOnlyAdmin
from kfs_credentials.audit import acting_as
from kfs_credentials.errors import KfsCredentialsError
from kfs_credentials.transactions import describe

MOST_ROWS = 1000
"""How many rows can be decided about at once."""

Rows = list[tuple[uuid.UUID, int]]


class Outcome(NamedTuple):
    """How many rows became what, in a text with `%(count)d`, and how the message looks."""

    number: int
    text: str
    level: int = messages.SUCCESS


class Decision:
    """One thing to decide about rows of a table. A subclass says what, and in which words.

    An admin has an action of the same name, which calls `DecidingAdmin.ask`, and `has_<permission>_permission`.
    """

    name: ClassVar[str]
    permission: ClassVar[str]
    button: ClassVar[Any]
    title: ClassVar[Any]
    none_selected: ClassVar[Any]
    too_many: ClassVar[Any]
    """With `%(most)d`."""
    stopped: ClassVar[Any]
    """With `%(problem)s`."""
    logged: ClassVar[Any]
    form: ClassVar[type[forms.Form]] = forms.Form
    """What is asked besides."""

    @property
    def salt(self) -> str:
        """Of the signature: the confirmation of one decision is none of another."""
        return f"kfs_credentials.admin.{self.name}"

    def among(self, rows: Any) -> QuerySet[Any]:
        """Return those of the rows that this can be decided about."""
        raise NotImplementedError

    def question(self, count: int) -> str:
        """Return what will happen to so many rows."""
        raise NotImplementedError

    def decide(self, using: str, rows: Rows, *, by: str, answers: Mapping[str, Any]) -> Any:
        """Do it, in transactions of its own, and return what became of the rows."""
        raise NotImplementedError

    def outcomes(self, result: Any) -> Iterator[Outcome]:
        """Say what became of the rows; what became of none is left out by the caller."""
        raise NotImplementedError


class DecidingAdmin(ReadOnlyAdmin):
    """Rows that something can be decided about; nothing else changes them."""

    decisions: ClassVar[Sequence[Decision]]
    confirmation_columns: ClassVar[Sequence[str]]
    """What a confirmation shows of each row."""

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """Return our actions alone: one that the host adds to its site is not for these rows.

        `action_location` is what Django 6.1 and later give.
        """
        location = {} if action_location is None else {"action_location": action_location}
        ours = {decision.name for decision in self.decisions}
        actions = super().get_actions(request, **location)
        return {name: action for name, action in actions.items() if name in ours}

    def get_urls(self) -> list[URLPattern]:
        """Add the addresses of the confirmations."""
        confirmed = [
            path(f"{one.name}/", self.admin_site.admin_view(self._confirmed(one)), name=self._address(one))
            for one in self.decisions
        ]
        return [*confirmed, *super().get_urls()]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Offer on the page of a row what can be decided about it."""
        context["decisions"] = self._possible(request, kwargs.get("obj"))
        return super().render_change_form(request, context, *args, **kwargs)

    def ask(self, request: HttpRequest, queryset: QuerySet[Any], decision: Decision) -> HttpResponse | None:
        """Ask for confirmation, with the selected rows as they are now."""
        rows = list(decision.among(queryset)[: MOST_ROWS + 1])
        if not rows:
            self.message_user(request, str(decision.none_selected), messages.WARNING)
            return None
        if len(rows) > MOST_ROWS:
            self.message_user(request, decision.too_many % {"most": MOST_ROWS}, messages.ERROR)
            return None
        seen = signing.dumps([(str(row.pk), row.row_version) for row in rows], salt=decision.salt, compress=True)
        return self._confirmation(request, decision, rows, seen, decision.form())

    def confirmed_view(self, request: HttpRequest, decision: Decision) -> HttpResponse:
        """Do what was confirmed, and say what became of the rows."""
        if not (self.has_view_permission(request) and self._may(request, decision)):
            raise PermissionDenied
        if request.method == "POST":
            try:
                seen = signing.loads(request.POST.get("rows", ""), salt=decision.salt)
            except signing.BadSignature:
                unreadable = gettext("This confirmation cannot be read. Select the rows again.")
                self.message_user(request, unreadable, messages.ERROR)
            else:
                rows = [(uuid.UUID(row), version) for row, version in seen]
                form = decision.form(request.POST)
                if not form.is_valid():
                    again = list(self.get_queryset(request).filter(pk__in=dict(rows)))
                    return self._confirmation(request, decision, again, request.POST["rows"], form)
                self._decide(request, decision, rows, form.cleaned_data)
        list_page = reverse(self._page(self.model, "changelist"), current_app=self.admin_site.name)
        return HttpResponseRedirect(list_page)

    def _confirmed(self, decision: Decision) -> Callable[[HttpRequest], HttpResponse]:
        # A decision opens transactions of its own, and so must not run in one of ATOMIC_REQUESTS.
        @transaction.non_atomic_requests(using=self.using)
        def confirmed(request: HttpRequest) -> HttpResponse:
            return self.confirmed_view(request, decision)

        return confirmed

    def _confirmation(
        self, request: HttpRequest, decision: Decision, rows: Sequence[Any], seen: str, form: forms.Form
    ) -> HttpResponse:
        context = {
            **self.admin_site.each_context(request),
            "title": decision.title,
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "decision": decision,
            "address": reverse(f"admin:{self._address(decision)}", current_app=self.admin_site.name),
            "question": decision.question(len(rows)),
            "headings": [label_for_field(column, self.model, self) for column in self.confirmation_columns],
            "lines": [[self._cell(row, column) for column in self.confirmation_columns] for row in rows],
            "rows": seen,
            "form": form,
        }
        request.current_app = self.admin_site.name  # as every view of the admin does
        return TemplateResponse(request, "admin/kfs_credentials/confirmation.html", context)

    def _cell(self, row: Any, column: str) -> Any:
        return getattr(self, column)(row) if hasattr(self, column) else getattr(row, column)

    def _decide(self, request: HttpRequest, decision: Decision, rows: Rows, answers: Mapping[str, Any]) -> None:
        try:
            by = request.user.get_username()
            with acting_as(f"user:{by}"):
                result = decision.decide(self.using, rows, by=by, answers=answers)
        except (DatabaseError, InterfaceError) as error:
            problem = f"{describe(error)}."
        except (KfsCredentialsError, ImproperlyConfigured) as error:
            problem = str(error)
        else:
            for number, text, level in decision.outcomes(result):
                if number:
                    self.message_user(request, text % {"count": number}, level)
            about = self.get_queryset(request).filter(pk__in=dict(rows))
            LogEntry.objects.log_actions(str(request.user.pk), about, CHANGE, str(decision.logged))
            return
        self.message_user(request, decision.stopped % {"problem": problem}, messages.ERROR)

    def _may(self, request: HttpRequest, decision: Decision) -> bool:
        allowed: bool = getattr(self, f"has_{decision.permission}_permission")(request)
        return allowed

    def _possible(self, request: HttpRequest, row: Any) -> list[Decision]:
        """Return what this user can decide about a row. One query."""
        allowed = [decision for decision in self.decisions if self._may(request, decision)]
        if row is None or not allowed:
            return []
        rows = self.get_queryset(request)
        this = rows.filter(pk=OuterRef("pk"))
        possible = {decision.name: Exists(decision.among(this)) for decision in allowed}
        found = rows.filter(pk=row.pk).values(**possible).first() or {}
        return [decision for decision in allowed if found.get(decision.name)]

    def _address(self, decision: Decision) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{decision.name}"
