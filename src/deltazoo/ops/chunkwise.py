"""The chunk form in plain torch: matrix products instead of a token loop. Runs on a CPU, MPS or any GPU.

One chunk of C tokens with state S entering, decay as in `chunk_decay`, `o` elementwise (docs/math.md derives it):

    L = strict_lower(diag(beta) gram(e, k)),  A = (I + L)^-1
    U = A (beta o (v - (entry o e) S))                          the corrections, all tokens at once
    O = (entry o q) S + gram(q, k) U,   S' = total o S + (exit o k)^T U

The erase key e is k unless given. Read undecayed, `gram(e, k)` and `entry o e` take the decay of the row before.
The micro-steps of a token are rows of their own: log-decay 0 but at the first, q = 0 but at the last.

All but `U` and `S'` is parallel over chunks; the serial loop is two small products per chunk, forward and backward.
The inverse is a forward substitution: unlike a Neumann series over the chunk it survives repeated keys with beta 2.
Compute dtype is float32, float64 for float64 inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.chunk_decay import chunk_decay, later, sooner
from deltazoo.ops.chunk_tokens import ChunkTokens, most_chunks
from deltazoo.ops.dtypes import wide_dtype
from deltazoo.ops.functional_chunks import functional_chunkwise
from deltazoo.ops.operator import Operator
from deltazoo.ops.transforms import transforming
from deltazoo.ops.validation import check_tensor_values

__all__ = ["backward", "chunkwise", "forward"]

CHUNK_SIZE = 64


def chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    erase_key: Tensor | None,
    undecayed: bool,
    num_micro_steps: int,
) -> tuple[Tensor, Tensor]:
    """Whole sequences by the chunk form; arguments and results as in `deltazoo.ops.delta_rule`.

    With `undecayed` the erase reads the state before the decay; there is one.
    """
    inputs = (q, k, v, beta, log_decay, scale, initial_state, cu_seqlens)
    update = (erase_key, undecayed, num_micro_steps)
    if transforming():
        check_tensor_values(log_decay, cu_seqlens, q.shape[1])
        return functional_chunkwise(*inputs, *update)
    output, final, *_ = forward(*inputs, *update)
    return output, final


class _Chunks:
    """All chunk-local quantities of one call, computed in parallel over chunks, and the states entering each chunk."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        log_decay: Tensor | None,
        scale: float,
        cu_seqlens: Tensor | None,
        erase_key: Tensor | None,
        undecayed: bool,
        num_micro_steps: int,
    ) -> None:
        dtype = wide_dtype(v)
        B, T = q.shape[:2]
        self.tokens = tokens = ChunkTokens.of(B, T, cu_seqlens, v.device, CHUNK_SIZE, num_micro_steps)
        self.group = v.shape[2] // k.shape[2]
        self.q = tokens.chunk(q, dtype, -1).repeat_interleave(self.group, 1) * scale  # [M, HV, C, K]
        self.k = tokens.chunk(k, dtype).repeat_interleave(self.group, 1)
        self.e = self.k if erase_key is None else tokens.chunk(erase_key, dtype).repeat_interleave(self.group, 1)
        self.v = tokens.chunk(v, dtype)  # [M, HV, C, V]
        self.decay = chunk_decay(None if log_decay is None else tokens.chunk(log_decay, dtype, 0), self.k.ndim)
        self.sooner, self.later = (sooner, later) if undecayed else (_as_it_is, _as_it_is)
        self.P = self.decay.gram(self.q, self.k)
        entry = self.decay.entry
        self.read = later(entry, 1.0) if undecayed and isinstance(entry, Tensor) else entry
        self.e_in, self.k_out = self.read * self.e, self.decay.exit * self.k
        self.q_in = entry * self.q
        self.corrects = beta is not None
        if beta is not None:
            self.beta = tokens.chunk(beta, dtype)[..., None]  # [M, HV, C, 1]

    def solve(self, initial_state: Tensor | None) -> Tensor:
        """Inverse A, corrections U and the states S entering every chunk; returns the final states."""
        self.A, self.U = self.v.new_empty(0), self.v
        if self.corrects:
            L = self.beta * self.later(self.decay.gram(self.sooner(self.e), self.k)).tril_(-1)
            eye = torch.eye(CHUNK_SIZE, dtype=L.dtype, device=L.device)
            A = torch.linalg.solve_triangular(eye + L, eye, upper=False, unitriangular=True)
            self.A = A.contiguous()  # it comes column by column
            self.U = self.A @ (self.beta * self.v)
            W = self.W()
        (M, HV, _, K), V, N = self.k.shape, self.v.shape[-1], len(self.tokens.order)
        if initial_state is None:
            state = self.k.new_zeros(N, HV, K, V)
        else:
            state = initial_state[self.tokens.order].to(self.k.dtype)
        self.S = self.k.new_empty(M, HV, K, V)
        for start, stop in self.tokens.steps:
            chunk, active = slice(start, stop), slice(0, stop - start)
            S = self.S[chunk] = state[active]
            if self.corrects:
                self.U[chunk] -= W[chunk] @ S
            state[active] = self.total(chunk) * S + self.k_out[chunk].mT @ self.U[chunk]
        final = torch.empty_like(state)
        final[self.tokens.order] = state
        return final

    def kept(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, U and S for the backward pass, padded to the most chunks that calls of these shapes have."""
        spare = self.tokens.most - len(self.tokens.micro_steps)

        def padded(x: Tensor) -> Tensor:
            return x if spare == 0 or not x.numel() else F.pad(x, (0, 0) * 3 + (0, spare))

        return padded(self.A), padded(self.U), padded(self.S)

    def restore(self, A: Tensor, U: Tensor, S: Tensor) -> None:
        M = len(self.tokens.micro_steps)
        self.A, self.U, self.S = A[:M], U[:M], S[:M]

    def W(self) -> Tensor:
        return self.A @ (self.beta * self.e_in)

    def total(self, chunk: slice) -> Tensor | float:
        return self.decay.total if isinstance(self.decay.total, float) else self.decay.total[chunk]

    def sum_groups(self, x: Tensor) -> Tensor:
        """Sum over the value heads that share a key head: `[M, HV, ...]` -> `[M, H, ...]`."""
        return x.unflatten(1, (-1, self.group)).sum(2)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    erase_key: Tensor | None,
    undecayed: bool,
    num_micro_steps: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output and final state; then A, U and S of every chunk, which the backward pass would else compute again."""
    check_tensor_values(log_decay, cu_seqlens, q.shape[1])
    with torch.autocast(v.device.type, enabled=False):
        chunks = _Chunks(q, k, v, beta, log_decay, scale, cu_seqlens, erase_key, undecayed, num_micro_steps)
        final = chunks.solve(initial_state)
        output = chunks.q_in @ chunks.S + chunks.P @ chunks.U
        return chunks.tokens.unchunk(output, v.dtype, -1), final, *chunks.kept()


def _fake_forward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, undecayed, num_micro_steps):
    (B, T, _, K), (HV, V), C = q.shape, v.shape[2:], CHUNK_SIZE
    packed = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    M = most_chunks(B, T * num_micro_steps, packed, C)
    dtype = wide_dtype(v)
    sizes = [
        (B if packed is None else packed, HV, K, V),
        (0,) if beta is None else (M, HV, C, C),
        (M, HV, C, V),
        (M, HV, K, V),
    ]
    return v.new_empty(B, T, HV, V), *(v.new_empty(x, dtype=dtype) for x in sizes)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    erase_key: Tensor | None,
    undecayed: bool,
    num_micro_steps: int,
    A: Tensor,
    U: Tensor,
    S: Tensor,
    d_output: Tensor,
    d_final: Tensor,
) -> list[Tensor]:
    """Gradients of q, k, v, then of those of beta, log_decay, initial_state and erase_key that were given."""
    with torch.autocast(v.device.type, enabled=False):
        c = _Chunks(q, k, v, beta, log_decay, scale, cu_seqlens, erase_key, undecayed, num_micro_steps)
        c.restore(A, U, S)
        W = c.W() if c.corrects else None
        dO = c.tokens.chunk(d_output, c.k.dtype, -1)
        dU = c.P.mT @ dO
        dS_read = c.q_in.mT @ dO
        dS_out = torch.empty_like(c.S)  # gradient of the state that leaves each chunk
        d_state = d_final[c.tokens.order].to(c.k.dtype)
        for start, stop in reversed(c.tokens.steps):
            chunk, active = slice(start, stop), slice(0, stop - start)
            dS = dS_out[chunk] = d_state[active]
            dU[chunk] += c.k_out[chunk] @ dS
            dS = c.total(chunk) * dS + dS_read[chunk]
            if W is not None:
                dS -= W[chunk].mT @ dU[chunk]
            d_state[active] = dS
        d_initial = torch.empty_like(d_state)
        d_initial[c.tokens.order] = d_state

        dP = (dO @ c.U.mT).tril_()
        dq = c.decay.entry * (dO @ c.S.mT) + c.decay.rows(dP, c.k)
        d_k_out = c.decay.exit * (c.U @ dS_out.mT)
        dk = d_k_out + c.decay.columns(dP, c.q)
        if not c.corrects:
            dv, de = dU, torch.zeros_like(c.k)
        else:
            Z = c.A.mT @ dU
            dv = c.beta * Z
            dL = c.sooner(-(Z @ c.U.mT).tril_(-1))
            row = c.later(c.decay.rows(dL, c.k)) - c.read * (Z @ c.S.mT)
            dbeta = (Z * c.v).sum(-1) + (row * c.e).sum(-1)
            de = c.beta * row
            dk = dk + c.decay.columns(dL, c.sooner(c.beta * c.e))

        def unchunk(x: Tensor, like: Tensor, at: int | None = None) -> Tensor:
            return c.tokens.unchunk(x, like.dtype, at)

        dk_all = c.sum_groups(de + dk if erase_key is None else dk)
        grads = [unchunk(c.sum_groups(dq) * scale, q, -1), unchunk(dk_all, k), unchunk(dv, v)]
        if beta is not None:
            grads.append(unchunk(dbeta, beta))
        if log_decay is not None:
            tied = erase_key is None and not undecayed
            dG = c.q * dq + (c.k * (de - dk) if tied else c.sooner(c.e * de) - c.k * dk)
            dG_last = (c.decay.total * (c.S * dS_out)).sum(-1) + (c.k * d_k_out).sum(-2)
            d_log_decay = c.decay.gradient(dG, dG_last)
            assert d_log_decay is not None  # there is a decay
            grads.append(unchunk(d_log_decay, log_decay, 0))
        if initial_state is not None:
            grads.append(d_initial.to(initial_state.dtype))
        if erase_key is not None:
            grads.append(unchunk(c.sum_groups(de), erase_key))
        return grads


