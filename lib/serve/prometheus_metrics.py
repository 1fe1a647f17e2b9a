"""What the gateway counts and measures, for Prometheus."""

from __future__ import annotations

import functools
from collections.abc import Callable

import prometheus_client as prometheus

from lib.serve.backend_pool import Backend, Pool

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)  # the histograms' limits
CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST


class Metrics:
    """Counters, histograms and gauges, in a registry of their own."""

    def __init__(self, pool: Pool) -> None:
        self.registry = prometheus.CollectorRegistry()
        registry = self.registry
        self.requests = prometheus.Counter(
            "tandem_requests", "Requests answered", ["path", "status"], registry=registry
        )
        self.seconds = prometheus.Histogram(
            "tandem_request_seconds", "Whole requests for completions", buckets=SECONDS, registry=registry
        )
        self.first_token = prometheus.Histogram(
            "tandem_first_token_seconds", "From a request to its first token", buckets=SECONDS, registry=registry
        )
        self.queue_seconds = prometheus.Histogram(
            "tandem_queue_seconds", "Waiting for a backend", buckets=SECONDS, registry=registry
        )
        self.tokens = prometheus.Counter("tandem_tokens", "Tokens read and generated", ["kind"], registry=registry)
        self.lost = prometheus.Counter(
            "tandem_backend_failures", "Requests that a backend failed", ["backend"], registry=registry
        )
        self.labels = prometheus.Counter("tandem_labels", "Labels of completions", ["label"], registry=registry)
        waiting = prometheus.Gauge("tandem_queue_length", "Requests that wait for a backend", registry=registry)
        waiting.set_function(lambda: pool.queue_length)
        gauges: dict[str, tuple[str, Callable[[Backend], float]]] = {
            "in_flight": ("Requests on a backend", lambda backend: backend.in_flight),
            "up": ("Whether a backend takes requests", lambda backend: backend.is_up),
            "restarts": ("Starts of a backend after the first", lambda backend: backend.restarts),
            "tokens_per_second": ("Measured speed", lambda backend: backend.tokens_per_second or 0.0),
        }
        for name, (meaning, value) in gauges.items():
            gauge = prometheus.Gauge(f"tandem_backend_{name}", meaning, ["backend"], registry=registry)
            for backend in pool.backends:
                gauge.labels(backend.name).set_function(functools.partial(value, backend))

    def text(self) -> bytes:
        """All of them, in Prometheus's format."""
        return prometheus.generate_latest(self.registry)
