"""transformers' Trainer for rows that several processes share."""

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Trainer

from deltazoo.distributed import context_parallel as share_rows
from deltazoo.distributed import local_batch

__all__ = ["ContextParallelTrainer"]


class ContextParallelTrainer(Trainer):
    """Trainer under context parallelism: neighbouring processes compute on pieces of the same batches.

    `per_device_train_batch_size` is the batch of a group of processes. Batches, losses and gradients are those of
    Trainer on as many processes as there are groups. Evaluate with `prediction_loss_only=True`: logits are those of
    pieces.

    Args:
        args: as of Trainer.
        context_parallel: number of processes in a group.
        kwargs: as of Trainer.

    Raises:
        ValueError: the processes do not form groups of that size.
    """

    def __init__(self, *args: Any, context_parallel: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: DeviceMesh | None = None
        processes = self.args.world_size
        if context_parallel < 1 or processes % context_parallel:
            raise ValueError(f"context_parallel={context_parallel} does not divide the {processes} processes")
        if context_parallel > 1:
            shape = (processes // context_parallel, context_parallel)
            mesh = init_device_mesh(self.args.device.type, shape, mesh_dim_names=("dp_replicate", "cp"))
            self.accelerator.state.device_mesh = mesh  # accelerate's data loader gives a group the same rows
            self._group = mesh["cp"]
            assert self.model is not None
            share_rows(self.model, self._group)

    def get_cp_size(self) -> int:
        """Processes with the same batch, whose tokens Trainer counts once."""
        return 1 if self._group is None else self._group.size()

    def piece(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This process's tokens of a batch."""
        return dict(batch) if self._group is None else local_batch(batch, self._group)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return super()._prepare_inputs(self.piece(inputs))
