"""Byte-level language modelling on the source of Python's standard library, which every machine with Python has."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from deltazoo.training.data import is_held_out, standard_library
from experiments.tasks.task import Batch, Task

_HELD_OUT = 0.05


@dataclass(frozen=True, kw_only=True)
class ByteText(Task):
    """The next byte of a window of text. Training and test windows come from different files.

    Tests grade the last `graded_bytes` of each window, so that test lengths differ in context alone.
    """

    metric = "bits"

    graded_bytes: int = 256

    @property
    def sizes(self) -> tuple[int, int]:
        return 256, 256

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw training windows."""
        return self._windows(_text()[0], batch_size, length, generator)

    def test_sample(self, condition: int | str, batch_size: int, generator: torch.Generator) -> Batch:
        """Draw windows of held-out files."""
        return self._windows(_text()[1], batch_size, int(condition), generator)

    def _windows(self, text: Tensor, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)].long()
        graded = (torch.arange(length) >= length - self.graded_bytes).expand(batch_size, length)
        return Batch(windows[:, :-1], windows[:, 1:], graded)


@cache
def _text() -> tuple[Tensor, Tensor]:
    """Training and held-out files, each concatenated as uint8."""
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for document in standard_library().documents():
        parts[is_held_out(document.split_key, _HELD_OUT)].append(document.text.encode("utf-8"))
    train, held_out = (
        torch.frombuffer(bytearray(b"\n".join(parts[part])), dtype=torch.uint8) for part in (False, True)
    )
    return train, held_out
