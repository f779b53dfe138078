"""What the table of features needs to know of every test; see scripts/render_features.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_models


@pytest.fixture(autouse=True)
def feature_and_models(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Iterator[None]:
    """Record in the XML report which feature a test is about and which models it built."""
    tiny_models.BUILT.clear()
    yield
    named = set()
    for mark in request.node.iter_markers("feature"):
        record_property("feature", mark.args[0])
        named |= set(mark.kwargs.get("models", ()))
    for model in sorted(named | tiny_models.BUILT):
        record_property("model", model)
