"""Rotary position embedding of queries and keys; `deltazoo.ops.fused.rotate` has the formula."""

from torch import Tensor

from deltazoo.layers.sequences import PackedSequences, Sequences
from deltazoo.ops import fused

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines `[B or 1, T, d]`, each angle twice: channels i and i + d/2 form a pair."""


def rotate_queries_and_keys(
    q: Tensor, k: Tensor, rotary: Rotary | None, sequences: Sequences, *, fused_kernels: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions; `rotary=None` leaves them as they are.

    Args:
        q, k: `[B, T, H, K]`, arranged by `sequences`.
        rotary: cosines and sines in the caller's order.
        fused_kernels: the argument `fused` of `takes_kernel`.

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
    return fused.rotate(q, arranged, fused=fused_kernels), fused.rotate(k, arranged, fused=fused_kernels)
