"""Training steps whose decoder blocks run as two CUDA graphs: one forward, one backward."""

from deltazoo.models.captured_training.kept import forget_captured, run_blocks
from deltazoo.models.captured_training.library_blocks import capture_library_blocks, release_library_blocks

__all__ = ["capture_library_blocks", "forget_captured", "release_library_blocks", "run_blocks"]
