"""transformers' Trainer for rows that several processes share, and for models whose parameters they share (FSDP2)."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed import checkpoint as sharded_files
from torch.distributed.checkpoint import state_dict as gathered
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from deltazoo.distributed.context import context_parallel as share_rows
from deltazoo.distributed.context import piece_of_batch
from deltazoo.distributed.data_parallel import fully_shard_model


class ContextParallelTrainer(Trainer):
    """A Trainer under context parallelism: neighbouring processes compute on pieces of the same batches.

    `per_device_train_batch_size` is the batch of a group of processes, without padding. Batches, losses and gradients
    equal those of Trainer on as many processes as there are groups. Evaluate with `prediction_loss_only=True`, since
    logits are those of pieces.

    Args:
        args: arguments of Trainer.
        context_parallel: number of processes in a group.
        kwargs: keyword arguments of Trainer.

    Raises:
        ValueError: the processes do not form groups of that size.
    """

    def __init__(self, *args: Any, context_parallel: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        processes = self.args.world_size
        if context_parallel < 1 or processes % context_parallel:
            raise ValueError(f"context_parallel={context_parallel} does not divide the {processes} processes")
        if context_parallel > 1:
            shape = (processes // context_parallel, context_parallel)
            mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
            self.accelerator.state.device_mesh = mesh  # accelerate's data loader gives a group the same rows
            assert self.model is not None
            share_rows(self.model, mesh["cp"])
            # The collator cuts, so that every version of transformers counts the labels of pieces.
            self.data_collator = partial(
                _collate_piece, self.data_collator, mesh.get_local_rank("cp"), context_parallel
            )


def _collate_piece(collate: Callable[[Any], Mapping[str, Any]], rank: int, ranks: int, rows: Any) -> dict[str, Any]:
    return piece_of_batch(collate(rows), rank, ranks)


class ShardedTrainer(ContextParallelTrainer):
    """A Trainer that divides parameters, gradients and optimizer among all processes, gates in float32 (FSDP2).

    accelerate's own FSDP2 has one dtype for all parameters of a module, which would round gates. A checkpoint of any
    number of processes continues in any other number.

    Args:
        args: arguments of Trainer.
        fully_shard: whether to divide; one process divides nothing.
        kwargs: keyword arguments of `ContextParallelTrainer`.
    """

    def __init__(self, *args: Any, fully_shard: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shards = fully_shard and self.args.world_size > 1

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The sharded model, in place of accelerate's own wrapper."""
        if not self._shards:
            return super()._wrap_model(model, *args, **kwargs)
        if isinstance(model, _Sharded):
            return model
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.args.bf16 else None, reduce_dtype=torch.float32
        )
        fully_shard_model(self.model, mp_policy=policy)  # type: ignore[arg-type]
        self.optimizer = None  # Trainer's optimizer holds the whole parameters
        self.create_optimizer()
        return _Sharded(self.model)  # type: ignore[arg-type]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = super()._clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model, as safetensors; every process must call this."""
        if not self._shards:
            super().save_model(output_dir, _internal_call)
            return
        options = gathered.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = gathered.get_model_state_dict(self.model, options=options)  # type: ignore[arg-type]
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._shards:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharded_files.save(self._optimizer_state(), checkpoint_id=_shards_of(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)  # type: ignore[union-attr]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self._shards or _shards_of(checkpoint).is_dir()):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        whole = not _shards_of(checkpoint).is_dir()
        if whole:
            saved = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
            state = self._by_name(saved)
        else:
            state = self._optimizer_state()
            sharded_files.load(state, checkpoint_id=_shards_of(checkpoint))
        gathered.set_optimizer_state_dict(
            self.model,  # type: ignore[arg-type]
            self._optimizer,
            state,
            options=gathered.StateDictOptions(full_state_dict=whole),
        )
        rates = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(rates)  # type: ignore[union-attr]

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert isinstance(self.optimizer, AcceleratedOptimizer)
        return self.optimizer.optimizer

    def _optimizer_state(self) -> dict[str, Any]:
        return gathered.get_optimizer_state_dict(self.model, self._optimizer)  # type: ignore[arg-type]

    def _by_name(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A state dict of an optimizer with the parameters' names in place of their numbers."""
        named = {parameter: name for name, parameter in self.model.named_parameters()}  # type: ignore[union-attr]
        names = [named[parameter] for group in self._optimizer.param_groups for parameter in group["params"]]
        groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
        return {"state": {names[number]: x for number, x in saved["state"].items()}, "param_groups": groups}


class _Sharded(nn.Module):
    """A model that FSDP2 has sharded, wrapped so that Trainer does not recognise it and leaves it alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model."""
        return self.module(*args, **kwargs)


def _shards_of(checkpoint: str) -> Path:
    """Folder in a checkpoint that holds every process's share of the optimizer's state."""
    return Path(checkpoint) / "optimizer"
