"""Fixtures: databases of host applications."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from pytest_django import DjangoDbBlocker

from .catalog import Catalog, catalog
from .hosts import Host, throw_away

MakeHost = Callable[..., Host]
CatalogOf = Callable[..., Catalog]


@pytest.fixture
def make_host(django_db_blocker: DjangoDbBlocker) -> Iterator[MakeHost]:
    """Make a database from scripts: `make_host(BASE, SEED)`, and a second one with `alias="twin"`."""
    with django_db_blocker.unblock(), ExitStack() as at_end:

        def make(*scripts: str, alias: str = "host", **database: Any) -> Host:
            host = at_end.enter_context(throw_away(alias, **database))
            host.run(*scripts)
            return host

        yield make


@pytest.fixture
def host(make_host: MakeHost) -> Host:
    """An empty database."""
    return make_host()


@pytest.fixture(scope="session")
def catalog_of(django_db_blocker: DjangoDbBlocker) -> CatalogOf:
    """Return the catalog that scripts leave in an empty database: `catalog_of(BASE, SEED)`."""

    @cache
    def read(*scripts: str) -> Catalog:
        with django_db_blocker.unblock(), throw_away("scripted") as host:
            host.run(*scripts)
            return catalog(host)

    return read
