"""The text that Prometheus reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kfs_credentials.errors import ImproperlyPrepared
from kfs_credentials.metrics.families import FAMILIES, Metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(metrics: Metrics) -> str:
    """Return the metrics as text. Raises `ImproperlyPrepared` if the package prometheus_client is not installed."""
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.exposition import generate_latest
    except ImportError:
        raise ImproperlyPrepared(
            "Metrics for Prometheus need the package prometheus_client: pip install 'kfs-credentials[prometheus]'."
        ) from None
    types: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, family in FAMILIES.items():
                found = types[family.type](name, family.help, labels=[label for label, _ in family.labels])
                for labels, value in metrics.values[name].items():
                    found.add_metric(labels, value)
                yield found

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return generate_latest(registry).decode()