def _fake_backward(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, *_):
    given = [x for x in (q, k, v, beta, log_decay, initial_state, erase_key) if x is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]


def _setup_context(ctx, inputs, output) -> None:
    *tensors, scale, initial_state, cu_seqlens, erase_key, undecayed, num_micro_steps = inputs
    kept = output[2:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, initial_state, erase_key, cu_seqlens, *kept)
    ctx.options = (scale, undecayed, num_micro_steps)


def _autograd(ctx, d_output, d_final, *_):
    if torch.is_grad_enabled():  # create_graph
        return _differentiable_gradients(ctx, d_output, d_final)
    q, k, v, beta, log_decay, initial_state, erase_key, cu_seqlens, *kept = ctx.saved_tensors
    scale, *options = ctx.options
    inputs = (q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, *options)
    try:
        grads = iter(backward(*inputs, *kept, d_output, d_final))
    except RuntimeError as error:
        if "Batching rule" not in str(error):
            raise
        raise NotImplementedError(
            "chunkwise has no batched backward pass (is_grads_batched=True, vectorize=True): use torch.func.vmap over "
            "torch.func.vjp, which it has"
        ) from error
    given = (q, k, v, beta, log_decay, initial_state, erase_key)
    return _in_order_of_arguments([None if x is None else next(grads) for x in given])


