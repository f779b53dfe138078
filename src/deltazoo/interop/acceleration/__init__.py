"""transformers' own delta-rule models on our operators: `accelerate` and `restore`."""

from deltazoo.interop.acceleration.switch import accelerate, restore

__all__ = ["accelerate", "restore"]
