"""transformers' own delta-rule models on our operators: `accelerate` and `restore`."""

from deltazoo.compat.transformers.switch import accelerate, has_known_layers, restore

__all__ = ["accelerate", "has_known_layers", "restore"]
