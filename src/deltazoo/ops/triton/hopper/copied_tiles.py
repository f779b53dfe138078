"""Tensors as the tiles that the copy engine (TMA) moves for Gluon kernels."""

from torch import Tensor

from deltazoo.ops.triton.launch import Tile
from deltazoo.ops.triton.tiling import CHUNK

__all__ = ["matrix_tiles", "token_tiles"]


def token_tiles(x: Tensor, channels: int) -> Tile:
    """Tiles of a chunk of tokens by `channels` of one head, for x `[B, T, H, D]`.

    Coordinates are row of the batch, token, `head * D + channel`. Tokens beyond T are read as zero and not written.
    """
    B, T, H, D = x.shape
    return Tile(x, (B, T, H * D), (T * H * D, H * D, 1), (1, CHUNK, channels))


def matrix_tiles(x: Tensor, rows: int) -> Tile:
    """Tiles of `rows` full rows of x `[..., D]`; coordinates are the row, over all leading dimensions, and 0."""
    D = x.shape[-1]
    return Tile(x, (x.numel() // D, D), (D, 1), (rows, D))
