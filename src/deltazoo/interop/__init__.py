"""Models, checkpoints and functions of other libraries: run on our operators, or read as ours."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.interop import fla
    from deltazoo.interop.acceleration import accelerate, restore
    from deltazoo.interop.fla_checkpoints import load_fla_checkpoint

__all__ = ["accelerate", "fla", "load_fla_checkpoint", "restore"]

__getattr__ = lazy_names(
    __name__,
    {"acceleration": ("accelerate", "restore"), "fla_checkpoints": ("load_fla_checkpoint",)},
    subpackages=("fla",),
)
