"""Prometheus' metrics: what the HTTP server counts itself, and the engine's counters."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as METRICS_TYPE
from prometheus_client.exposition import generate_latest

from deltazoo.serving.requests import Status

__all__ = ["METRICS_TYPE", "Metrics"]

_NOW = {
    "running": "Requests that take part in the decoding steps.",
    "prefilling": "Requests whose prompt is being run.",
    "waiting": "Requests in the queue.",
    "width": "Rows of the last decoding step.",
    "prefix_bytes": "Memory of the states in the prefix cache, in bytes.",
    "prefix_entries": "States in the prefix cache.",
}
_TOTALS = {
    "rejected": "Requests refused because the queue was full.",
    "prompt_tokens": "Tokens of prompts, those from the prefix cache included.",
    "completion_tokens": "Tokens made for clients.",
    "prefix_hits": "Prompts of which the prefix cache had a part.",
    "prefix_misses": "Prompts of which the prefix cache had nothing.",
    "prefix_tokens": "Prompt tokens that were not run thanks to the prefix cache.",
    "steps": "Decoding steps.",
    "step_seconds": "Time from the start of a decoding step until its tokens were read, summed.",
    "pieces": "Pieces of prompts that were run.",
}
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The numbers as Prometheus reads them: names begin with `deltazoo_`, the label `model` names the model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = registry = CollectorRegistry()
        self.finished = {}
        finished = Counter("deltazoo_finished", "Requests by finish reason.", ["model", "reason"], registry=registry)
        for reason in ("stop", "length", "cancelled", "error"):
            self.finished[reason] = finished.labels(model, reason)

        def histogram(name: str, description: str) -> Histogram:
            found = Histogram(f"deltazoo_{name}", description, ["model"], registry=registry, buckets=_SECONDS)
            return found.labels(model)

        first = "Seconds from a request's arrival to its first token."
        self.time_to_first_token = histogram("time_to_first_token_seconds", first)
        self.request_seconds = histogram("request_seconds", "Seconds from a request's arrival to its end.")

    def text(self, status: Status) -> bytes:
        """All of them, with the engine's counters."""
        registry = CollectorRegistry()
        registry.register(_Collector(status, self._model))
        return generate_latest(registry) + generate_latest(self._registry)


class _Collector:
    def __init__(self, status: Status, model: str) -> None:
        self._status, self._model = status, model

    def collect(self) -> Iterator[Metric]:
        """All metrics of the engine."""
        for kind, names in ((GaugeMetricFamily, _NOW), (CounterMetricFamily, _TOTALS)):
            for name, description in names.items():
                family = kind(f"deltazoo_{name}", description, labels=["model"])
                family.add_metric([self._model], self._status.counters[name])
                yield family
