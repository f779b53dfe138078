"""The micro-steps in each chunk of a batch or of packed sequences; a token has one or several."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkTokens:
    """Indices of the micro-steps of each chunk.

    Chunks are ordered by step: the first chunk of every sequence, longest sequence first, then all second chunks, and
    so on. So the serial loop over steps reads contiguous slices.
    """

    micro_steps: Tensor  # [M, C], index into the flattened micro-steps; padding points one past the last
    steps: list[tuple[int, int]]  # slice of the chunks that step s advances
    order: Tensor  # [N], sequences by falling length
    most: int  # upper bound of M from the shapes alone
    shape: tuple[int, int]  # rows and tokens of a row
    num_micro_steps: int  # of each token

    @classmethod
    def of(
        cls, B: int, T: int, cu_seqlens: Tensor | None, device: torch.device, size: int, num_micro_steps: int = 1
    ) -> "ChunkTokens":
        """Chunks of `size` micro-steps of B rows of T tokens, or of the sequences between `cu_seqlens` in one row."""
        shape, T = (B, T), T * num_micro_steps
        if cu_seqlens is None:
            starts, lengths = [b * T for b in range(B)], [T] * B
        else:
            bounds = (cu_seqlens * num_micro_steps).tolist()
            starts = bounds[:-1]
            lengths = [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        sequences = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        chunks = [-(-lengths[n] // size) for n in sequences]
        order = torch.tensor(sequences, dtype=torch.long)
        start = torch.tensor([starts[n] for n in sequences], dtype=torch.long)
        length = torch.tensor([lengths[n] for n in sequences], dtype=torch.long)
        steps, micro_steps, first, active = [], [torch.zeros(0, size, dtype=torch.long)], 0, len(sequences)
        for s in range(max(chunks, default=0)):
            while chunks[active - 1] <= s:
                active -= 1
            offset = s * size + torch.arange(size)
            inside = offset < length[:active, None]
            micro_steps.append(torch.where(inside, start[:active, None] + offset, B * T))
            steps.append((first, first + active))
            first += active
        most = most_chunks(B, T, None if cu_seqlens is None else len(order), size)
        return cls(torch.cat(micro_steps).to(device), steps, order.to(device), most, shape, num_micro_steps)

    def chunk(self, x: Tensor, dtype: torch.dtype, at: int | None = None) -> Tensor:
        """x `[B, T * n, H, ...]` in chunks `[M, H, C, ...]`, zeros at padding.

        With `at`, x is `[B, T, H, ...]` and its entries go to that micro-step of their token, 0 (the first) or -1 (the
        last); the others get zeros.
        """
        flat = x.flatten(0, 1).to(dtype)
        flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        return flat[self._index(at)].transpose(1, 2).contiguous()

    def unchunk(self, x: Tensor, dtype: torch.dtype, at: int | None = None) -> Tensor:
        """x `[M, H, C, ...]` as `[B, T * n, H, ...]`, or `[B, T, H, ...]` with `at`: the reverse of `chunk`."""
        B, T = self.shape
        T = T * self.num_micro_steps if at is None else T
        flat = x.new_empty(B * T + 1, x.shape[1], *x.shape[3:])
        flat[self._index(at).flatten()] = x.transpose(1, 2).flatten(0, 1)
        return flat[:-1].view(B, T, *flat.shape[1:]).to(dtype)

    def _index(self, at: int | None) -> Tensor:
        n, (B, T) = self.num_micro_steps, self.shape
        if at is None or n == 1:
            return self.micro_steps
        return torch.where(self.micro_steps % n == at % n, self.micro_steps // n, B * T)


def most_chunks(B: int, T: int, packed_sequences: int | None, size: int) -> int:
    """Upper bound of the number of chunks of rows with T micro-steps, from the shapes alone."""
    return B * -(-T // size) if packed_sequences is None else T // size + packed_sequences
