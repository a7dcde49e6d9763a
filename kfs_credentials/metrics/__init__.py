"""Metrics for Prometheus: `manage.py credential_status --format prometheus`, and a view that a project may mount.

    path("metrics/credentials", staff_member_required(metrics_view))

The view asks nobody who they are: whoever mounts it protects it, by a decorator, a network or a proxy. What it shows
are counts and ages of the whole database, never whose they are. Needs `pip install 'kfs-credentials[prometheus]'`.
"""

from __future__ import annotations

from kfs_credentials.metrics.exposition import CONTENT_TYPE, render
from kfs_credentials.metrics.families import FAMILIES, Family, Metrics, read_metrics
from kfs_credentials.metrics.views import metrics_view

__all__ = ["CONTENT_TYPE", "FAMILIES", "Family", "Metrics", "metrics_view", "read_metrics", "render"]
