"""Evaluation: bits per byte and perplexity on held-out text, baselines, recall probes, decoding speed, loss curves."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.workbench.evaluate.score import Score, score_documents

__all__ = ["Score", "score_documents"]

__getattr__ = lazy_names(__name__, {"score": ("Score", "score_documents")})
