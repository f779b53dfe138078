"""The HF Trainer for packed rows, with our parameter groups, an exact validation loss, whole checkpoints and signals.

``compute_loss`` makes the loss of a training step, ``_save_checkpoint`` writes the files that a resumed run needs.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import distributed, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback

from deltazoo.compat.fla.checkpoints import whole_model
from deltazoo.compat.transformers import has_known_layers
from deltazoo.compat.transformers.new_model import write_served_names
from deltazoo.diagnosis import DiagnoseCallback
from deltazoo.distributed.trainer import ShardedTrainer
from deltazoo.layers import parameter_groups
from deltazoo.training.config import MODEL_CONFIG, RunConfig, save_config
from deltazoo.training.console import console, no_transformers_bars, say
from deltazoo.training.evaluate import score_rows
from deltazoo.training.folder import refuse_damaged, remove_oldest, unfinished, whole_or_not_at_all
from deltazoo.training.tokens import (
    PackedRows,
    StreamedRows,
    TokenizedText,
    collate,
    collate_side_by_side,
    num_tokens,
    pack_in_order,
    spread,
)

_STREAM_POSITION = "stream_position.json"
_PASSED_ON = 2.0  # seconds within which torchrun repeats a signal that the terminal has sent to its processes
_MUST_BE_FINITE = {"loss": "training loss", "grad_norm": "norm of the gradients", "eval_loss": "held-out loss"}
"""Entries of Trainer's log. NaN in the gradients of a step leaves NaN in the weights, which the next loss shows."""


class TrainingDiverged(FloatingPointError):
    """The training loss, the norm of its gradients or the held-out loss is NaN or infinite."""


