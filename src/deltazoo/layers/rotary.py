"""Rotary position embedding of queries and keys (arXiv:2104.09864), the half-split form of Llama."""

import torch
from torch import Tensor

from deltazoo.layers.sequences import PackedSequences, Sequences
from deltazoo.ops.fused import fused_kernels_fit, fused_rotary

__all__ = ["Rotary", "rotate", "rotate_queries_and_keys"]

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines `[B or 1, T, d]`, each angle twice: channels i and i + d/2 form a pair."""


def rotate(x: Tensor, rotary: Rotary, *, fused: bool | None = None) -> Tensor:
    """Turn the first d channels of `[B, T, H, K]` by their angles, in x's dtype; channels from d on stay.

    Args:
        x, rotary: see above.
        fused: in a Triton kernel; None: wherever it runs, and plain torch elsewhere.
    """
    if fused is None:
        fused = all(map(fused_kernels_fit, (x, *rotary))) and not any(part.requires_grad for part in rotary)
    if fused:
        return fused_rotary(x, *rotary)
    cos, sin = (part[:, :, None].to(x.dtype) for part in rotary)
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def rotate_queries_and_keys(
    q: Tensor, k: Tensor, rotary: Rotary | None, sequences: Sequences, *, fused: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Turn both; None leaves them as they are.

    Args:
        q, k: `[B, T, H, K]`, arranged by `sequences`.
        rotary: cosines and sines in the caller's order.
        sequences: of the batch.
        fused: as of `rotate`.

    Raises:
        ValueError: cosines and sines do not fit the tokens or the heads.
    """
    if rotary is None:
        return q, k
    rows = sequences.num_rows if isinstance(sequences, PackedSequences) else 1
    batch_size, num_tokens, channels = q.shape[0] * rows, q.shape[1] // rows, rotary[0].shape[-1]
    fits = channels % 2 == 0 and channels <= q.shape[-1]
    for x in rotary:  # sizes may be symbolic
        fits = fits and x.ndim == 3 and (x.shape[0] == 1 or x.shape[0] == batch_size)
        fits = fits and x.shape[1] == num_tokens and x.shape[2] == channels
    if not fits:
        raise ValueError(
            f"rotary must be cosines and sines [{batch_size} or 1, {num_tokens}, d] with an even d of at most "
            f"{q.shape[-1]}, got {' and '.join(str(tuple(x.shape)) for x in rotary)}"
        )
    arranged = sequences.arrange(rotary[0]), sequences.arrange(rotary[1])
    return rotate(q, arranged, fused=fused), rotate(k, arranged, fused=fused)
