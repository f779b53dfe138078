"""The chunk form in plain torch: matrix products instead of a token loop. Runs on a CPU, MPS or any GPU.

One chunk of C tokens with state S entering, decay as in `decay`, `o` elementwise (docs/math.md derives it):

    L = strict_lower(diag(beta) gram(e, k)),  A = (I + L)^-1
    U = A (beta o (v - (entry o e) S))                          the corrections, all tokens at once
    O = (entry o q) S + gram(q, k) U,   S' = total o S + (exit o k)^T U

The erase key e is k unless given. With the undecayed read `gram(e, k)` and `entry o e` take the decay of the row
before. The micro-steps of a token are rows of their own: log-decay 0 except in the first, q = 0 except in the last.

Everything except `U` and `S'` is parallel over chunks; the serial loop is two small products per chunk, forward and
backward. The inverse is a forward substitution: unlike a Neumann series over the chunk it is stable with repeated keys
and beta 2.
Compute dtype is float32, float64 for float64 inputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.call import SCHEMA, RuleCall
from deltazoo.ops.chunkwise.decay import chunk_decay, later, sooner
from deltazoo.ops.chunkwise.tokens import ChunkTokens, most_chunks
from deltazoo.ops.dtypes import wide_dtype
from deltazoo.ops.operator import Operator
from deltazoo.ops.reference import gradients_of_loop
from deltazoo.ops.validation import check_tensor_values

CHUNK_SIZE = 64


def chunkwise(call: RuleCall) -> tuple[Tensor, Tensor]:
    """Output `[B, T, HV, V]` and final state `[N, HV, K, V]` of whole sequences, by the chunk form."""
    output, final, *_ = forward.overload(*call)
    return output, final


class _Chunks:
    """All chunk-local quantities of one call, computed in parallel over chunks, and the states entering each chunk."""

    def __init__(self, call: RuleCall) -> None:
        q, k, v, beta, log_decay, scale, _, cu_seqlens, _, erase_key, undecayed, num_micro_steps = call
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
            self.A = A.contiguous()  # torch returns it column by column
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
        """A, U and S for the backward pass, padded to the most chunks of calls with these shapes."""
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


def _forward(*arguments):
    """Output and final state; then A, U and S of every chunk, which the backward pass would otherwise compute again."""
    call = RuleCall(*arguments)
    check_tensor_values(call.log_decay, call.cu_seqlens, call.q.shape[1])
    with torch.autocast(call.v.device.type, enabled=False):
        chunks = _Chunks(call)
        final = chunks.solve(call.initial_state)
        output = chunks.q_in @ chunks.S + chunks.P @ chunks.U
        return chunks.tokens.unchunk(output, call.v.dtype, -1), final, *chunks.kept()


def _fake_forward(*arguments):
    q, _, v, beta, _, _, _, cu_seqlens, _, _, _, num_micro_steps = arguments
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


def _backward(*arguments):
    """Gradients of q, k, v, then of those of beta, log_decay, initial_state and erase_key that were given."""
    call = RuleCall(*arguments[:-5])
    A, U, S, d_output, d_final = arguments[-5:]
    q, k, v, beta, log_decay, scale, initial_state, _, _, erase_key, undecayed, _ = call
    with torch.autocast(v.device.type, enabled=False):
        c = _Chunks(call)
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


def _fake_backward(*arguments):
    given = [x for x in RuleCall(*arguments[:-5]).differentiable if x is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]


def _setup_context(ctx, inputs, output) -> None:
    call, kept = RuleCall(*inputs), output[2:]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*call.differentiable, call.cu_seqlens, *kept)
    ctx.options = call.options


def _autograd(ctx, d_output, d_final, *_):
    *tensors, cu_seqlens, A, U, S = ctx.saved_tensors
    call = RuleCall.of(tensors, cu_seqlens, ctx.options)
    if torch.is_grad_enabled():  # create_graph: autograd differentiates the token loop any number of times
        return RuleCall.in_order(gradients_of_loop(call, d_output, d_final, create_graph=True))
    try:
        return RuleCall.in_order(gradients(call, (A, U, S), d_output, d_final))
    except RuntimeError as error:
        if "Batching rule" not in str(error):
            raise
        raise NotImplementedError(
            "chunkwise has no batched backward pass (is_grads_batched=True, vectorize=True): use torch.func.vmap over "
            "torch.func.vjp, which it has"
        ) from error


forward = Operator(f"chunkwise({SCHEMA}) -> ({', '.join(['Tensor'] * 5)})", _forward, _fake_forward)
forward.differentiate(_autograd, _setup_context)
backward = Operator(
    f"chunkwise_backward({SCHEMA}, Tensor A, Tensor U, Tensor S, Tensor d_output, Tensor d_final) -> Tensor[]",
    _backward,
    _fake_backward,
)


def gradients(
    call: RuleCall, kept: tuple[Tensor | None, ...], d_output: Tensor, d_final: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients of `call.differentiable` from the three tensors that `forward` kept; None for arguments not given."""
    found = iter(backward.overload(*call, *kept, d_output, d_final))
    return tuple([None if x is None else next(found) for x in call.differentiable])
