"""The engine's counters in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as METRICS_TYPE
from prometheus_client.exposition import generate_latest

from deltazoo.serving.requests import Counters, Histogram

__all__ = ["METRICS_TYPE", "metrics_text"]

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
_HISTOGRAMS = {
    "time_to_first_token": ("time_to_first_token_seconds", "Seconds from a request's arrival to its first token."),
    "request_seconds": ("request_seconds", "Seconds from a request's arrival to its end."),
}


def metrics_text(counters: Counters, model: str) -> bytes:
    """The counters as Prometheus reads them: names begin with `deltazoo_`, the label `model` names the model."""
    registry = CollectorRegistry()
    registry.register(_Collector(counters, model))
    return generate_latest(registry)


class _Collector:
    def __init__(self, counters: Counters, model: str) -> None:
        self._counters, self._model = counters, model

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        for name, description in _NOW.items():
            gauge = GaugeMetricFamily(f"deltazoo_{name}", description, labels=["model"])
            gauge.add_metric([self._model], getattr(self._counters, name))
            yield gauge
        for name, description in _TOTALS.items():
            total = CounterMetricFamily(f"deltazoo_{name}", description, labels=["model"])
            total.add_metric([self._model], getattr(self._counters, name))
            yield total
        finished = CounterMetricFamily("deltazoo_finished", "Requests by finish reason.", labels=["model", "reason"])
        for reason in ("stop", "length", "cancelled", "error"):
            finished.add_metric([self._model, reason], self._counters.finished.get(reason, 0))
        yield finished
        for field, (name, description) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"deltazoo_{name}", description, labels=["model"])
            histogram: Histogram = getattr(self._counters, field)
            counts = histogram.counts or (0,) * len(histogram.bounds)
            buckets = [(str(bound), count) for bound, count in zip(histogram.bounds, counts, strict=True)]
            family.add_metric([self._model], [*buckets, ("+Inf", histogram.count)], histogram.total)
            yield family
