"""Models on several devices: FSDP2 with parameters of two dtypes, tensor parallelism by heads, and their plans."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.distributed.data_parallel import fully_shard_model

__all__ = ["fully_shard_model"]

__getattr__ = lazy_names(__name__, {"data_parallel": ("fully_shard_model",)})
