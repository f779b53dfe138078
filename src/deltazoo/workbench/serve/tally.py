"""The engine's counters while they are counted."""

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

from deltazoo.workbench.serve.requests import Counters

__all__ = ["Tally"]


class Tally:
    """Counters that several threads may change and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = Counters()

    def read(self) -> Counters:
        """All of them at one moment."""
        return self._counters

    def add(self, **amounts: float) -> None:
        """Count up."""
        with self._lock:
            sums: dict[str, Any] = {name: getattr(self._counters, name) + amount for name, amount in amounts.items()}
            self._counters = replace(self._counters, **sums)

    def set(self, **values: Any) -> None:
        """Set what is so now."""
        with self._lock:
            self._counters = replace(self._counters, **values)

    def add_first_token(self, seconds: float) -> None:
        """Count a request's first token."""
        with self._lock:
            histogram = self._counters.time_to_first_token.with_value(seconds)
            self._counters = replace(self._counters, time_to_first_token=histogram)

    def add_end(self, reason: str, seconds: float) -> None:
        """Count the end of a request."""
        with self._lock:
            finished = Counter(self._counters.finished)
            finished[reason] += 1
            histogram = self._counters.request_seconds.with_value(seconds)
            self._counters = replace(self._counters, finished=dict(finished), request_seconds=histogram)
