"""Progress display and throughput meter for training."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import TaskID
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltazoo.training.console import console, progress_bar

_MUST_BE_FINITE = {"loss": "training loss", "grad_norm": "norm of the gradients", "eval_loss": "held-out loss"}
"""Entries of Trainer's log. A step whose gradients are NaN leaves NaN in the weights, which the next loss shows."""


class TrainingDiverged(FloatingPointError):
    """The training loss, the norm of its gradients or the held-out loss is NaN or infinite."""


class Monitor(TrainerCallback):
    """Show a progress bar on a terminal and a line per validation; stop a run that computes NaN or infinity.

    ``seconds`` and ``steps`` count training only: validation and saving run inside ``pause()``.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.seconds = 0.0
        self.steps = 0
        self.tokens_per_step = tokens_per_step
        self._began = 0.0
        self._loss = self._validation = "-"
        self._bar = progress_bar("loss {task.fields[loss]}  held-out {task.fields[validation]}  {task.fields[speed]}")
        self._task: TaskID | None = None

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second of wall-clock time, up to now."""
        return self.steps * self.tokens_per_step / self.seconds if self.seconds else 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time spent inside."""
        self.seconds += time.perf_counter() - self._began
        yield
        self._began = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the meter and the bar."""
        state.compute_steps(args, state.max_steps)  # a loaded checkpoint carries the intervals of the earlier run
        self._began = time.perf_counter()
        self._task = self._bar.add_task(
            "training", total=state.max_steps, completed=state.global_step, loss="-", validation="-", speed=""
        )
        if state.is_world_process_zero:
            self._bar.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the bar; always log and validate the last step."""
        self.steps += 1
        if state.global_step == state.max_steps:
            control.should_log = control.should_evaluate = True
        assert self._task is not None
        self._bar.update(self._task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the latest losses.

        Raises:
            TrainingDiverged: a loss or the norm of the gradients is NaN or infinite.
        """
        logs = logs or {}
        for name, what in _MUST_BE_FINITE.items():
            if not math.isfinite(logs.get(name, 0)):
                raise TrainingDiverged(
                    f"the {what} is {logs[name]} at step {state.global_step}: lower training.learning_rate; "
                    "the checkpoints saved before are intact"
                )
        if "loss" in logs:
            self._loss = f"{logs['loss']:.3f}"
        if "eval_loss" in logs:
            self._validation = f"{logs['eval_bits_per_byte']:.3f} bits/byte"
            if state.is_world_process_zero:
                console.print(
                    f"step {state.global_step:>6}/{state.max_steps}  loss {self._loss}  "
                    f"held-out {logs['eval_loss']:.3f} ({self._validation})  {self.tokens_per_second:,.0f} tokens/s",
                    highlight=False,
                )
        assert self._task is not None
        self._bar.update(
            self._task, loss=self._loss, validation=self._validation, speed=f"{self.tokens_per_second:,.0f} tokens/s"
        )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the meter."""
        self.seconds += time.perf_counter() - self._began

    def stop(self) -> None:
        """Remove the bar and show the terminal's cursor again."""
        self._bar.stop()
