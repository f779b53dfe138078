"""Models and functions of other libraries on our operators, and checkpoints of other libraries as models of ours."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.compat import fla
    from deltazoo.compat.fla.checkpoints import load_fla_checkpoint
    from deltazoo.compat.native import export, load_native_checkpoint
    from deltazoo.compat.transformers import accelerate, restore

__all__ = ["accelerate", "export", "fla", "load_fla_checkpoint", "load_native_checkpoint", "restore"]

__getattr__ = lazy_names(
    __name__,
    {
        "transformers": ("accelerate", "restore"),
        "fla.checkpoints": ("load_fla_checkpoint",),
        "native": ("export", "load_native_checkpoint"),
    },
    subpackages=("fla",),
)
