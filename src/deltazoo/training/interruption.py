"""Stop training on Ctrl-C or SIGTERM: finish the step, save a checkpoint, end."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from deltazoo.training.console import say

_PASSED_ON = 2.0  # seconds within which torchrun repeats a signal that the terminal has already sent to its processes


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended the training.

    Attributes:
        signal: its number.
        checkpoint: what was saved; None after a second signal, which ends the training at once.
    """

    def __init__(self, number: int, checkpoint: Path | None = None) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal, self.checkpoint = number, checkpoint


class StopOnSignal(TrainerCallback):
    """Ends the training after the current step, with a checkpoint, on SIGINT or SIGTERM.

    Several processes agree on it at logging steps, which synchronise them anyway.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = 0.0
        self._several = False

    @contextmanager
    def listening(self, *, several_processes: bool) -> Iterator[None]:
        """Inside, the first signal is recorded and the second raises; outside Python's main thread nothing happens."""
        self._several = several_processes
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        # An ignored signal (nohup) stays ignored. A handler that was not set from Python could not be restored.
        handled = {number: kept for number, kept in before.items() if kept not in (signal.SIG_IGN, None)}
        for number in handled:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, kept in handled.items():
                signal.signal(number, kept)

    def _receive(self, number: int, frame: Any) -> None:
        if self.signal is None:
            self.signal, self._came = number, time.monotonic()
            say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint; once more: at once")
        elif not self._several or time.monotonic() - self._came > _PASSED_ON:
            raise TrainingInterrupted(number)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After a signal, ask for a log entry, a checkpoint and the end, unless this was the last step."""
        if self._several:
            if not control.should_log:
                return
            found = torch.tensor(self.signal or 0, device=args.device)
            distributed.all_reduce(found, distributed.ReduceOp.MAX)
            self.signal = int(found) or None
        if self.signal is not None and state.global_step < state.max_steps:
            control.should_log = control.should_save = control.should_training_stop = True
