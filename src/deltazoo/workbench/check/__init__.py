"""`deltazoo check`: what every rule of this package promises, tried on one rule, on a CPU, in under a minute."""

from deltazoo.workbench.check.rule_check import CHECKS, Finding, check_rule

__all__ = ["CHECKS", "Finding", "check_rule"]
