"""Check that a rule keeps what every rule of this package promises, on a CPU, in under a minute."""

from deltazoo.checks.rule_check import CHECKS, Finding, check_rule

__all__ = ["CHECKS", "Finding", "check_rule"]
