"""Our models in the formats of transformers' own delta-rule models, and back, and in the format of fla-hub."""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.compat.native.checkpoints import ExportCheck, export, load_native_checkpoint

__all__ = ["ExportCheck", "export", "load_native_checkpoint"]

__getattr__ = lazy_names(__name__, {"checkpoints": ("ExportCheck", "export", "load_native_checkpoint")})
