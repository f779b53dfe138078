"""Models on several devices: context parallelism, and FSDP2 with parameters of two dtypes."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.distributed.context import context_parallel, local_batch
    from deltazoo.distributed.data_parallel import fully_shard_model
    from deltazoo.distributed.trainer import ContextParallelTrainer

__all__ = ["ContextParallelTrainer", "context_parallel", "fully_shard_model", "local_batch"]

__getattr__ = lazy_names(
    __name__,
    {
        "context": ("context_parallel", "local_batch"),
        "data_parallel": ("fully_shard_model",),
        "trainer": ("ContextParallelTrainer",),
    },
)
