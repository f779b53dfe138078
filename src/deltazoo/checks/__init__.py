"""Checks of a rule, on a CPU in under a minute, and of the kernels on this machine."""

from deltazoo.checks.promises import CHECKS, Finding, check_rule

__all__ = ["CHECKS", "Finding", "check_rule"]