class TrainingInterrupted(KeyboardInterrupt):
    """A signal ended the training: the first one with a checkpoint, the second at once.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number


class PackedTrainer(ShardedTrainer):
    """A Trainer on packed rows. Methods that are not overridden here are Trainer's own."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RunConfig,
        arguments: TrainingArguments,
        text: TokenizedText,
        *,
        side_by_side: bool = False,
    ) -> None:
        """``side_by_side``: whether rows of a batch stay apart, for models that cannot read them as one sequence."""
        settings = config.training
        if settings.fully_shard and arguments.world_size == 1:  # a divided run may continue in one process
            say("training.fully_shard divides nothing in one process: torchrun starts several")
        self.monitor = Monitor(settings.tokens_per_step)
        self._stop = StopOnSignal()
        collate_rows = collate_side_by_side if side_by_side else collate
        held_out = pack_in_order(text.validation, settings.row_length)
        if num_tokens(held_out[-1]) < settings.context_parallel:  # every process needs a token
            del held_out[-1]
        self._validation_rows = spread(held_out, settings.evaluation_rows)
        if settings.gradient_checkpointing:  # transformers renames the method; 5.14 has only the old name
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=text.training_rows(settings, config.seed),
            eval_dataset=self._validation_rows,
            data_collator=collate_rows,
            processing_class=text.tokenizer,
            callbacks=[self.monitor, self._stop],
            context_parallel=settings.context_parallel,
            fully_shard=settings.fully_shard,
        )
        self.remove_callback(PrinterCallback)
        self._model, self._config, self._settings = model, config, settings
        self._bytes_per_token = text.bytes_per_token
        self._folder, self._saving_below = Path(config.output), Path(config.output)
        if settings.diagnose_every is not None:
            batch = collate_rows(self._validation_rows[: settings.rows_per_batch])
            self.add_callback(DiagnoseCallback(self, batch, settings.diagnose_every))

    def run(self, checkpoint: Path | None, model_path: Path) -> dict[str, Any]:
        """The figures of a run, after training from the beginning or from a checkpoint and saving the model.

        Raises:
            ValueError: a file of the checkpoint is damaged or missing.
            TrainingInterrupted: SIGINT or SIGTERM came; a checkpoint was saved unless a second signal came.
        """
        first = self.args.should_save
        with no_transformers_bars():
            self._train_from(checkpoint)
            with whole_or_not_at_all(model_path) if first else nullcontext(model_path) as staging:
                self.save_model(str(staging))
        tokens, rows = self._settings.tokens_per_step, self.train_dataset
        device = self.args.device
        name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        )
        return {
            "log_history": self.state.log_history,
            "num_parameters": self._model.num_parameters(),
            "tokens_per_step": tokens,
            "seconds": self.monitor.seconds,
            "tokens_per_second": self.monitor.tokens_per_second,
            "device": name if device.type in ("cuda", "cpu") else device.type,
            "precision": "bf16" if self.args.bf16 else "fp32",
            "passes": self._settings.steps * tokens / rows.tokens_per_epoch if isinstance(rows, PackedRows) else None,
        }

    def _train_from(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            refuse_damaged(checkpoint)
            reached = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            if reached.global_step >= self._settings.steps:  # the Trainer's loop would continue with a stream
                self.state, reached.max_steps = reached, self._settings.steps
                self._load_from_checkpoint(str(checkpoint))
                scored = [entry["step"] for entry in reached.log_history if "eval_loss" in entry]
                if scored[-1:] != [reached.global_step]:  # the run was to be longer
                    self.evaluate()
                return
            if isinstance(self.train_dataset, StreamedRows):
                self.train_dataset.go_to(json.loads((checkpoint / _STREAM_POSITION).read_text(encoding="utf-8")))
        try:
            with self._stop.listening(several_processes=self.args.world_size > 1):
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            self.monitor.stop()
        if self._stop.signal is not None and self.state.global_step < self.state.max_steps:
            raise TrainingInterrupted(self._stop.signal)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over the two parameter groups."""
        if self.optimizer is None:
            groups = parameter_groups(model or self._model, self._settings.weight_decay)
            self.optimizer = torch.optim.AdamW(
                groups, lr=self._settings.learning_rate, betas=self._settings.betas, fused=True
            )
        return self.optimizer

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's loss of a batch, with the experts' load balancing loss as a mean.

        Cross-entropies are sums over all tokens of a step, divided by their number. A model that adds its load
        balancing loss to each would add it once per forward pass.
        """
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        balancing = outputs.get("aux_loss")
        if balancing is not None and num_items_in_batch is not None:
            too_much = self.accelerator.num_processes - 1 / self.args.gradient_accumulation_steps
            loss = loss - too_much * self._model.config.router_aux_loss_coef * balancing
        return (loss, outputs) if return_outputs else loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Validation loss in nats per token and in bits per byte; each process scores its share of the rows."""
        if eval_dataset is not None:
            raise ValueError("the validation rows are fixed when the trainer is made: evaluate() takes no other data")
        size = self._settings.context_parallel
        groups = self.args.world_size // size
        with self.monitor.pause():
            share = self._validation_rows[self.args.process_index // size :: groups]
            # All processes of a sharded model run as many passes as the one with the largest share.
            rows_at_once = self.args.per_device_train_batch_size
            passes = math.ceil(math.ceil(len(self._validation_rows) / groups) / rows_at_once)
            empty_passes = [self._validation_rows[0]] * passes if self._shards else ()
            found = score_rows(self._model, share, rows_at_once, self.data_collator, empty_passes=empty_passes)
            sums = torch.tensor(found, dtype=torch.float32)
            sums = self.accelerator.reduce(sums.to(self.args.device), reduction="sum").cpu()
        loss = float(sums[0] / sums[1])
        bits = loss / math.log(2) / self._bytes_per_token
        metrics = {f"{metric_key_prefix}_loss": loss, f"{metric_key_prefix}_bits_per_byte": bits}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        best = loss == min(entry["eval_loss"] for entry in self.state.log_history if "eval_loss" in entry)
        if best and self.state.global_step % self._settings.log_every == 0:  # the training loss has also been logged
            self.control.should_save = True
        return metrics

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write Trainer's checkpoint, and the position of a stream, whole or not at all.

        It holds model, tokenizer, optimizer, learning rate schedule, random states and the log: everything that a
        resumed run needs to continue bit for bit.
        """
        target, first = self._folder / f"checkpoint-{self.state.global_step}", self.args.should_save
        with self.monitor.pause():
            with whole_or_not_at_all(target) if first else nullcontext(unfinished(target)) as staging:
                self.accelerator.wait_for_everyone()
                self._saving_below = staging.parent
                super()._save_checkpoint(model, trial)
                if first and isinstance(self.train_dataset, StreamedRows):
                    position = self.train_dataset.position_after(self.state.global_step * self._settings.rows_per_step)
                    (staging / _STREAM_POSITION).write_text(json.dumps(position), encoding="utf-8")
                self.accelerator.wait_for_everyone()
            if first:
                remove_oldest(self._folder, self._settings.keep_checkpoints, self.state.log_history)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving_below)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, as safetensors, and the run's configuration; every process must call this."""
        self._model.config.use_cache = True  # Trainer has turned it off, for training
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._model.config.use_cache = self.args.use_cache
        if self.args.should_save:
            folder = Path(output_dir or self._folder)
            save_config(self._config, folder / MODEL_CONFIG)
            if has_known_layers(self._model):
                write_served_names(self._model, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights by `from_pretrained`: Trainer expects parameters' own names, and models may save others."""
        self._model.load_state_dict(whole_model(resume_from_checkpoint).state_dict())


class Monitor(TrainerCallback):
    """A callback that shows the progress and a line per validation, and stops a run that computes NaN or infinity.

    ``seconds`` and ``steps`` count training only: validation and saving run inside ``pause()``.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.steps, self.tokens_per_step = 0, tokens_per_step
        self._counted = 0.0
        self._began: float | None = None  # the time since which seconds are not yet counted
        self._loss = self._bits = "-"
        self._progress = console.status("training")

    @property
    def seconds(self) -> float:
        """Wall-clock time of training, up to now."""
        return self._counted + (0.0 if self._began is None else time.perf_counter() - self._began)

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second of wall-clock time, up to now."""
        return self.steps * self.tokens_per_step / self.seconds if self.seconds else 0.0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose time does not count."""
        self._counted, self._began = self.seconds, None
        yield
        self._began = time.perf_counter()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        state.compute_steps(args, state.max_steps)  # a loaded checkpoint carries the intervals of the earlier run
        self._began = time.perf_counter()
        if state.is_world_process_zero:
            self._progress.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Count the step; always log and validate the last one."""
        self.steps += 1
        if state.global_step == state.max_steps:
            control.should_log = control.should_evaluate = True
        left = self.seconds / self.steps * (state.max_steps - state.global_step)
        self._progress.update(
            f"step {state.global_step}/{state.max_steps}  loss {self._loss}  held-out {self._bits}  "
            f"{self.tokens_per_second:,.0f} tokens/s  {timedelta(seconds=round(left))} left"
        )

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the latest losses.

        Raises:
            TrainingDiverged: a loss or the norm of the gradients is NaN or infinite.
        """
        for name, what in _MUST_BE_FINITE.items():
            if not math.isfinite(logs.get(name, 0)):
                raise TrainingDiverged(
                    f"the {what} is {logs[name]} at step {state.global_step}: lower training.learning_rate; "
                    "the checkpoints saved before are intact"
                )
        if "loss" in logs:
            self._loss = f"{logs['loss']:.3f}"
        if "eval_loss" in logs:
            self._bits = f"{logs['eval_bits_per_byte']:.3f} bits/byte"
        if "eval_loss" in logs and state.is_world_process_zero:
            say(
                f"step {state.global_step:>6}/{state.max_steps}  loss {self._loss}  "
                f"held-out {logs['eval_loss']:.3f} ({self._bits})  {self.tokens_per_second:,.0f} tokens/s"
            )

    def stop(self) -> None:
        """Stop the display, and show the terminal's cursor again."""
        self._counted, self._began = self.seconds, None
        self._progress.stop()


class StopOnSignal(TrainerCallback):
    """A callback that ends the training after the current step, with a checkpoint, on SIGINT or SIGTERM.

    Several processes agree on it at logging steps, at which they wait for each other anyway.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = 0.0
        self._several = False

    @contextmanager
    def listening(self, *, several_processes: bool) -> Iterator[None]:
        """A context in which the first signal is recorded and the second raises; no effect outside the main thread."""
        self._several = several_processes
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread}
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

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Request a log entry, a checkpoint and the end after a signal, unless this was the last step."""
        if self._several:
            if not control.should_log:
                return
            found = torch.tensor(self.signal or 0, device=args.device)
            distributed.all_reduce(found, distributed.ReduceOp.MAX)
            self.signal = int(found) or None
        if self.signal is not None and state.global_step < state.max_steps:
            control.should_log = control.should_save = control.should_training_stop = True


def training_arguments(config: RunConfig) -> TrainingArguments:
    """The Trainer's arguments, except those that the overrides above make redundant; this joins the other processes."""
    settings = config.training
    lowest = settings.min_learning_rate_ratio
    schedule, options = {
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": lowest}),
        "linear": ("polynomial", {"lr_end": lowest * settings.learning_rate, "power": 1.0}),
        "constant": ("constant_with_warmup", {}),
    }[settings.schedule]
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    arguments = TrainingArguments(
        output_dir=config.output,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=options,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        bf16=has_bf16 if settings.precision == "auto" else settings.precision == "bf16",
        use_cpu=not torch.accelerator.is_available(),  # otherwise Trainer refuses bf16 without an accelerator
        torch_compile=settings.compile,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,  # the filter would wait for the device in every step
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        seed=config.seed,
        train_sampling_strategy="sequential",  # the rows are shuffled already
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        # The rows of a batch become one sequence, which must not be sliced over the processes.
        ddp_find_unused_parameters=False,
        accelerator_config={"dispatch_batches": False, "split_batches": False},
        # A stream restores its position; skipping batches would tokenize all earlier text again.
        ignore_data_skip=config.data.streaming,
    )
    rows, accumulation = settings.divided(PartialState().num_processes)
    arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = rows, accumulation
    # With several GPUs and one process the Trainer uses DataParallel, which splits the batch axis; ours has length 1.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments
