"""Programs built on the library: training, evaluation, conversion, checks, benchmarks, the lab, the command line.

The library imports nothing from here.
"""

from deltazoo._lazy import lazy_names

__getattr__ = lazy_names(__name__, {}, ("bench", "check", "cli", "convert", "evaluate", "lab", "train"))
