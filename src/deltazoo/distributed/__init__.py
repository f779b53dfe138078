"""Models on several devices: context parallelism, FSDP2 with parameters of two dtypes, tensor parallelism, plans."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.distributed.batch_pieces import local_batch
    from deltazoo.distributed.context_models import context_parallel
    from deltazoo.distributed.context_parallel_trainer import ContextParallelTrainer
    from deltazoo.distributed.data_parallel import fully_shard_model
    from deltazoo.distributed.gradient_clipping import clip_grad_norm_

__all__ = ["ContextParallelTrainer", "clip_grad_norm_", "context_parallel", "fully_shard_model", "local_batch"]

__getattr__ = lazy_names(
    __name__,
    {
        "batch_pieces": ("local_batch",),
        "context_models": ("context_parallel",),
        "context_parallel_trainer": ("ContextParallelTrainer",),
        "data_parallel": ("fully_shard_model",),
        "gradient_clipping": ("clip_grad_norm_",),
    },
)
