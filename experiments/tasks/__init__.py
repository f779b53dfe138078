"""The tasks by name; a new one is a class in one of the files and a line here."""

from experiments.tasks.byte_text import ByteText
from experiments.tasks.digits import Digits
from experiments.tasks.memory import Needle, Overwrite, Palindrome, Recall, Reset, Stack
from experiments.tasks.state_tracking import GroupWord, ModularArithmetic, Parity
from experiments.tasks.task import IGNORED, Batch, Task

__all__ = ["IGNORED", "TASKS", "Batch", "Task"]

_ALL: tuple[Task, ...] = (
    Parity(name="parity"),
    GroupWord(name="s3", group="S3"),
    GroupWord(name="s5_swaps", group="S5", swaps_only=True),
    GroupWord(name="s5", group="S5"),
    GroupWord(name="s5_slow", group="S5", tokens_per_move=4),
    GroupWord(name="a5", group="A5"),
    ModularArithmetic(name="arithmetic"),
    ModularArithmetic(name="arithmetic_brackets", multiplication=False, brackets=True),
    Recall(name="recall"),
    Recall(name="recall_large", num_pairs=64, num_keys=4096, num_values=4096),
    Recall(name="recall_long", num_pairs=256, num_keys=512, num_values=256),
    Overwrite(name="overwrite"),
    Overwrite(name="overwrite_large", num_keys=32, num_values=128, key_pool=256),
    Reset(name="reset"),
    Reset(name="reset_small", num_new=4, num_keys=32),
    Reset(name="selective_reset", num_kept=4, num_new=4),
    Palindrome(name="palindrome"),
    Stack(name="stack"),
    Stack(name="stack_large", num_stacks=64, num_symbols=64),
    Needle(name="needle_passkey"),
    Needle(name="needle_number", code_length=7, filler_words=256, random_filler=True),
    Needle(name="needle_code", code_length=16, num_symbols=16, filler_words=256, random_filler=True),
    Digits(name="digits"),
    Digits(name="digits_large", size=28, max_shift=2),
    ByteText(name="byte_text"),
)

TASKS = {task.name: task for task in _ALL}
