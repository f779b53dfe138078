"""Memory: recall, overwriting, forgetting, copying, stacks, needles."""

from dataclasses import dataclass

import torch

from experiments.tasks.task import IGNORED, Batch, Task, asked_alone


def _distinct(batch_size: int, pool: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`[batch_size, count]` different numbers below `pool` in random order."""
    return torch.rand(batch_size, pool, generator=generator).topk(count).indices


@dataclass(frozen=True, kw_only=True)
class Recall(Task):
    """Multi-query associative recall (Zoology, arXiv:2312.04927, with random symbols where blanks are here).

    `num_pairs` pairs of key and value, then a blank stretch with each key asked once. The gap between the pairs and a
    question follows a power law, as in text. A state of K channels per head holds about K pairs without interference:
    `num_pairs` against head dimension decides whether the task tells models apart.
    """

    num_pairs: int = 8
    num_keys: int = 64
    num_values: int = 64
    power: float = 0.1

    @property
    def sizes(self) -> tuple[int, int]:
        return self.num_keys + self.num_values + 1, self.num_values

    @property
    def shortest(self) -> int:
        return 3 * self.num_pairs

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        self.check_length(length)
        n = self.num_pairs
        keys = _distinct(batch_size, self.num_keys, n, generator)
        values = torch.randint(self.num_values, (batch_size, n), generator=generator)
        inputs = torch.full((batch_size, length), self.num_keys + self.num_values)
        inputs[:, 0 : 2 * n : 2] = keys
        inputs[:, 1 : 2 * n : 2] = self.num_keys + values
        gaps = torch.arange(1, length - 2 * n + 1).float()
        weights = gaps.pow(self.power - 1).expand(batch_size, -1)
        positions = 2 * n + torch.multinomial(weights, n, generator=generator)
        inputs.scatter_(1, positions, keys)
        return asked_alone(inputs, torch.full_like(inputs, IGNORED).scatter_(1, positions, values))


@dataclass(frozen=True, kw_only=True)
class Overwrite(Task):
    """Writes `key value` on a few keys in random order, each at least once; then every key is asked. Ours.

    Only the last value of a key counts, which separates the delta rule from linear attention: adding the new value
    leaves the old ones in place. A length counts writes.
    """

    num_keys: int = 6
    num_values: int = 16
    key_pool: int = 16

    @property
    def sizes(self) -> tuple[int, int]:
        return self.key_pool + self.num_values + 1, self.num_values  # the last symbol marks the questions

    @property
    def shortest(self) -> int:
        return self.num_keys

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        self.check_length(length)
        n = self.num_keys
        keys = _distinct(batch_size, self.key_pool, n, generator)
        slots = torch.randint(n, (batch_size, length), generator=generator)
        first = _distinct(batch_size, length, n, generator)
        slots.scatter_(1, first, torch.arange(n).expand(batch_size, n))
        values = torch.randint(self.num_values, (batch_size, length), generator=generator)

        order = torch.arange(length).expand(batch_size, length)
        is_slot = slots[:, None] == torch.arange(n)[:, None]
        last = torch.where(is_slot, order[:, None], -1).amax(-1)
        asked = torch.rand(batch_size, n, generator=generator).argsort(1)

        writes = torch.stack([keys.gather(1, slots), self.key_pool + values], dim=2).flatten(1)
        mark = torch.full((batch_size, 1), self.sizes[0] - 1)
        inputs = torch.cat([writes, mark, keys.gather(1, asked)], dim=1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -n:] = values.gather(1, last).gather(1, asked)
        return asked_alone(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class Reset(Task):
    """`length` void pairs and `num_kept` kept ones in random order, a mark, `num_new` new pairs, the questions. Ours.

    A decay gate can clear the state at the mark; the delta rule alone has to overwrite what interferes. Where some
    pairs before the mark stay valid, clearing everything is wrong too. Void and new pairs use the same keys; kept ones
    have keys of their own, so that a pair alone shows whether it survives.
    """

    num_new: int = 8
    num_kept: int = 0
    num_keys: int = 64
    num_values: int = 16

    @property
    def sizes(self) -> tuple[int, int]:
        return 2 * self.num_keys + self.num_values + 2, self.num_values  # the last two: the mark, then the questions'

    def check_length(self, length: int) -> None:
        """Void pairs have distinct keys."""
        super().check_length(length)
        if length > self.num_keys:
            raise ValueError(
                f"task {self.name!r} has {self.num_keys} keys, so at most as many void pairs, got {length}"
            )

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        self.check_length(length)
        void = _distinct(batch_size, self.num_keys, length, generator)
        kept = self.num_keys + _distinct(batch_size, self.num_keys, self.num_kept, generator)
        before = torch.cat([void, kept], dim=1)
        before = before.gather(1, torch.rand(before.shape, generator=generator).argsort(1))
        new = _distinct(batch_size, self.num_keys, self.num_new, generator)
        values = torch.randint(self.num_values, (batch_size, before.shape[1] + self.num_new), generator=generator)

        pairs = torch.stack([torch.cat([before, new], dim=1), 2 * self.num_keys + values], dim=2)
        split = before.shape[1]
        asked = torch.cat([kept, new], dim=1)
        asked = asked.gather(1, torch.rand(asked.shape, generator=generator).argsort(1))
        symbols = self.sizes[0]
        marks = torch.tensor([symbols - 2, symbols - 1]).expand(batch_size, 2)
        inputs = torch.cat(
            [pairs[:, :split].flatten(1), marks[:, :1], pairs[:, split:].flatten(1), marks[:, 1:], asked], dim=1
        )
        # Of two pairs with one key the later counts: a void key may come back as a new one.
        position = torch.where(pairs[:, None, :, 0] == asked[..., None], torch.arange(pairs.shape[1]), -1).amax(-1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -asked.shape[1] :] = values.gather(1, position)
        return asked_alone(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class Palindrome(Task):
    """Random symbols, a mark, then the symbols in reverse, each asked before it is shown (arXiv:2510.26692, 5.1).

    A length counts symbols; the sequence is twice as long.
    """

    num_symbols: int = 64

    @property
    def sizes(self) -> tuple[int, int]:
        return self.num_symbols + 1, self.num_symbols

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        self.check_length(length)
        symbols = torch.randint(self.num_symbols, (batch_size, length), generator=generator)
        mark = torch.full((batch_size, 1), self.num_symbols)
        inputs = torch.cat([symbols, mark, symbols.flip(1)[:, :-1]], dim=1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, length:] = symbols.flip(1)
        return asked_alone(inputs, targets)


@dataclass(frozen=True, kw_only=True)
class Stack(Task):
    """Pushes and pops on many stacks at once; what comes off is asked before it is shown (arXiv:2510.26692, 5.1).

    Every operation is two symbols: "push on i" or "pop i", then the element. A length counts operations.
    """

    num_stacks: int = 8
    num_symbols: int = 16

    @property
    def sizes(self) -> tuple[int, int]:
        return 2 * self.num_stacks + self.num_symbols, self.num_symbols

    @property
    def shortest(self) -> int:
        return 2

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw operations: a pop with probability one half where the stack is not empty."""
        self.check_length(length)
        rows = torch.arange(batch_size)
        which = torch.randint(self.num_stacks, (batch_size, length), generator=generator)
        pops = torch.rand(batch_size, length, generator=generator) < 0.5
        pushed = torch.randint(self.num_symbols, (batch_size, length), generator=generator)
        heights = torch.zeros(batch_size, self.num_stacks, dtype=torch.long)
        contents = torch.zeros(batch_size, self.num_stacks, length + 1, dtype=torch.long)
        elements, popped = [], []
        for t in range(length):
            stack, symbol = which[:, t], pushed[:, t]
            height = heights[rows, stack]
            pop = pops[:, t] & (height > 0)
            element = torch.where(pop, contents[rows, stack, (height - 1).clamp(min=0)], symbol)
            contents[rows, stack, height] = symbol
            heights[rows, stack] = torch.where(pop, height - 1, height + 1)
            elements.append(element)
            popped.append(pop)
        element, pop = torch.stack(elements, dim=1), torch.stack(popped, dim=1)
        operation = torch.where(pop, self.num_stacks + which, which)
        inputs = torch.stack([operation, 2 * self.num_stacks + element], dim=2).flatten(1)
        asked = torch.where(pop, element, IGNORED)
        return asked_alone(inputs, torch.stack([asked, torch.full_like(asked, IGNORED)], dim=2).flatten(1))


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Filler, `mark code` at a random position, filler, then `question code`: each symbol of the code is asked.

    In the style of S-NIAH-1/2/3 of RULER (arXiv:2404.06654): repeated filler and a passkey, random words and a number,
    random words and a long hexadecimal code.
    """

    code_length: int = 5
    num_symbols: int = 10
    filler_words: int = 16
    random_filler: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        return self.num_symbols + self.filler_words + 2, self.num_symbols  # the last two: mark, question

    @property
    def shortest(self) -> int:
        return 2 * (self.code_length + 1)

    def sample(self, batch_size: int, length: int, generator: torch.Generator) -> Batch:
        self.check_length(length)
        n = self.code_length
        code = torch.randint(self.num_symbols, (batch_size, n), generator=generator)
        if self.random_filler:
            words = torch.randint(self.filler_words, (batch_size, length), generator=generator)
        else:
            words = (torch.arange(length) % self.filler_words).repeat(batch_size, 1)
        inputs = self.num_symbols + words
        mark, question = self.sizes[0] - 2, self.sizes[0] - 1
        start = torch.randint(length - 2 * n - 1, (batch_size, 1), generator=generator)
        needle = torch.cat([torch.full((batch_size, 1), mark), code], dim=1)
        inputs.scatter_(1, start + torch.arange(n + 1), needle)
        inputs[:, -n:] = torch.cat([torch.full((batch_size, 1), question), code[:, :-1]], dim=1)
        targets = torch.full_like(inputs, IGNORED)
        targets[:, -n:] = code
        return asked_alone(inputs, targets)
