"""Models, layers and checkpoints of other libraries: run on our operators, or read as ours."""

from deltazoo._lazy import lazy_names

__getattr__ = lazy_names(__name__, {}, ("accelerate",))
