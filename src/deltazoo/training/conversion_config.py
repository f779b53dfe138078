"""The conversion recipe: a YAML file with up to three stages."""

import dataclasses
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from deltazoo.training.config import (
    STRICT,
    DataConfig,
    NotNegative,
    OptimizationConfig,
    RunConfig,
    TokenizerConfig,
    load_as,
)

__all__ = [
    "STAGES",
    "AlignmentConfig",
    "ConversionConfig",
    "DistillationConfig",
    "FineTuningConfig",
    "StageConfig",
    "load_conversion",
]

Trained = Literal["swapped", "all"]
STAGES = ("align", "distill", "finetune")
"""Names of the stages, in order."""


@dataclass(frozen=True, config=STRICT)
class StageConfig(OptimizationConfig):
    """One stage: an `OptimizationConfig` and the parameters that it trains.

    Attributes:
        section: the stage's name, its section of the file and its subfolder of the run.
        trains: ``swapped``: the new layers only; ``all``: the whole model.
    """

    section: ClassVar[str] = "stage"

    trains: Trained = "all"

    def __post_init__(self) -> None:
        """Refuse what needs several processes."""
        super().__post_init__()
        if self.context_parallel > 1 or self.fully_shard:
            raise ValueError("context_parallel and fully_shard are refused: a conversion runs in one process")

    def as_run(self, output: Path, rule: str, tokenizer: Path, data: DataConfig, seed: int) -> RunConfig:
        """The stage as a `RunConfig`."""
        keys = [key.name for key in dataclasses.fields(OptimizationConfig)]
        return RunConfig(
            output=str(output),
            model={"mixer": rule},
            training=OptimizationConfig(**{key: getattr(self, key) for key in keys}),
            tokenizer=TokenizerConfig(kind="pretrained", path=str(tokenizer)),
            data=data,
            seed=seed,
        )


@dataclass(frozen=True, config=STRICT)
class AlignmentConfig(StageConfig):
    """Each new layer learns the output of the attention it replaces, on that attention's inputs.

    Attributes:
        section: ``align``.
        trains: ``swapped``; the loss depends on no other parameter.
    """

    section: ClassVar[str] = "align"

    trains: Trained = "swapped"

    def __post_init__(self) -> None:
        """Refuse keys that have no effect in this stage."""
        super().__post_init__()
        if self.trains != "swapped":
            raise ValueError(f"trains must be 'swapped': no gradient reaches other layers, got {self.trains!r}")
        for name in ("compile", "gradient_checkpointing"):
            if getattr(self, name):
                raise ValueError(f"{name} has no meaning: each layer's loss is taken inside the forward pass")


@dataclass(frozen=True, config=STRICT)
class DistillationConfig(StageConfig):
    """The model learns the original's predictions: Kullback-Leibler divergence at temperature 1, token by token.

    Attributes:
        section: ``distill``.
        text_weight: weight of the cross-entropy on the text, which is added to the divergence.
    """

    section: ClassVar[str] = "distill"

    text_weight: NotNegative = 0.0


@dataclass(frozen=True, config=STRICT)
class FineTuningConfig(StageConfig):
    """The model learns the text itself.

    Attributes:
        section: ``finetune``.
    """

    section: ClassVar[str] = "finetune"


@dataclass(frozen=True, config=STRICT)
class ConversionConfig:
    """How a model whose attention was swapped is trained.

    Attributes:
        output: folder of the run: a subfolder per stage, the model, the scores, the loss curves.
        align: see `AlignmentConfig`; None leaves the stage out, as with the next two.
        distill: see `DistillationConfig`.
        finetune: see `FineTuningConfig`.
        data: the text of all stages; see `DataConfig`.
        seed: of the order of the documents, which differs between stages.
    """

    output: str
    align: AlignmentConfig | None = None
    distill: DistillationConfig | None = None
    finetune: FineTuningConfig | None = None
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check that there is a stage."""
        if not self.stages:
            raise ValueError("none of the stages align, distill and finetune is configured: name at least one")

    @property
    def stages(self) -> list[StageConfig]:
        """The configured stages, in order."""
        return [stage for stage in (self.align, self.distill, self.finetune) if stage is not None]


def load_conversion(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> ConversionConfig:
    """Read a YAML file into a `ConversionConfig`; ``overrides`` are ``section.key=value`` strings.

    Raises:
        ValueError: no such file, not YAML, an unknown key, or a value out of range.
    """
    return load_as(ConversionConfig, path, overrides)
