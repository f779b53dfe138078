"""Checks of a rule, on a CPU in under a minute, and of the kernels on this machine.

Names are imported on first access: a process that checks kernels needs no transformers, whose import takes seconds.
"""

from typing import TYPE_CHECKING

from deltazoo._lazy import lazy_names

if TYPE_CHECKING:
    from deltazoo.checks.promises import CHECKS, Finding, check_rule

__all__ = ["CHECKS", "Finding", "check_rule"]

__getattr__ = lazy_names(__name__, {"promises": __all__})
