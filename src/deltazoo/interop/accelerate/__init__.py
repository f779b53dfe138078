"""transformers' own delta-rule models on our operators: `accelerate` and `restore`."""

from deltazoo.interop.accelerate.switch import accelerate, restore

__all__ = ["accelerate", "restore"]
