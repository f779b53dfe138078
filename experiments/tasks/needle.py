"""Needle in a haystack: a short code hidden in filler, asked for at the end, symbol by symbol.

Three haystacks in the style of RULER's single needles: repeated filler and a passkey; random words and a number;
random words and a long hexadecimal code.
"""

from dataclasses import dataclass

import torch

from experiments.task import IGNORED, Batch, Task, register_task

__all__ = ["CODE", "NUMBER", "PASSKEY", "Needle"]


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Filler, `mark code` at a random position, filler, then `question code`: each symbol of the code is asked."""

    title = "needle in a haystack"
    source = (
        "S-NIAH-1/2/3 of RULER, arXiv:2404.06654, as used in arXiv:2412.06464 (there: English text, billions of tokens)"
    )

    code_length: int = 5
    num_symbols: int = 10
    filler_words: int = 16
    random_filler: bool = False

    @property
    def vocab_size(self) -> int:
        """Code symbols, filler, mark, question."""
        return self.num_symbols + self.filler_words + 2

    @property
    def num_classes(self) -> int:
        """The code's symbols."""
        return self.num_symbols

    @property
    def shortest(self) -> int:
        """Needle and question without any filler."""
        return 2 * (self.code_length + 1)

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw codes and positions."""
        self.check_length(length)
        n = self.code_length
        code = torch.randint(self.num_symbols, (batch_size, n), generator=generator)
        if self.random_filler:
            words = torch.randint(self.filler_words, (batch_size, length), generator=generator)
        else:
            words = (torch.arange(length) % self.filler_words).repeat(batch_size, 1)
        inputs = self.num_symbols + words
        mark, question = self.vocab_size - 2, self.vocab_size - 1
        start = torch.randint(length - 2 * n - 1, (batch_size, 1), generator=generator)
        needle = torch.cat([torch.full((batch_size, 1), mark), code], dim=1)
        inputs.scatter_(1, start + torch.arange(n + 1), needle)
        inputs[:, -n:] = torch.cat([torch.full((batch_size, 1), question), code[:, :-1]], dim=1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -n:] = code
        return Batch(inputs, targets, targets != IGNORED)


PASSKEY = register_task(Needle(name="needle_passkey"))
NUMBER = register_task(Needle(name="needle_number", code_length=7, filler_words=256, random_filler=True))
CODE = register_task(Needle(name="needle_code", code_length=16, num_symbols=16, filler_words=256, random_filler=True))
