"""Palindrome: random symbols, a mark, and then the symbols in reverse, each asked before it is shown."""

from dataclasses import dataclass

import torch

from experiments.task import IGNORED, Batch, Task, register_task

__all__ = ["PALINDROME", "Palindrome"]


@dataclass(frozen=True, kw_only=True)
class Palindrome(Task):
    """Copying backwards. A length counts symbols; the sequence is twice as long."""

    title = "palindrome"
    source = "arXiv:2510.26692, section 5.1 (synthetic tests)"
    length_is = "symbols"

    num_symbols: int = 64

    @property
    def vocab_size(self) -> int:
        """Symbols and the mark."""
        return self.num_symbols + 1

    @property
    def num_classes(self) -> int:
        """The symbols."""
        return self.num_symbols

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw symbols."""
        self.check_length(length)
        symbols = torch.randint(self.num_symbols, (batch_size, length), generator=generator)
        mark = torch.full((batch_size, 1), self.num_symbols)
        inputs = torch.cat([symbols, mark, symbols.flip(1)[:, :-1]], dim=1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, length:] = symbols.flip(1)
        return Batch(inputs, targets, targets != IGNORED)


PALINDROME = register_task(Palindrome(name="palindrome"))
