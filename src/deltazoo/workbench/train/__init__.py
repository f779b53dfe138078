"""Training: from one YAML file to a model on disk, through the HF Trainer.

Reading configurations and text imports no torch; the other names are imported on first use.
"""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names
from deltazoo.workbench.train.config import (
    DataConfig,
    OptimizationConfig,
    RunConfig,
    TokenizerConfig,
    load_config,
    save_config,
)

if TYPE_CHECKING:
    from deltazoo.workbench.train.monitor import TrainingDiverged
    from deltazoo.workbench.train.training_run import TrainingResult, train

__all__ = [
    "DataConfig",
    "OptimizationConfig",
    "RunConfig",
    "TokenizerConfig",
    "TrainingDiverged",
    "TrainingResult",
    "load_config",
    "save_config",
    "train",
]

__getattr__ = lazy_names(
    __name__,
    {"monitor": ("TrainingDiverged",), "training_run": ("TrainingResult", "train")},
)
