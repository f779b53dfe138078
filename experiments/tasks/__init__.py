"""The tasks, one file each. Importing this package registers them; a new one needs one line here, or `--load FILE`."""

from experiments.tasks import (
    arithmetic,
    byte_text,
    digits,
    groups,
    needle,
    overwrite,
    palindrome,
    parity,
    recall,
    reset,
    stack,
)

__all__ = [
    "arithmetic",
    "byte_text",
    "digits",
    "groups",
    "needle",
    "overwrite",
    "palindrome",
    "parity",
    "recall",
    "reset",
    "stack",
]
