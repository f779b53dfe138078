"""A callback that diagnoses a model while transformers' Trainer trains it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltazoo.diagnosis.diagnosis import Diagnosis, diagnose

if TYPE_CHECKING:
    from transformers import Trainer


class DiagnoseCallback(TrainerCallback):
    """A callback that logs figures of `diagnose`, such as `diagnose_gain_max` (`Diagnosis.summary`).

        trainer.add_callback(deltazoo.DiagnoseCallback(trainer, batch, every=100))

    Args:
        trainer: the Trainer whose `log` writes the figures, so that they reach its history and every tracker.
        batch: the argument of `diagnose`, always the same, so that the curves show the model and not the text.
        every: steps between two measurements; the first one is before training.

    Raises:
        ValueError: `every` below 1.
    """

    def __init__(self, trainer: "Trainer", batch: Tensor | Mapping[str, Any], every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1 step, got {every}")
        self.trainer, self.batch, self.every = trainer, batch, every
        self.latest: Diagnosis | None = None
        """The last measurement, with its `warnings`."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model before training; a resumed run has measured it before."""
        if state.global_step == 0:
            self.measure(kwargs["model"], control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure every `every` steps."""
        if state.global_step % self.every == 0:
            self.measure(kwargs["model"], control)

    def measure(self, model: nn.Module | None, control: TrainerControl) -> None:
        """Diagnose the model and log the summary."""
        assert model is not None
        self.latest = diagnose(model, self.batch)
        due = control.should_log  # `log` clears the request for the loss of this step
        self.trainer.log({f"diagnose_{name}": value for name, value in self.latest.summary().items()})
        control.should_log = due
