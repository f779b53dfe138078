"""The chunk form in functional operations of torch: for forward mode, torch.func transforms and second derivatives.

The mathematics of `chunkwise`, whose operator supports one backward pass only. Here autograd derives everything, so
more is kept for the backward pass. Chunks are short, so that a decay per key channel fits into a tensor
`[chunks, heads, C, C, K]`.
"""

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.chunk_decay import later, sooner
from deltazoo.ops.chunk_tokens import ChunkTokens
from deltazoo.ops.dtypes import wide_dtype

__all__ = ["functional_chunkwise"]

_CHUNK_SIZE = 16


def functional_chunkwise(call: RuleCall) -> tuple[Tensor, Tensor]:
    """Whole sequences by the chunk form; arguments and results as in `deltazoo.ops.delta_rule`."""
    q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, _, erase_key, undecayed, num_micro_steps = call
    with torch.autocast(v.device.type, enabled=False):
        dtype = wide_dtype(v)
        B, T = q.shape[:2]
        tokens = ChunkTokens.of(B, T, cu_seqlens, v.device, _CHUNK_SIZE, num_micro_steps)
        group = v.shape[2] // k.shape[2]
        q_chunks = tokens.chunk(q, dtype, -1).repeat_interleave(group, 1)  # [M, HV, C, K]
        k_chunks = tokens.chunk(k, dtype).repeat_interleave(group, 1)
        e_chunks = k_chunks if erase_key is None else tokens.chunk(erase_key, dtype).repeat_interleave(group, 1)
        values = tokens.chunk(v, dtype)  # [M, HV, C, V]
        decay = _Decay(values.new_zeros(values.shape[:3]) if log_decay is None else tokens.chunk(log_decay, dtype, 0))

        scores = decay.gram(scale * q_chunks, k_chunks)
        q_in, k_out = scale * decay.entry * q_chunks, decay.exit * k_chunks
        W = None
        if beta is not None:
            steps = tokens.chunk(beta, dtype)[..., None]
            eye = torch.eye(_CHUNK_SIZE, dtype=dtype, device=v.device)
            if undecayed:
                read, gram = later(decay.entry, 1.0), later(decay.gram(sooner(e_chunks), k_chunks))
            else:
                read, gram = decay.entry, decay.gram(e_chunks, k_chunks)
            mixing = eye + steps * gram.tril(-1)
            written = steps * torch.cat([values, read * e_chunks], -1)
            written = torch.linalg.solve_triangular(mixing, written, upper=False, unitriangular=True)
            values, W = written.split([v.shape[3], k.shape[3]], -1)

        N = len(tokens.order)
        state = k_chunks.new_zeros(N, v.shape[2], k.shape[3], v.shape[3])
        if initial_state is not None:
            state = initial_state[tokens.order].to(dtype)
        outputs = [values[:0]]
        for start, stop in tokens.steps:
            chunk, S = slice(start, stop), state[: stop - start]
            U = values[chunk] if W is None else values[chunk] - W[chunk] @ S
            outputs.append(q_in[chunk] @ S + scores[chunk] @ U)
            state = torch.cat([decay.total[chunk] * S + k_out[chunk].mT @ U, state[stop - start :]])
        chunked = tokens.micro_steps.flatten().argsort()[: v.shape[0] * v.shape[1]]  # of all; padding is last
        last = chunked[num_micro_steps - 1 :: num_micro_steps]
        output = torch.cat(outputs).transpose(1, 2).flatten(0, 1)[last]
        return output.unflatten(0, q.shape[:2]).to(v.dtype), state[tokens.order.argsort()]


class _Decay:
    """Decay factors in chunks, from log-decays per head `[M, HV, C]` or per key channel `[M, HV, C, K]`.

    Exponents are direct sums, as in `chunk_decay`.
    """

    def __init__(self, log_decay: Tensor) -> None:
        g = log_decay if log_decay.ndim == 4 else log_decay[..., None]  # [M, HV, C, K or 1]
        C = g.shape[2]
        pairs = torch.ones(C, C, dtype=torch.bool, device=g.device)
        later, not_earlier = pairs.tril(-1)[..., None], pairs.tril()[..., None]  # token i than token j
        between = torch.where(later, g[:, :, :, None], 0).cumsum(2)
        self.matrix = torch.where(not_earlier, between.exp(), 0)
        """`exp(G_i - G_j)` for j <= i: `[M, HV, C, C, K or 1]`."""
        self.entry = g.cumsum(2).exp()
        """`exp(G_i)`: `[M, HV, C, K or 1]`."""
        self.exit = self.matrix[:, :, -1]
        """`exp(G_C - G_i)`: `[M, HV, C, K or 1]`."""
        self.total = self.entry[:, :, -1, :, None]
        """`exp(G_C)`: `[M, HV, K or 1, 1]`."""

    def gram(self, a: Tensor, b: Tensor) -> Tensor:
        """`sum_c a_ic b_jc exp(G_i - G_j)_c` for j <= i: `[M, HV, C, C]`."""
        if self.matrix.shape[-1] == 1:
            return (a @ b.mT) * self.matrix[..., 0]
        return (a[..., :, None, :] * b[..., None, :, :] * self.matrix).sum(-1)
