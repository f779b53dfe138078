"""The tokens of each chunk of a batch or of packed sequences."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ChunkTokens", "most_chunks"]


@dataclass(frozen=True)
class ChunkTokens:
    """Indices of the tokens of each chunk.

    Chunks are ordered by step: the first chunk of every sequence, longest sequence first, then all second chunks, and
    so on. So the serial loop over steps reads contiguous slices.
    """

    tokens: Tensor  # [M, C], index into the flattened tokens; padding points one past the last
    steps: list[tuple[int, int]]  # slice of the chunks that step s advances
    order: Tensor  # [N], sequences by falling length
    most: int  # upper bound of M from the shapes alone

    @classmethod
    def of(cls, B: int, T: int, cu_seqlens: Tensor | None, device: torch.device, size: int) -> "ChunkTokens":
        """Chunks of `size` tokens of B rows of T tokens, or of the sequences between `cu_seqlens` in one row."""
        if cu_seqlens is None:
            starts, lengths = [b * T for b in range(B)], [T] * B
        else:
            bounds = cu_seqlens.tolist()
            starts = bounds[:-1]
            lengths = [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        sequences = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        chunks = [-(-lengths[n] // size) for n in sequences]
        order = torch.tensor(sequences, dtype=torch.long)
        start = torch.tensor([starts[n] for n in sequences], dtype=torch.long)
        length = torch.tensor([lengths[n] for n in sequences], dtype=torch.long)
        steps, tokens, first, active = [], [torch.zeros(0, size, dtype=torch.long)], 0, len(sequences)
        for s in range(max(chunks, default=0)):
            while chunks[active - 1] <= s:
                active -= 1
            offset = s * size + torch.arange(size)
            inside = offset < length[:active, None]
            tokens.append(torch.where(inside, start[:active, None] + offset, B * T))
            steps.append((first, first + active))
            first += active
        most = most_chunks(B, T, None if cu_seqlens is None else len(order), size)
        return cls(torch.cat(tokens).to(device), steps, order.to(device), most)

    def chunk(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, T, H, ...]` -> `[M, H, C, ...]`, zeros at padding."""
        flat = x.flatten(0, 1).to(dtype)
        flat = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        return flat[self.tokens].transpose(1, 2).contiguous()

    def unchunk(self, x: Tensor, like: Tensor) -> Tensor:
        """`[M, H, C, ...]` -> `[B, T, H, ...]` in the dtype of `like`, padding dropped."""
        flat = x.new_empty(like.shape[0] * like.shape[1] + 1, x.shape[1], *x.shape[3:])
        flat[self.tokens.flatten()] = x.transpose(1, 2).flatten(0, 1)
        return flat[:-1].view(like.shape).to(like.dtype)


def most_chunks(B: int, T: int, packed_sequences: int | None, size: int) -> int:
    """Upper bound of the number of chunks, from the shapes alone."""
    return B * -(-T // size) if packed_sequences is None else T // size + packed_sequences
