"""Models on several devices: context parallelism, FSDP2 with parameters of two dtypes, tensor parallelism, plans."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.distributed.context_parallel import context_parallel
    from deltazoo.distributed.data_parallel import fully_shard_model
    from deltazoo.distributed.local_batch import local_batch

__all__ = ["context_parallel", "fully_shard_model", "local_batch"]

__getattr__ = lazy_names(
    __name__,
    {
        "context_parallel": ("context_parallel",),
        "data_parallel": ("fully_shard_model",),
        "local_batch": ("local_batch",),
    },
)
