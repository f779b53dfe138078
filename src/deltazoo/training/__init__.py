"""Training, distillation and evaluation: from one YAML file to a model on disk, through the HF Trainer.

Reading configurations and text imports no torch; the other names are imported on first use.
"""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names
from deltazoo.training.config import (
    DataConfig,
    OptimizationConfig,
    RunConfig,
    TokenizerConfig,
    load_config,
    save_config,
)

if TYPE_CHECKING:
    from deltazoo.training.evaluate import Score, score_documents
    from deltazoo.training.run import TrainingResult, train
    from deltazoo.training.trainer import TrainingDiverged

__all__ = [
    "DataConfig",
    "OptimizationConfig",
    "RunConfig",
    "Score",
    "TokenizerConfig",
    "TrainingDiverged",
    "TrainingResult",
    "load_config",
    "save_config",
    "score_documents",
    "train",
]

__getattr__ = lazy_names(
    __name__,
    {
        "evaluate": ("Score", "score_documents"),
        "trainer": ("TrainingDiverged",),
        "run": ("TrainingResult", "train"),
    },
)
