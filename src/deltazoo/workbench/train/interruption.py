"""Ctrl-C and SIGTERM during training: the step is finished, a checkpoint saved, and the training ends."""

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

from deltazoo.workbench.console import say

_PASSED_ON = 2.0  # seconds within which torchrun passes on a signal that the terminal has sent to its processes already


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended the training.

    Attributes:
        signal: its number.
        checkpoint: what was saved for it; None if it was the second one, which ends the training at once.
    """

    def __init__(self, number: int, checkpoint: Path | None = None) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal, self.checkpoint = number, checkpoint


class StopOnSignal(TrainerCallback):
    """Ends the training between two steps, with a checkpoint, once SIGINT or SIGTERM has come.

    Several processes agree about it where they log, which waits for all of them anyway.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = 0.0
        self._several = False

    @contextmanager
    def listening(self, *, several_processes: bool) -> Iterator[None]:
        """While open, the first signal is noted and the second raises; only Python's main thread can do so."""
        self._several = several_processes
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        # A signal that is ignored (nohup) stays so; a handler that was not set from Python could not be put back.
        heard = {number: kept for number, kept in before.items() if kept not in (signal.SIG_IGN, None)}
        for number in heard:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, kept in heard.items():
                signal.signal(number, kept)

    def _receive(self, number: int, frame: Any) -> None:
        if self.signal is None:
            self.signal, self._came = number, time.monotonic()
            say(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint; once more: at once")
        elif not self._several or time.monotonic() - self._came > _PASSED_ON:
            raise TrainingInterrupted(number)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask for a log entry, a checkpoint and the end, unless this was the last step anyway."""
        if self._several:
            if not control.should_log:
                return
            found = torch.tensor(self.signal or 0, device=args.device)
            distributed.all_reduce(found, distributed.ReduceOp.MAX)
            self.signal = int(found) or None
        if self.signal is not None and state.global_step < state.max_steps:
            control.should_log = control.should_save = control.should_training_stop = True
