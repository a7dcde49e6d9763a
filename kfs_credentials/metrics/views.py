"""The view that a project may mount."""

from __future__ import annotations

from django.db import DatabaseError, InterfaceError, router, transaction
from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from kfs_credentials.metrics.exposition import CONTENT_TYPE, render
from kfs_credentials.metrics.families import read_metrics
from kfs_credentials.models import Source
from kfs_credentials.transactions import describe


@transaction.non_atomic_requests  # it reads one snapshot, in a transaction of its own
@never_cache
@require_safe
def metrics_view(request: HttpRequest) -> HttpResponse:  # noqa: ARG001 - whoever asks
    """Return the metrics of the database that the sources are written to; 503 if it is out of reach.

    Asks nobody who they are. Raises `ImproperlyPrepared` if the package prometheus_client is not installed.
    """
    try:
        metrics = read_metrics(router.db_for_write(Source))
    except (DatabaseError, InterfaceError) as error:
        problem = f"The database did not answer ({describe(error)}).\n"
    else:
        return HttpResponse(render(metrics), content_type=CONTENT_TYPE)
    # Out here the error is gone: its text may hold a row.
    return HttpResponse(problem, status=503, content_type="text/plain; charset=utf-8")
