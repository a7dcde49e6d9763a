"""The actions that decide about refs: erase again, restore, discard, give up."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse

from kfs_credentials.admin import confirm as confirming
from kfs_credentials.models import Attention, RefError, RefState, SecretObject, Source, SourceSecretLifecycleRef
from kfs_credentials.ref_operations import erase_again
from tests.admin.conftest import MakeClient, list_page, page_of
from tests.management.rows import table_contents
from tests.ref_scenes import displaced, made, name, object_of, parked, row_of, unreadable

# The decisions open transactions of their own.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("store")]

REFS = SourceSecretLifecycleRef
SETTLE, ABANDON = "settle_sourcesecretlifecycleref", "abandon_sourcesecretlifecycleref"
ROW_CHANGED = "1 ref was left alone: row changed since you looked at it."
DUE = "1 ref is due for erasure. If no worker is running: manage.py run_secret_cleanup."
REASON = {"reason": "the bucket is gone"}

SCENES: dict[str, Callable[[], str]] = {
    "erase_again": parked,
    "restore": lambda: displaced().other,
    "discard": lambda: displaced().other,
    "abandon": parked,
}
every_decision = pytest.mark.parametrize("decision", SCENES)


def select(client: Client, decision: str, *refs: str, across: bool = False) -> Any:
    """Choose refs in the list and press "Go"; return the confirmation."""
    data = {"action": decision, "index": "0", "select_across": str(int(across))}
    return client.post(list_page(REFS), {**data, "_selected_action": [str(row_of(ref).pk) for ref in refs]})


def confirm(client: Client, confirmation: Any, **answers: str) -> Any:
    """Press the confirmation's button."""
    address = re.search(r'<form action="([^"]*)" [^>]*class="kfs-confirmation"', confirmation.text)
    assert address
    return client.post(address[1], {"rows": rows_of(confirmation), **answers})


def rows_of(confirmation: Any) -> str:
    """Return what the confirmation carries, signed."""
    rows = re.search(r'name="rows" value="([^"]*)"', confirmation.text)
    assert rows
    return html.unescape(rows[1])


def address_of(decision: str) -> str:
    return reverse(f"admin:kfs_credentials_sourcesecretlifecycleref_{decision}")


def told(client: Client) -> list[str]:
    """Return the messages on the next page, which are then gone."""
    return [str(message) for message in client.get(list_page(REFS)).context["messages"]]


@pytest.fixture
def client(client_with: MakeClient) -> Client:
    return client_with(SETTLE, ABANDON)


# What each of them does.


def test_parked_refs_are_erased_again(client: Client) -> None:
    first, second, other = parked(), parked(Attention.RETAINED), parked()
    confirmation = select(client, "erase_again", first, second)
    assert "The objects of these 2 refs will be erased as soon as a worker comes to them." in confirmation.text
    assert first[:25] in confirmation.text
    assert other[:25] not in confirmation.text
    assert not REFS.objects.due(), "nothing happens before"
    assert confirm(client, confirmation)["Location"] == list_page(REFS)
    assert told(client) == ["2 refs are due for erasure. If no worker is running: manage.py run_secret_cleanup."]
    assert {row.credential_ref for row in REFS.objects.due()} == {first, second}
    assert object_of(other).attention == Attention.ERASURE_FAILS


def test_a_displaced_ref_is_restored(client: Client) -> None:
    pair = displaced()
    confirmation = select(client, "restore", pair.other)
    assert "The source of this ref will name it again." in confirmation.text
    assert str(Attention.DISPLACED.label) in confirmation.text
    confirm(client, confirmation)
    assert told(client) == ["1 ref is named by its source again."]
    assert pair.read().credential_ref == pair.other


def test_an_active_ref_is_restored_where_the_source_names_an_unreadable_one(client: Client) -> None:
    pair = unreadable()
    confirm(client, select(client, "restore", pair.other))
    assert told(client) == ["1 ref is named by its source again."]
    assert pair.read().credential_ref == pair.other


def test_a_displaced_ref_is_discarded(client: Client) -> None:
    pair = displaced()
    confirmation = select(client, "discard", pair.other)
    assert "This ref will be erased after the grace, with its credentials." in confirmation.text
    confirm(client, confirmation)
    assert told(client) == ["1 ref will be erased after the grace."]
    assert row_of(pair.other).next_delete_at is not None
    assert pair.read().credential_ref == pair.named


