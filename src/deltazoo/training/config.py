"""The training configuration: sections and keys of the YAML file, with their checks."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import yaml

from deltazoo.runtime import RUNTIME_OPTIONS, RuntimeOptions
from deltazoo.training.checkpoint_files import write_whole
from deltazoo.training.yaml_config import from_mapping, parse_yaml

STDLIB = "python_stdlib"
RUN_CONFIG = "config.yaml"  # in the folder of a run: the configuration that it began with
BY_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")  # keys of a model's own configuration
NATIVE_RUNTIME_OPTIONS = ("backend", "fused_kernels")  # those that act on models of transformers
MODEL_CONFIG = "training.yaml"  # in the folder of a model: the configuration that it was trained with

T = TypeVar("T")


@dataclass(frozen=True)
class DataConfig:
    """The text and its split into training and held-out documents.

    Attributes:
        text: ``python_stdlib``, a text file, a ``.jsonl``/``.json`` or ``.parquet`` file, a folder of such files, or a
            name for ``datasets.load_dataset``.
        pattern: which files of a folder are read as text, as a glob relative to it.
        subset: configuration name of a Hub dataset; only for Hub datasets.
        split: split of a Hub dataset; only for Hub datasets.
        text_field: the column that holds the text of JSONL, Parquet and Hub records.
        streaming: read records while training instead of holding the text in memory; JSONL, Parquet and Hub only.
        validation_fraction: share of the documents held out, chosen by a hash of their name (files) or text (records);
            if the hash leaves one part empty, as with a single file, this share at the end of the text.
        max_train_bytes: stop after this many bytes of training text; not with ``streaming``, where steps end the run.
        max_validation_bytes: stop after this many bytes of held-out text; needed with ``streaming``.
    """

    text: str = STDLIB
    pattern: str = "**/*"
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    streaming: bool = False
    validation_fraction: float = 0.05
    max_train_bytes: int | None = None
    max_validation_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0.0 < self.validation_fraction < 1.0:
            raise ValueError(f"data.validation_fraction must lie between 0 and 1, got {self.validation_fraction}")
        for name in ("max_train_bytes", "max_validation_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, got {value}")
        if self.streaming and self.max_validation_bytes is None:
            raise ValueError("data.streaming needs data.max_validation_bytes: the held-out text is kept in memory")
        if self.streaming and self.max_train_bytes is not None:
            raise ValueError("data.max_train_bytes has no meaning with data.streaming: training.steps ends the stream")


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer.

    Attributes:
        kind: ``bpe`` trains a byte-level BPE on the training text, ``byte`` has one token per byte, ``pretrained``
            loads an existing tokenizer.
        vocab_size: entries of the trained BPE, the two special tokens included; only for ``bpe``.
        path: folder or Hub name of the tokenizer; only for ``pretrained``.
        training_bytes: train the BPE on at most this much of the training text; only for ``bpe``.
    """

    kind: Literal["bpe", "byte", "pretrained"] = "bpe"
    vocab_size: int | None = None
    path: str | None = None
    training_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check that the keys fit the kind."""
        if self.kind == "bpe":
            if self.vocab_size is None or self.vocab_size < 259:
                raise ValueError(
                    "tokenizer.vocab_size must be at least 259 for a byte-level BPE "
                    f"(256 bytes, two special tokens, one merge), got {self.vocab_size}"
                )
        elif self.vocab_size is not None or self.training_bytes is not None:
            raise ValueError(
                f"tokenizer.vocab_size and tokenizer.training_bytes act only for kind bpe, not {self.kind}"
            )
        if (self.path is not None) != (self.kind == "pretrained"):
            raise ValueError(
                f"tokenizer.path belongs to kind pretrained and to no other; got kind {self.kind}, path {self.path}"
            )
        if self.training_bytes is not None and self.training_bytes < 1:
            raise ValueError(f"tokenizer.training_bytes must be at least 1, got {self.training_bytes}")


@dataclass(frozen=True)
class OptimizationConfig:
    """Steps, batches, optimizer, learning rate schedule, logging and checkpoints.

    Attributes:
        section: the section's name in the file, for messages; not a key.
        steps: optimizer steps.
        row_length: tokens per packed row; gradients reach back no further.
        rows_per_batch: at most this many rows in one forward pass; `context_parallel` devices share them.
        rows_per_step: rows of an optimizer step, over all devices; default: ``rows_per_batch``. The number of forward
            passes follows from it and from the number of devices.
        learning_rate: peak learning rate of AdamW.
        schedule: after the warm-up, along a cosine or a line down to ``min_learning_rate_ratio``, or constant.
        warmup: share of the steps over which the learning rate rises linearly from 0.
        min_learning_rate_ratio: final over peak learning rate; 1.0 is refused (that is ``schedule: constant``).
        weight_decay: AdamW decay; never on A_log, dt_bias, norms and biases.
        betas: decay rates of AdamW's two moments.
        max_grad_norm: gradients are scaled down to this global norm.
        precision: ``auto`` is bf16 on a GPU that has it and fp32 elsewhere; parameters stay fp32 in any case.
        gradient_checkpointing: recompute each block in the backward pass; slower, less memory.
        compile: run the model through ``torch.compile``.
        context_parallel: how many devices share the tokens of a forward pass; with more devices, groups of as many
            have rows of their own.
        fully_shard: divide parameters, gradients and optimizer state among all devices (FSDP2).
        log_every: steps between two log entries of the training loss, each the mean since the previous one.
        evaluate_every: steps between two validation losses.
        evaluation_rows: held-out rows of a validation loss, evenly spread; ``deltazoo eval`` reads all of the text.
        save_every: steps between checkpoints; a multiple of ``log_every``, so that resumed runs log the same means.
        keep_checkpoints: how many checkpoints to keep; older ones are removed.
        diagnose_every: steps between two diagnoses (`deltazoo.diagnose`) of the model on held-out rows, as many as a
            batch has, beginning before the first step; default: none.
    """

    section: ClassVar[str] = "training"

    steps: int
    row_length: int
    rows_per_batch: int
    learning_rate: float
    rows_per_step: int | None = None
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = 0.0
    min_learning_rate_ratio: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    context_parallel: int = 1
    fully_shard: bool = False
    log_every: int = 10
    evaluate_every: int = 100
    evaluation_rows: int = 32
    save_every: int = 100
    keep_checkpoints: int = 2
    diagnose_every: int | None = None

    def __post_init__(self) -> None:
        """Fill in ``rows_per_step``, and check the ranges."""
        if self.rows_per_step is None:
            object.__setattr__(self, "rows_per_step", self.rows_per_batch)
        if self.row_length < 2:
            raise ValueError(
                f"{self.section}.row_length must be at least 2, as each token is predicted from those before it in its "
                f"row, got {self.row_length}"
            )
        counts = "steps rows_per_batch rows_per_step log_every evaluate_every evaluation_rows save_every"
        for name in [*counts.split(), "keep_checkpoints", "context_parallel"]:
            if getattr(self, name) < 1:
                raise ValueError(f"{self.section}.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{self.section}.{name} must be positive and finite, got {value}")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"{self.section}.weight_decay must be finite and not negative, got {self.weight_decay}")
        if not 0.0 <= self.warmup <= 1.0:
            raise ValueError(f"{self.section}.warmup is a share of the steps, between 0 and 1, got {self.warmup}")
        if not 0.0 <= self.min_learning_rate_ratio < 1.0:
            raise ValueError(
                f"{self.section}.min_learning_rate_ratio must lie in [0, 1), got {self.min_learning_rate_ratio}"
            )
        if self.schedule == "constant" and self.min_learning_rate_ratio:
            raise ValueError(f"{self.section}.min_learning_rate_ratio has no meaning with schedule constant")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"{self.section}.betas must lie in [0, 1), got {list(self.betas)}")
        if self.compile and self.fully_shard:
            raise ValueError(f"{self.section}.compile has no effect with {self.section}.fully_shard")
        if self.diagnose_every is not None and self.diagnose_every < 1:
            raise ValueError(f"{self.section}.diagnose_every must be at least 1, got {self.diagnose_every}")
        if self.diagnose_every is not None and self.context_parallel > 1:
            raise ValueError(
                f"{self.section}.diagnose_every needs whole rows on a device, and {self.section}.context_parallel is "
                f"{self.context_parallel}"
            )
        if self.save_every % self.log_every:
            raise ValueError(
                f"{self.section}.save_every ({self.save_every}) must be a multiple of "
                f"{self.section}.log_every ({self.log_every})"
            )

    @property
    def rows_of_a_step(self) -> int:
        """Rows of an optimizer step, over all devices."""
        assert self.rows_per_step is not None
        return self.rows_per_step

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return round(self.warmup * self.steps)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        output: folder of the run: checkpoints, the finished model, the loss curve, the resolved configuration.
        model: ``mixer`` (a rule) and keys of its model configuration, or ``architecture`` (a model type of
            transformers) and fields of that type's own configuration; without the vocabulary size.
        training: see `OptimizationConfig`.
        data: see `DataConfig`.
        runtime: how the model runs, see `RuntimeOptions`; not saved with the model. With ``architecture``, ``backend``
            and ``fused_kernels`` alone.
        tokenizer: see `TokenizerConfig`.
        seed: of the initial weights and the order of the documents.
    """

    output: str
    model: dict[str, Any]
    training: OptimizationConfig
    tokenizer: TokenizerConfig
    data: DataConfig = field(default_factory=DataConfig)
    runtime: RuntimeOptions = field(default_factory=RuntimeOptions)
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the model section."""
        for key in RUNTIME_OPTIONS:
            if key in self.model:
                raise ValueError(f"model.{key} says how the model runs, not what it is: give runtime.{key} instead")
        if self.architecture is not None:
            self._check_architecture()
        elif "mixer" not in self.model:
            raise ValueError(
                "model.mixer is missing: name one of the rules, for example gated_deltanet, or a model type of "
                "transformers as model.architecture, for example qwen3_next"
            )
        for key in BY_TOKENIZER:
            if key in self.model:
                instead = "give tokenizer.vocab_size instead" if key == "vocab_size" else "leave it out"
                raise ValueError(f"model.{key} is set by the tokenizer: {instead}")

    @property
    def architecture(self) -> str | None:
        """The model type of transformers whose own class is trained; None for our models."""
        return self.model.get("architecture")

    @property
    def model_name(self) -> str:
        """The rule or the model type of transformers."""
        return self.architecture or self.model["mixer"]

    def _check_architecture(self) -> None:
        if "mixer" in self.model:
            raise ValueError(
                f"model.mixer={self.model['mixer']} and model.architecture={self.architecture} name two models: a "
                "mixer is one of our models, an architecture a model of transformers; give one of them"
            )
        for name in self.runtime.given():
            if name not in NATIVE_RUNTIME_OPTIONS:
                other = "; training.gradient_checkpointing recomputes its blocks" if name == "recompute" else ""
                raise ValueError(
                    f"runtime.{name} acts on our own models, not on transformers' {self.architecture}, of which "
                    f"runtime.{' and runtime.'.join(NATIVE_RUNTIME_OPTIONS)} are known{other}"
                )

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain lists and dictionaries, defaults included."""
        values = dataclasses.asdict(self)
        values["training"]["betas"] = list(self.training.betas)
        return values


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML file into a `RunConfig`.

    Args:
        path: the YAML file.
        overrides: ``section.key=value`` strings that replace values of the file; a value is read as YAML, or as a
            string if it is not YAML.

    Raises:
        ValueError: no such file, not YAML, an unknown or repeated key, or a value out of range.
    """
    return load_as(RunConfig, path, overrides)


def load_as(cls: type[T], path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> T:
    """Read a YAML file into the dataclass ``cls``.

    Args:
        cls: a configuration class.
        path: the YAML file.
        overrides: ``section.key=value`` strings that replace values of the file; a value is read as YAML, or as a
            string if it is not YAML.

    Raises:
        ValueError: no such file, not YAML, an unknown or repeated key, or a value out of range.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no configuration file {str(path)!r}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of keys to values, got {type(values).__name__}")
    for override in overrides:
        _apply(values, override)
    try:
        return from_mapping(cls, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class Configuration(Protocol):
    """A configuration that `save_config` can write."""

    def to_dict(self) -> dict[str, Any]:
        """As plain lists and dictionaries, defaults included."""
        ...


def save_config(config: Configuration, path: str | Path) -> None:
    """Write the configuration with all defaults, so that the file alone reproduces the run."""
    text = yaml.safe_dump(config.to_dict(), sort_keys=False)
    write_whole(Path(path), text)


def _apply(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ValueError(f"an override has the form section.key=value, got {override!r}")
    *sections, key = name.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{section!r} in the override {override!r} is not a section")
        values = inner
    try:
        values[key] = parse_yaml(text)
    except yaml.YAMLError:  # for example **/*.py: in YAML * begins an alias
        values[key] = text
