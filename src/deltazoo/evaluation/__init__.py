"""Evaluation: bits per byte and perplexity on held-out text, the baselines beside them, the loss curve."""

from deltazoo.evaluation.baselines import ByteContextModel, gzip_bits_per_byte, xz_bits_per_byte
from deltazoo.evaluation.loss_curve import draw_loss_curve
from deltazoo.evaluation.score import Score, score_documents

__all__ = ["ByteContextModel", "Score", "draw_loss_curve", "gzip_bits_per_byte", "score_documents", "xz_bits_per_byte"]