def _differentiable_gradients(ctx, d_output, d_final):
    """Gradients with a graph of their own, through the forward pass once more in operations that torch derives."""
    *tensors, cu_seqlens, _A, _U, _S = ctx.saved_tensors
    # Views, since two arguments may be one tensor.
    given: list[Any] = [None if x is None else x.view_as(x) for x in tensors]
    q, k, v, beta, log_decay, initial_state, erase_key = given
    scale, *options = ctx.options
    results = functional_chunkwise(q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, erase_key, *options)
    wanted = [x for x in given if x is not None and x.requires_grad]
    # The final state does not depend on q.
    recorded = [(y, d) for y, d in zip(results, (d_output, d_final), strict=True) if y.requires_grad]
    outputs, gradients = zip(*recorded, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, materialize_grads=True))
    return _in_order_of_arguments([next(found) if x is not None and x.requires_grad else None for x in given])


def _in_order_of_arguments(grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, beta, log_decay, initial_state and erase_key -> one for every argument of the operator."""
    *first, d_initial, d_erase_key = grads
    return *first, None, d_initial, None, d_erase_key, None, None


_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? beta, Tensor? log_decay, float scale, Tensor? initial_state, "
    "Tensor? cu_seqlens, Tensor? erase_key, bool undecayed, int num_micro_steps"
)

_operator = Operator(f"chunkwise({_ARGUMENTS}) -> ({', '.join(['Tensor'] * 5)})", _forward, _fake_forward)
_operator.differentiate(_autograd, _setup_context)
forward = _operator.overload
backward = Operator(
    f"chunkwise_backward({_ARGUMENTS}, Tensor A, Tensor U, Tensor S, Tensor d_output, Tensor d_final) -> Tensor[]",
    _backward,
    _fake_backward,
).overload
