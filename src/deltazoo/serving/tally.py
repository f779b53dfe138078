"""The engine's counters while they are counted."""

import threading
from collections import Counter
from typing import Any

from deltazoo.serving.requests import Counters

__all__ = ["Tally"]


class Tally:
    """Counters that several threads may change and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Any] = vars(Counters()) | {"finished": Counter()}

    def read(self) -> Counters:
        """All of them at one moment."""
        with self._lock:
            return Counters(**self._values | {"finished": dict(self._values["finished"])})

    def add(self, **amounts: float) -> None:
        """Count up."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def set(self, **values: Any) -> None:
        """Set what is so now."""
        with self._lock:
            self._values |= values

    def add_first_token(self, seconds: float) -> None:
        """Count a request's first token."""
        with self._lock:
            self._values["time_to_first_token"] = self._values["time_to_first_token"].with_value(seconds)

    def add_end(self, reason: str, seconds: float) -> None:
        """Count the end of a request."""
        with self._lock:
            self._values["finished"][reason] += 1
            self._values["request_seconds"] = self._values["request_seconds"].with_value(seconds)
