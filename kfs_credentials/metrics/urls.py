"""Mounts the view as it is, for a project that protects what is below a path: see `kfs_credentials.metrics`."""

from __future__ import annotations

from django.urls import path

from kfs_credentials.metrics.views import metrics_view

app_name = "kfs_credentials_metrics"
urlpatterns = [path("", metrics_view, name="metrics")]
