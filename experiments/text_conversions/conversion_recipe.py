"""What is converted and how: fixed before the first conversion."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deltazoo.training.conversion_config import (
    AlignmentConfig,
    DistillationConfig,
    FineTuningConfig,
    StageConfig,
)
from experiments.configurations import SOFTMAX, label_of
from experiments.text.text_configurations import hybrid_of
from experiments.text.text_recipe import TextRecipe

__all__ = ["CONTROL", "Conversion", "ConversionRecipe", "tokens_of", "tokens_of_step"]

_NONE = "none"


@dataclass(frozen=True)
class Conversion:
    """One conversion of the softmax model."""

    rule: str
    """Of the new layers."""
    layers: str
    """As `deltazoo.swap_attention` takes them: "3:1", "1:1", "all"; "none" for the control."""
    seed: int = 0
    """Of the order of the rows."""

    @property
    def name(self) -> str:
        """As `--only` takes it, both seeds under one name."""
        return f"{self.rule}@{self.layers}"

    @property
    def label(self) -> str:
        """On the page."""
        if self == replace(CONTROL, seed=self.seed):
            return "nothing swapped, trained on"
        return f"{label_of(self.rule)}, {'all layers' if self.layers == 'all' else self.layers}"

    def configuration(self, softmax_every: int) -> str | None:
        """The configuration of the suite `text` with this rule in the same layers; None where it has none."""
        if self.layers == "all":
            return self.rule
        return hybrid_of(self.rule) if self.layers == f"{softmax_every - 1}:1" else None


CONTROL = Conversion(SOFTMAX, _NONE)
"""The softmax model itself through distillation and fine-tuning: what further training on the text gives."""


@dataclass(frozen=True, kw_only=True)
class ConversionRecipe:
    """Rules, layers and stages, and how the softmax model is trained and everything scored.

    The stages have the rates and schedules of `configs/swap_gpu.yaml`, rows of the training length and more steps,
    together a tenth of the softmax model's tokens. `evaluate_every` says how often the model is scored.
    """

    text: TextRecipe = field(default_factory=TextRecipe)
    rate: float = 1e-3
    """Peak learning rate of the softmax model: what the suite `text` found for it."""
    rules: tuple[str, ...] = ("gated_deltanet", "kda", "delta_net", "mamba2_style")
    layers: tuple[str, ...] = ("3:1", "1:1", "all")
    again: str | None = "gated_deltanet"
    """The rule whose conversions run with a second seed."""
    align: AlignmentConfig = AlignmentConfig(
        steps=2160,
        row_length=4096,
        rows_per_batch=1,
        learning_rate=3e-3,
        schedule="linear",
        warmup=0.036,
        weight_decay=0.0,
        evaluate_every=540,
    )
    distill: DistillationConfig = DistillationConfig(
        text_weight=1.0,
        steps=576,
        row_length=4096,
        rows_per_batch=4,
        learning_rate=3e-4,
        schedule="linear",
        min_learning_rate_ratio=0.25,
        warmup=0.133,
        weight_decay=0.0,
        evaluate_every=144,
    )
    finetune: FineTuningConfig = FineTuningConfig(
        steps=112,
        row_length=4096,
        rows_per_batch=4,
        learning_rate=7.5e-5,
        schedule="linear",
        warmup=0.033,
        weight_decay=0.0,
        evaluate_every=112,
    )
    decode_contexts: tuple[int, ...] = (16_384, 131_072)
    """Tokens before those whose decoding is timed, one row."""

    def __post_init__(self) -> None:
        for stage in self.stages:
            for key, only in (
                ("rows_per_step", stage.rows_per_batch),
                ("precision", "auto"),
                ("compile", False),
                ("gradient_checkpointing", False),
            ):
                if getattr(stage, key) != only:
                    raise ValueError(f"{stage.section}.{key} must be {only!r} here, got {getattr(stage, key)!r}")

    @property
    def stages(self) -> tuple[StageConfig, ...]:
        """In order."""
        return (self.align, self.distill, self.finetune)

    @property
    def tokens(self) -> int:
        """Read by a conversion."""
        return sum(tokens_of(stage) for stage in self.stages)

    def conversions(self) -> list[Conversion]:
        """All of them, the most important first."""
        first = [Conversion(rule, layers) for rule in self.rules for layers in self.layers]
        second = [Conversion(self.again, layers, seed=1) for layers in self.layers] if self.again else []
        return [*first, CONTROL, *second]

    def decodings(self) -> list[Conversion]:
        """Whose decoding is measured: the softmax model's, then that of every choice of layers and rule."""
        return [CONTROL, *(Conversion(rule, layers) for layers in self.layers for rule in self.rules)]

    def as_json(self) -> dict[str, Any]:
        """The fields as a JSON file has them."""
        return {**asdict(self), "text": self.text.as_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ConversionRecipe":
        """Back from what `as_json` made."""
        kinds = {
            "text": TextRecipe,
            "align": AlignmentConfig,
            "distill": DistillationConfig,
            "finetune": FineTuningConfig,
        }
        return cls(
            **{key: kinds[key](**_tuples(value)) if key in kinds else value for key, value in _tuples(values).items()}
        )


def tokens_of(stage: StageConfig) -> int:
    """Read by a stage."""
    return stage.steps * tokens_of_step(stage)


def tokens_of_step(stage: StageConfig) -> int:
    """Read by an optimizer step of a stage."""
    return stage.rows_per_batch * stage.row_length


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
