"""transformers' Trainer for rows that several processes share."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from transformers import Trainer

from deltazoo.distributed.context import context_parallel as share_rows
from deltazoo.distributed.context import piece_of_batch

__all__ = ["ContextParallelTrainer"]


class ContextParallelTrainer(Trainer):
    """Trainer under context parallelism: neighbouring processes compute on pieces of the same batches.

    `per_device_train_batch_size` is the batch of a group of processes, without padding. Batches, losses and gradients
    are those of Trainer on as many processes as there are groups. Evaluate with `prediction_loss_only=True`: logits are
    those of pieces.

    Args:
        args: as of Trainer.
        context_parallel: number of processes in a group.
        kwargs: as of Trainer.

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
            # Cut here, Trainer counts the labels of pieces, in every version of transformers.
            self.data_collator = partial(
                _collate_piece, self.data_collator, mesh.get_local_rank("cp"), context_parallel
            )


def _collate_piece(collate: Callable[[Any], Mapping[str, Any]], rank: int, ranks: int, rows: Any) -> dict[str, Any]:
    return piece_of_batch(collate(rows), rank, ranks)
