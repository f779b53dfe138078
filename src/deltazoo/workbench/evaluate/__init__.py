"""Evaluation: bits per byte and perplexity on held-out text, baselines, recall probes, decoding speed, loss curves."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.workbench.evaluate.baselines import ByteContextModel, gzip_bits_per_byte, xz_bits_per_byte
    from deltazoo.workbench.evaluate.loss_curve import draw_loss_curve
    from deltazoo.workbench.evaluate.score import Score, score_documents

__all__ = ["ByteContextModel", "Score", "draw_loss_curve", "gzip_bits_per_byte", "score_documents", "xz_bits_per_byte"]

__getattr__ = lazy_names(
    __name__,
    {
        "baselines": ("ByteContextModel", "gzip_bits_per_byte", "xz_bits_per_byte"),
        "loss_curve": ("draw_loss_curve",),
        "score": ("Score", "score_documents"),
    },
)
