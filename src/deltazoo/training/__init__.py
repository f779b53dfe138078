"""Training: text, tokenizers, packing, and the HF Trainer, from one YAML file to a model on disk."""

from deltazoo.training.config import (
    DataConfig,
    OptimizationConfig,
    RunConfig,
    TokenizerConfig,
    load_config,
    save_config,
)
from deltazoo.training.monitor import TrainingDiverged
from deltazoo.training.optimizer import parameter_groups
from deltazoo.training.run import TrainingResult, train

__all__ = [
    "DataConfig",
    "OptimizationConfig",
    "RunConfig",
    "TokenizerConfig",
    "TrainingDiverged",
    "TrainingResult",
    "load_config",
    "parameter_groups",
    "save_config",
    "train",
]
