"""Every page that the admin has for our models: by links, by forms, and at addresses that nobody links to."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.test import Client
from django.urls import Resolver404, resolve, reverse

from tests.admin.conftest import list_page, page_of

OURS = "/admin/kfs_credentials/"
MODELS = tuple(apps.get_app_config("kfs_credentials").get_models())
CONFIRMATION = re.compile(
    r'<form action="([^"]*)" method="post" class="kfs-confirmation">.*?name="rows" value="([^"]*)"', re.DOTALL
)


@dataclass
class Crawl:
    """The pages that one user has seen, by address and by how they were asked for."""

    client: Client
    pages: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """Of the URL patterns that were asked for."""

    def follow_links(self) -> None:
        """Ask for every page of ours that links lead to; all of them can be drawn."""
        waiting = [reverse("admin:index"), reverse("admin:app_list", args=["kfs_credentials"]), *map(list_page, MODELS)]
        filtered: set[str] = set()
        while waiting:
            address = waiting.pop()
            # A page that was reached by way of a filter differs in its links back: one filter is enough.
            page, by_filter, _ = address.partition("?_changelist_filters=")
            if address in self.pages or (page in filtered and by_filter):
                continue
            if by_filter:
                filtered.add(page)
            text = self.get(address)
            for link in re.findall(r'href="([^"]*)"', text):
                link = html.unescape(link)
                if link.startswith("?"):
                    link = address.partition("?")[0] + link
                # One filter or search at a time: all of them together are thousands of pages.
                if link.startswith(OURS) and "&" not in link:
                    waiting.append(link)

    def submit_forms(self) -> int:
        """Choose each action for all rows, then confirm each, at first without what is asked; return how many."""
        chosen = [
            CONFIRMATION.search(self.post(address, action=action, _selected_action=ids))
            for address in map(list_page, MODELS)
            for action, ids in self._actions(self.pages[address])
        ]
        confirmations = [(found[1], html.unescape(found[2])) for found in chosen if found]
        for target, rows in confirmations:
            self.post(target, rows=rows)
            self.post(target, rows=rows, reason="the reason")
            self.post(target, rows="not signed")
        return len(confirmations)

    def try_addresses(self, row: Any) -> None:
        """Ask for what no link leads to: pages that are refused or missing, popups, searches, and a page of one row."""
        name = f"admin:kfs_credentials_{row._meta.model_name}"
        for kind in ("change", "delete", "history"):
            self.get(page_of(row, kind), 200, 403)
        self.get(reverse(f"{name}_add"), 403)
        self.get(page_of(row) + "?_popup=1&_to_field=id", 200, 400)
        self.get(list_page(type(row), "?_popup=1"))
        self.get(list_page(type(row), f"?q={row.pk}"))
        self.get(list_page(type(row), "?e=1"))
        self.get(list_page(type(row), "?metadata__contains=x"), 400)
        self.get(f"{list_page(type(row))}no-such-row/change/", 200, 404)
        self.post(page_of(row), 403, name="other")
        self.get(page_of(row).removesuffix("change/"), 200)  # a redirect of old

    def get(self, address: str, *codes: int) -> str:
        """Ask for a page, and keep it; `codes`: the answers that will do."""
        return self._keep("", address, self.client.get(address, follow=True), codes)

    def post(self, address: str, *codes: int, **fields: Any) -> str:
        """Submit a form, and keep the page that comes of it."""
        how = f"POST {fields.get('action', '')} {len(fields)} "
        return self._keep(how, address, self.client.post(address, fields, follow=True), codes)

    def unseen(self) -> set[str]:
        """Return the names of the URL patterns of our models' admins that were not asked for."""
        registered = {
            str(pattern.name)
            for model in MODELS
            for pattern in admin.site._registry[model].get_urls()
            if pattern.name is not None
        }
        return registered - self.names

    def _keep(self, how: str, address: str, response: Any, codes: tuple[int, ...]) -> str:
        assert response.status_code in (codes or (200,)), (response.status_code, how, address)
        for visited in (address, *(to for to, _ in response.redirect_chain)):
            try:
                self.names.add(resolve(visited.partition("?")[0]).url_name or "")
            except Resolver404:
                continue
        text: str = response.text
        self.pages[how + address] = text
        return text

    def _actions(self, page: str) -> Iterator[tuple[str, list[str]]]:
        """Yield the actions that a list offers, each with the ids of its rows."""
        select = re.search(r'<select name="action".*?</select>', page, re.DOTALL)
        ids = re.findall(r'name="_selected_action" value="([^"]*)"', page)
        for action in re.findall(r'<option value="([^"]+)"', select[0]) if select else []:
            yield action, ids
