"""Training steps whose decoder blocks run as two CUDA graphs: one forward, one backward."""

from deltazoo.models.captured_training.kept import describe_captured, forget_captured, run_blocks

__all__ = ["describe_captured", "forget_captured", "run_blocks"]
