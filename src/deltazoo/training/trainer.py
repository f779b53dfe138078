"""The HF Trainer for packed rows: our optimizer groups, an exact validation loss, atomic checkpoints, several GPUs."""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerControl, TrainerState

from deltazoo.compat.transformers import has_known_layers
from deltazoo.diagnosis import DiagnoseCallback
from deltazoo.distributed import ContextParallelTrainer, fully_shard_model
from deltazoo.layers import parameter_groups
from deltazoo.training.checkpoint_files import refuse_damaged, remove_oldest, unfinished, whole_or_not_at_all
from deltazoo.training.config import RunConfig
from deltazoo.training.console import say
from deltazoo.training.evaluate import score_rows
from deltazoo.training.interruption import StopOnSignal, TrainingInterrupted
from deltazoo.training.monitor import Monitor
from deltazoo.training.native_model import write_served_names
from deltazoo.training.packed_rows import collate
from deltazoo.training.schedule import learning_rate_factor
from deltazoo.training.sharded_state import is_sharded, load_optimizer, save_optimizer, whole_model
from deltazoo.training.streamed_rows import StreamedRows

_STREAM_POSITION = "stream_position.json"


class PackedTrainer(ContextParallelTrainer):
    """Trains on packed rows. What is not overridden here is the unmodified Trainer."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: RunConfig,
        arguments: TrainingArguments,
        train_rows: Dataset | IterableDataset,
        validation_rows: Sequence[dict[str, np.ndarray]],
        bytes_per_token: float,
        collate_rows: Callable[..., dict[str, Any]] = collate,
    ) -> None:
        """``bytes_per_token`` of the held-out text converts the validation loss to bits per byte."""
        self._rows_per_step = config.training.rows_of_a_step
        self._rows, self._accumulation = config.training.divided(arguments.world_size)
        self._shards = config.training.fully_shard and arguments.world_size > 1
        if config.training.fully_shard and not self._shards:  # a divided run may go on in one process
            say("training.fully_shard divides nothing in one process: torchrun starts several")
        self.monitor = Monitor(tokens_per_step=self._rows_per_step * config.training.row_length)
        self._stop = StopOnSignal()
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=train_rows,
            eval_dataset=list(validation_rows),
            data_collator=collate_rows,
            processing_class=tokenizer,
            callbacks=[self.monitor, self._stop],
            context_parallel=config.training.context_parallel,
        )
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        self._settings, self._bytes_per_token = config.training, bytes_per_token
        self._model, self._validation_rows = model, validation_rows
        self._output, self._saving_below = config.output, Path(config.output)
        if self._settings.diagnose_every is not None:
            batch = collate_rows(validation_rows[: config.training.rows_per_batch])
            self.add_callback(_PausedDiagnosis(self, batch, self._settings.diagnose_every))

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, tied ones counted once."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW over the two parameter groups."""
        if self.optimizer is None:
            groups = parameter_groups(model or self._model, self._settings.weight_decay)
            self.optimizer = torch.optim.AdamW(
                groups, lr=self._settings.learning_rate, betas=self._settings.betas, fused=True
            )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LambdaLR:
        """The schedule of the configuration, whose steps equal ``num_training_steps``."""
        if self.lr_scheduler is None:
            factor = partial(learning_rate_factor, settings=self._settings)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)  # type: ignore[arg-type]
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Shard the model, if the configuration says so, instead of leaving it to accelerate."""
        if not self._shards:
            return super()._wrap_model(model, *args, **kwargs)
        if isinstance(model, _Sharded):
            return model
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.args.bf16 else None, reduce_dtype=torch.float32
        )
        fully_shard_model(self._model, mp_policy=policy)
        self.optimizer = None  # the one that Trainer has made holds the whole parameters
        self.create_optimizer()
        return _Sharded(self._model)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train from the beginning or from a checkpoint; after the last step only load the checkpoint.

        Raises:
            ValueError: a file of the checkpoint is damaged or missing.
            TrainingInterrupted: SIGINT or SIGTERM came; a checkpoint was saved unless a second signal came.
        """
        if resume_from_checkpoint:
            checkpoint = Path(str(resume_from_checkpoint))
            refuse_damaged(checkpoint)
            reached = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            if reached.global_step >= self._settings.steps:  # the Trainer's loop would go on with a stream
                self.state = reached
                self._load_whole(checkpoint)
                return None
            if isinstance(self.train_dataset, StreamedRows):
                self.train_dataset.go_to(json.loads((checkpoint / _STREAM_POSITION).read_text(encoding="utf-8")))
        try:
            with self._stop.listening(several_processes=self.args.world_size > 1):
                output = super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.monitor.stop()
        if self._stop.signal is not None and self.state.global_step < self.state.max_steps:
            saved = Path(self._output) / f"checkpoint-{self.state.global_step}"
            raise TrainingInterrupted(self._stop.signal, saved)
        return output

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As Trainer, which expects files with the names of the parameters; transformers' models save others."""
        if has_known_layers(self._model):
            self._load_whole(Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_whole(self, checkpoint: Path) -> None:
        self._model.load_state_dict(AutoModelForCausalLM.from_pretrained(checkpoint).state_dict())

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's loss, with the load balancing loss of experts as a mean over the forward passes of a step.

        Cross-entropies are sums over all tokens of a step, divided by their number. A model that adds its load
        balancing loss to each would have it as often as there are forward passes.
        """
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        balancing = outputs.get("aux_loss")
        if balancing is not None and num_items_in_batch is not None:
            too_much = self.accelerator.num_processes - 1 / self._accumulation
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
            passes = math.ceil(math.ceil(len(self._validation_rows) / groups) / self._rows)
            found = score_rows(
                self._model,
                share,
                self._rows,
                self.data_collator,
                empty_passes=[self._validation_rows[0]] * passes if self._shards else (),
            )
            sums = torch.tensor(found, dtype=torch.float32)
            sums = self.accelerator.reduce(sums.to(self.args.device), reduction="sum").cpu()
        loss = float(sums[0] / sums[1])
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_bits_per_byte": loss / math.log(2) / self._bytes_per_token,
        }
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Write the Trainer's checkpoint to a temporary folder and rename it when it is complete."""
        target = Path(self._output) / f"checkpoint-{self.state.global_step}"
        first = self.args.should_save
        with self.monitor.pause():
            with whole_or_not_at_all(target) if first else nullcontext(unfinished(target)) as staging:
                self.accelerator.wait_for_everyone()
                self._saving_below = staging.parent
                super()._save_checkpoint(model, trial)
                if first and isinstance(self.train_dataset, StreamedRows):
                    position = self.train_dataset.position_after(self.state.global_step * self._rows_per_step)
                    (staging / _STREAM_POSITION).write_text(json.dumps(position), encoding="utf-8")
                self.accelerator.wait_for_everyone()
            if first:
                remove_oldest(target.parent, self._settings.keep_checkpoints)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, as safetensors; every process must call this."""
        self._model.config.use_cache = True  # Trainer has turned it off, for training
        try:
            if self._shards:
                state = whole_model(self._model)
                if self.args.should_save:
                    self._save(output_dir, state_dict=state)
            else:
                super().save_model(output_dir, _internal_call)
        finally:
            self._model.config.use_cache = self.args.use_cache
        if self.args.should_save and has_known_layers(self._model):
            write_served_names(self._model, Path(output_dir or self._output))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._shards:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert isinstance(self.optimizer, AcceleratedOptimizer) and self.lr_scheduler is not None
        save_optimizer(self._model, self.optimizer.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self._shards or is_sharded(Path(checkpoint))):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert isinstance(self.optimizer, AcceleratedOptimizer) and self.lr_scheduler is not None
        load_optimizer(self._model, self.optimizer.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._saving_below)


class _PausedDiagnosis(DiagnoseCallback):
    """Its time does not count as training."""

    def measure(self, model: nn.Module | None, control: TrainerControl) -> None:
        """Diagnose the model and log the summary."""
        with self.trainer.monitor.pause():  # type: ignore[attr-defined]
            super().measure(model, control)


class _Sharded(nn.Module):
    """A model that FSDP2 has sharded. Trainer leaves alone what it does not recognise as its own model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)


def training_arguments(config: RunConfig) -> TrainingArguments:
    """The Trainer's arguments, without those that the overrides above make redundant; joins the other processes."""
    settings = config.training
    arguments = TrainingArguments(
        output_dir=config.output,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        max_grad_norm=settings.max_grad_norm,
        bf16=use_bf16(settings.precision),
        use_cpu=not torch.accelerator.is_available(),  # otherwise bf16 without an accelerator is refused
        torch_compile=settings.compile,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_strategy="steps",
        save_steps=settings.save_every,
        seed=config.seed,
        train_sampling_strategy="sequential",  # the rows are shuffled already
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
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


def use_bf16(precision: str) -> bool:
    """Whether to train under bf16 autocast; ``auto`` does on a GPU that supports it."""
    if precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return precision == "bf16"