def test_an_erasure_is_given_up_with_a_reason(client: Client) -> None:
    ref = parked()
    confirmation = select(client, "abandon", ref)
    assert "The object of this ref will stay in the secret store, and be recorded as not erased." in confirmation.text
    confirm(client, confirmation, **REASON)
    assert told(client) == ["1 ref is recorded as not erased."]
    assert (row_of(ref).state, row_of(ref).next_delete_at) == (RefState.RETIRED, None)
    stored = object_of(ref)
    assert (stored.abandoned_by, stored.abandoned_reason) == (User.objects.get().username, REASON["reason"])


@pytest.mark.parametrize("reason", [None, "", " \n ", "a\x00b", "x" * 1001])
def test_without_a_reason_it_is_asked_for_again(client: Client, reason: str | None) -> None:
    ref = parked()
    before = table_contents()
    confirmation = select(client, "abandon", ref)
    again = confirm(client, confirmation, **({} if reason is None else {"reason": reason}))
    assert again.status_code == 200
    problems = {
        "a\x00b": "Null characters are not allowed.",
        "x" * 1001: "Ensure this value has at most 1000 characters (it has 1001).",
    }
    problem = problems.get(reason or "", "Give a reason: nothing else will tell why the secret was not erased.")
    assert problem in again.text
    assert ref[:25] in again.text
    assert table_contents() == before
    confirm(client, again, **REASON)
    assert told(client) == ["1 ref is recorded as not erased."]


@every_decision
def test_who_asked_is_in_the_history(decision: str, client: Client) -> None:
    ref = SCENES[decision]()
    confirm(client, select(client, decision, ref), **REASON)
    messages = {
        "erase_again": "Asked for another erasure.",
        "restore": "Asked to restore the ref.",
        "discard": "Asked to discard the displaced ref.",
        "abandon": "Asked to give up on the erasure.",
    }
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.get_change_message()) == (str(row_of(ref).pk), messages[decision])
    assert messages[decision] in client.get(page_of(row_of(ref), "history")).text
    assert ref not in entry.object_repr, "the history is for everybody who may view the row"


# Several at once, and what is out of date.


@every_decision
def test_a_confirmation_that_is_sent_twice_works_once(decision: str, client: Client) -> None:
    confirmation = select(client, decision, SCENES[decision]())
    confirm(client, confirmation, **REASON)
    assert len(told(client)) == 1
    before = table_contents()
    confirm(client, confirmation, **REASON)
    assert told(client) == [ROW_CHANGED]
    assert table_contents() == before


@every_decision
def test_two_tabs(decision: str, client: Client) -> None:
    """Both showed the same ref; it moved on, and came back to where it was, before the second was used."""
    ref = SCENES[decision]()
    first, second = select(client, decision, ref), select(client, decision, ref)
    refs, objects, sources = (list(model.objects.all()) for model in (REFS, SecretObject, Source))
    confirm(client, first, **REASON)
    assert len(told(client)) == 1
    for row in refs:
        row.row_version = row_of(row.credential_ref).row_version
        row.save()
    for stored in objects:
        stored.save()
    for source in sources:
        name(source.pk, source.credential_ref)
    contents = table_contents()
    confirm(client, second, **REASON)
    assert told(client) == [ROW_CHANGED]
    assert table_contents() == contents


def test_every_outcome_is_reported(client: Client) -> None:
    due, changed, gone = (parked() for _ in range(3))
    confirmation = select(client, "erase_again", due, changed, gone)
    REFS.objects.filter(credential_ref=changed).update(row_version=99)
    REFS.objects.filter(credential_ref=gone).delete()
    confirm(client, confirmation)
    assert told(client) == [DUE, ROW_CHANGED, "1 ref is gone."]


@every_decision
def test_a_ref_that_somebody_holds_is_left_alone(decision: str, client: Client) -> None:
    ref = SCENES[decision]()
    confirmation = select(client, decision, ref)
    before = table_contents()
    other = connection.copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SELECT FROM source_secret_lifecycle_refs WHERE credential_ref = %s FOR UPDATE", [ref])
        confirm(client, confirmation, **REASON)
    finally:
        other.close()
    assert told(client) == [ROW_CHANGED]
    assert table_contents() == before


NOTHING_TO_DECIDE = {
    "erase_again": "None of the selected refs is parked. Only a ref whose erasure failed can be erased again.",
    "restore": "None of the selected refs can be restored. That takes a displaced ref, or an active one whose source "
    "names a ref that is not in use.",
    "discard": "None of the selected refs can be discarded. That takes a displaced ref which no source names.",
    "abandon": "None of the selected refs can be given up. That takes a ref whose erasure failed, and which no source "
    "names.",
}


@every_decision
def test_refs_that_there_is_nothing_to_decide_about(decision: str, client: Client) -> None:
    active, chosen = made().credential_ref, SCENES[decision]()
    assert active
    select(client, decision, active)
    assert told(client) == [NOTHING_TO_DECIDE[decision]]
    confirmation = select(client, decision, active, chosen)
    assert chosen[:25] in confirmation.text
    assert active[:25] not in confirmation.text


def test_a_ref_that_a_source_names_cannot_be_given_up(client: Client) -> None:
    ref = parked()
    name(made().pk, ref)
    select(client, "abandon", ref)
    assert told(client)[0].startswith("None of the selected refs can be given up.")


def test_more_refs_than_can_be_shown(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confirming, "MOST_ROWS", 2)
    refs = [parked() for _ in range(3)]
    select(client, "erase_again", refs[0], across=True)
    assert told(client) == [
        "At most 2 refs can be decided about at once here. Filter the list, or select fewer of them."
    ]
    monkeypatch.setattr(confirming, "MOST_ROWS", 3)
    confirm(client, select(client, "erase_again", refs[0], across=True))
    assert len(REFS.objects.due()) == 3


# Who may, and from where.


@every_decision
def test_without_the_permission(decision: str, client: Client, client_with: MakeClient) -> None:
    ref = SCENES[decision]()
    others = client_with(SETTLE if decision == "abandon" else ABANDON)
    assert f'value="{decision}"' in client.get(list_page(REFS)).text
    assert f'value="{decision}"' not in others.get(list_page(REFS)).text
    assert "kfs-confirmation" not in select(others, decision, ref).text
    confirmation = select(client, decision, ref)
    before = table_contents()
    assert confirm(others, confirmation, **REASON).status_code == 403
    assert table_contents() == before


def test_who_may_decide_but_not_view_cannot_decide(client: Client) -> None:
    ref = parked()
    confirmation = select(client, "erase_again", ref)
    user = User.objects.get()
    user.user_permissions.remove(user.user_permissions.get(codename="view_sourcesecretlifecycleref"))
    assert confirm(client, confirmation).status_code == 403
    assert not REFS.objects.due()


@pytest.mark.parametrize(
    ("seen", "sent"),
    [("erase_again", "abandon"), ("abandon", "erase_again"), ("restore", "discard"), ("discard", "restore")],
)
def test_the_confirmation_of_one_decision_is_none_of_another(seen: str, sent: str, client: Client) -> None:
    confirmation = select(client, seen, SCENES[seen]())
    before = table_contents()
    client.post(address_of(sent), {"rows": rows_of(confirmation), **REASON})
    assert told(client) == ["This confirmation cannot be read. Select the rows again."]
    assert table_contents() == before


@every_decision
def test_following_a_link_to_the_confirmation_does_nothing(decision: str, client: Client) -> None:
    rows, address = rows_of(select(client, decision, SCENES[decision]())), address_of(decision)
    before = table_contents()
    assert client.get(address, {"rows": rows, **REASON})["Location"] == list_page(REFS)
    assert told(client) == []
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = client.cookies
    assert strict.post(address, {"rows": rows, **REASON}).status_code == 403
    assert table_contents() == before


@every_decision
def test_requests_in_transactions(decision: str, client: Client) -> None:
    """With ATOMIC_REQUESTS everything else of a request is one transaction; a decision needs its own."""
    ref = SCENES[decision]()
    before = row_of(ref).row_version
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        confirm(client, select(client, decision, ref), **REASON)
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert len(told(client)) == 1
    assert row_of(ref).row_version == before + 1


def test_a_decision_that_the_database_refuses_says_why(client: Client) -> None:
    ref = parked()
    confirmation = select(client, "abandon", ref)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE kfs_credentials_secret_object ADD CONSTRAINT no CHECK (abandoned_at IS NULL)")
    try:
        confirm(client, confirmation, **REASON)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE kfs_credentials_secret_object DROP CONSTRAINT no")
    assert told(client) == [
        "That stopped: CheckViolation, SQLSTATE 23514. What was done before it stays done. Select the others again."
    ]
    assert row_of(ref).last_error_code == RefError.NEEDS_ATTENTION


@every_decision
def test_a_confirmation_shows_refs_in_full_to_who_may_see_them(
    decision: str, client: Client, client_with: MakeClient
) -> None:
    ref = SCENES[decision]()
    text = select(client, decision, ref).text
    assert ref not in text
    assert f"{ref[:25]}…" in text
    assert ref in select(client_with(SETTLE, ABANDON, "view_full_ref"), decision, ref).text


def test_nobody_asks_the_store(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from kfs_credentials.stores import secret_stores

    refs = {decision: scene() for decision, scene in SCENES.items()}

    def refuse(self: Any, alias: str) -> None:
        raise AssertionError("a decision asked for a store")

    monkeypatch.setattr(type(secret_stores), "__getitem__", refuse)
    for decision, ref in refs.items():
        confirm(client, select(client, decision, ref), **REASON)
        assert len(told(client)) == 1


# The page of a ref.


def tools(client: Client, ref: str) -> list[str]:
    """Return which decisions the page of a ref offers."""
    text = client.get(page_of(row_of(ref))).text
    forms = re.findall(r'class="kfs-tool">(.*?)</form>', text, re.DOTALL)
    return [found[1] for form in forms if (found := re.search(r'name="action" value="([^"]*)"', form))]


def test_the_page_offers_what_can_be_decided(client: Client, client_with: MakeClient) -> None:
    active, lost, waiting, failing = made().credential_ref, unreadable(), displaced(), parked()
    assert active
    assert tools(client, active) == []
    assert tools(client, lost.other) == ["restore"]
    assert tools(client, lost.named) == []
    assert tools(client, waiting.other) == ["restore", "discard"]
    assert tools(client, failing) == ["erase_again", "abandon"]
    assert tools(client_with(SETTLE), failing) == ["erase_again"]
    assert tools(client_with(), failing) == []


def test_the_buttons_on_the_page_of_a_ref(client: Client) -> None:
    ref = parked()
    form = client.get(page_of(row_of(ref))).text.partition('class="kfs-tool"')[2].partition("</form>")[0]
    fields = dict(re.findall(r'name="([^"]*)" value="([^"]*)"', form))
    fields.pop("csrfmiddlewaretoken", None)
    confirm(client, client.post(list_page(REFS), fields))
    assert told(client) == [DUE]


def test_what_became_of_an_erasure_is_shown(client: Client) -> None:
    ref = parked()
    confirm(client, select(client, "abandon", ref), reason="see https://user:pass@host and Bearer abc")
    SecretObject.objects.filter(pk=ref).update(receipt="absent", first_erased_at="2025-03-04T15:06:07Z")
    text = client.get(page_of(row_of(ref))).text
    shown = dict(re.findall(r'field-(\w+)">.*?<div class="readonly">(.*?)</div>', text, re.DOTALL))
    assert shown["receipt"] == "already absent"
    assert shown["first_erased_at"].startswith("March 4, 2025")
    assert shown["first_claimed_at"] != "-"
    assert shown["abandoned_by"] == User.objects.get().username
    assert shown["abandoned_reason"] == "see https://[hidden]@host and Bearer [hidden]"
    assert "the object was not erased. (SOURCE_SECRET_ABANDONED)" in shown["error"]
    assert shown["shown_attention"] == "-"


def test_a_stale_list_after_somebody_elses_decision(client: Client) -> None:
    ref = parked()
    confirmation = select(client, "abandon", ref)
    erase_again("default", [(row_of(ref).pk, None)])
    confirm(client, confirmation, **REASON)
    assert told(client) == [ROW_CHANGED]
    assert object_of(ref).abandoned_at is None
