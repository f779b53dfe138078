"""Figures of a layer's call of the operator, per value head: erase gain, decay, state, growth, gates."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from deltazoo.diagnosis.rule_calls import RecordedCall
from deltazoo.layers import PackedSequences, RightPaddedSequences, RuleInputs, run_rule
from deltazoo.ops.dtypes import at_least_float32

CHUNK = 64
"""Number of tokens in a measured product of transitions, and between two measurements of the state."""
NEAR_EXPANSION = -0.9
"""Eigenvalue along the key below which a token counts as near expansion."""
_SATURATED = 0.01
"""Distance from an end of its range within which a gate is saturated."""
_SQUARINGS = 14


class Quantiles(NamedTuple):
    """Quantiles of the values of one figure."""

    min: float
    p5: float
    p25: float
    median: float
    p75: float
    p95: float
    max: float


_LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class GateShares(NamedTuple):
    """Shares of tokens (and channels) whose gate of one kind is within 1% of an end of its range."""

    shut: float
    """Share near zero. A SiLU gate is shut where its sigmoid is."""
    open: float | None
    """Share near the upper bound; None for a gate without one (SiLU)."""

    @property
    def saturated(self) -> float:
        """Share at either end."""
        return self.shut + (self.open or 0.0)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of one value head over the tokens of a batch, without padding."""

    gain: Quantiles | None = None
    """Erase gain `beta * (e . k)`, the share that a token erases of the value under its key, over tokens and
    micro-steps. None for rules that do not erase."""
    gain_above_one: float | None = None
    """Share of tokens with a gain above 1, which changes the sign along the key."""
    eigenvalue: Quantiles | None = None
    """Factor by which a token multiplies the state along its key: `decay * (1 - gain)`, or `decay - gain` for rules
    that read before the decay. Below -1 or above 1 the state expands."""
    near_expansion: float | None = None
    """Share of tokens whose factor is below `NEAR_EXPANSION` = -0.9."""
    near_expansion_decay: float | None = None
    """Mean decay factor along the key on those tokens; None if there is none."""
    half_life: Quantiles | None = None
    """Tokens after which the decay alone has halved the state, by the mean log-decay of each channel, over key
    channels. None for rules without decay."""
    chunk_norm: float
    """Largest singular value of the product of the transitions of 64 tokens, over all such chunks (of shorter
    sequences' tokens, if there are none): above 1 the state can grow without being written to."""
    state_norms: tuple[float, ...]
    """Frobenius norm of the state after every 64 tokens, mean over sequences that are that long."""
    state_norm: float
    """Frobenius norm of the state at the end of each sequence, mean over sequences."""
    state_growth: float | None = None
    """Norm of the state at the end over that in the middle: 1 for a constant norm, 2 for a norm that grows with every
    token. None if no sequence has more than 64 tokens."""
    gates: dict[str, GateShares]
    """Shares of the gates "step", "erase", "write", "decay" and "output" that the rule has."""
    finite: bool
    """Whether the operator's inputs were all finite; if not, other figures may be NaN."""


def measure(call: RecordedCall) -> tuple[list[Figures], int, int]:
    """The figures of every value head, the number of tokens, and the number of sequences.

    Keys, gates and decays are those that the operator saw, rounding included; figures computed from them are float32
    at least, whatever the model's dtype.
    """
    tokens = _one_row(call)
    heads = tokens.inputs.v.shape[2] // call.num_micro_steps
    finite = torch.stack([x.isfinite().all() for x in tokens.inputs if x is not None]).all()
    columns: dict[str, list[Any]] = {
        **_gain_figures(tokens, call, heads),
        **_state_figures(tokens, call),
        "gates": _gate_figures(tokens, call, heads),
        "finite": [bool(finite)] * heads,
    }
    if tokens.inputs.log_decay is not None:
        rate = tokens.inputs.log_decay[0][tokens.decays].mean(0).abs()  # NaN if there is no such token
        columns["half_life"] = _quantiles((math.log(2) / rate).reshape(heads, -1).T)
    figures = [Figures(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    return figures, tokens.starts[-1], len(tokens.starts) - 1


class _Row(NamedTuple):
    """All real tokens of a batch in one row."""

    inputs: RuleInputs
    """`[1, M, ...]`, float32 at least; log-decays of -inf at the beginning of documents are replaced."""
    starts: list[int]
    """`[N + 1]`: beginning of each sequence, then M."""
    decays: Tensor
    """`[M]` bool: the tokens whose log-decay is the rule's own."""
    real: Tensor
    """`[B, T]` bool: the places of these tokens in the batch."""


def _one_row(call: RecordedCall) -> _Row:
    inputs, sequences = call.inputs, call.sequences
    rows, length = inputs.q.shape[:2]
    device = inputs.q.device
    if isinstance(sequences, RightPaddedSequences):
        real = ~sequences.padding
    else:
        real = torch.ones(rows, length, dtype=torch.bool, device=device)
    begins = torch.zeros_like(real)
    begins[:, :1] = True
    if isinstance(sequences, PackedSequences):
        bounds = sequences.cu_seqlens[:-1].long()
        begins[0, bounds[bounds < length]] = True
    # Accelerated models clear the state where a packed document begins; its first token has no decay of its own.
    cleared = torch.zeros_like(real)
    if inputs.log_decay is not None:
        cleared = torch.isneginf(inputs.log_decay).flatten(2).all(-1)
    begins |= cleared
    chosen = [None if x is None else at_least_float32(x)[real][None] for x in inputs]
    picked = RuleInputs(*chosen)  # type: ignore[arg-type]
    if picked.log_decay is not None:
        first = cleared[real].view(1, -1, *[1] * (picked.log_decay.ndim - 2))
        picked = picked._replace(log_decay=picked.log_decay.masked_fill(first, 0))
    if not real.any():
        raise ValueError("the batch holds no token but padding")
    starts = [*begins[real].nonzero()[:, 0].tolist(), int(real.sum())]
    return _Row(picked, starts, ~cleared[real], real)


def _gain_figures(tokens: _Row, call: RecordedCall, heads: int) -> dict[str, list[Any]]:
    inputs, steps = tokens.inputs, call.num_micro_steps
    if inputs.beta is None:
        return {}
    key, beta = inputs.k[0], rearrange(inputs.beta[0], "m (n h) -> m n h", n=steps)
    product = key * (key if inputs.erase_key is None else inputs.erase_key[0])
    product = rearrange(product, "m (n h) k -> m n h k", n=steps)
    product = product.repeat_interleave(heads // product.shape[2], dim=2)
    gain = beta * product.sum(-1)
    decay = torch.ones_like(gain)
    if inputs.log_decay is not None:
        along_key = inputs.log_decay[0].exp()
        if along_key.ndim == 3:  # weighted by the channels' parts of the product of key and erase key
            weight = product[:, 0].abs()
            along_key = (weight * along_key).sum(-1) / weight.sum(-1).clamp_min(torch.finfo(weight.dtype).tiny)
        decay[:, 0] = along_key  # the state decays only before the first micro-step
    factor = decay * (1 - gain)
    if call.spec.erase_reads == "undecayed":  # only the first micro-step can read the state before the decay
        factor[:, 0] = decay[:, 0] - gain[:, 0]
    gain, factor, decay = (x.flatten(0, 1) for x in (gain, factor, decay))
    near = factor < NEAR_EXPANSION
    mean_decay = (decay * near).sum(0) / near.sum(0).clamp_min(1)
    return {
        "gain": _quantiles(gain),
        "gain_above_one": (gain > 1 + 1e-3).float().mean(0).tolist(),  # a rounded unit key may be longer than 1
        "eigenvalue": _quantiles(factor),
        "near_expansion": near.float().mean(0).tolist(),
        "near_expansion_decay": [
            x if any_ else None for x, any_ in zip(mean_decay.tolist(), near.any(0).tolist(), strict=True)
        ],
    }


def _state_figures(tokens: _Row, call: RecordedCall) -> dict[str, list[Any]]:
    """Figures of transitions and states, which the operator computes for chunks as sequences of their own."""
    bounds, sequence_of, order = _chunks(tokens.starts)
    inputs = tokens.inputs
    device, heads = inputs.q.device, inputs.v.shape[2] // call.num_micro_steps
    key_dim, value_dim = inputs.q.shape[-1], inputs.v.shape[-1]
    chunks = PackedSequences.from_cu_seqlens(torch.tensor(bounds, device=device, dtype=torch.int32), bounds[-1])

    def final_state(inputs: RuleInputs, state: Tensor | None) -> Tensor:
        options: Any = {"erase_reads": call.spec.erase_reads, "num_micro_steps": call.num_micro_steps}
        return run_rule(inputs, state, chunks, **options).final_state

    identity = torch.eye(key_dim, device=device, dtype=inputs.q.dtype).expand(len(order), heads, -1, -1).contiguous()
    nothing = inputs.v.new_zeros(*inputs.v.shape[:3], key_dim)
    transitions = final_state(inputs._replace(v=nothing), identity)  # [P, heads, K, K]
    written = final_state(inputs, None)  # [P, heads, K, V]

    num_sequences, longest = len(tokens.starts) - 1, max(order) + 1
    norms = torch.full((num_sequences, longest, heads), math.nan, device=device, dtype=written.dtype)
    state = written.new_zeros(num_sequences, heads, key_dim, value_dim)
    index = torch.tensor([sequence_of, order], device=device)
    for number in range(longest):
        chunk = (index[1] == number).nonzero()[:, 0]
        rows = index[0, chunk]
        state[rows] = transitions[chunk] @ state[rows] + written[chunk]
        norms[rows, number] = torch.linalg.matrix_norm(state[rows])
    ends = torch.tensor(list(dict(zip(sequence_of, order, strict=True)).values()), device=device)  # the last of each
    rows = torch.arange(num_sequences, device=device)
    at_end = norms[rows, ends]
    several = ends > 0
    growth: dict[str, list[float]] = {}
    if several.any():
        middle = norms[rows[several], (ends[several] - 1) // 2]
        growth = {"state_growth": (at_end[several].sum(0) / middle.sum(0)).tolist()}
    whole = torch.tensor([last - first == CHUNK for first, last in pairwise(bounds)], device=device)
    in_whole = [index[0, whole & (index[1] == number)] for number in range(longest)]
    over_time = [norms[rows, number].mean(0).tolist() for number, rows in enumerate(in_whole) if len(rows)]
    return {
        "chunk_norm": _spectral_norm(transitions[whole] if whole.any() else transitions).amax(0).tolist(),
        "state_norms": list(zip(*over_time, strict=True)) or [()] * heads,
        "state_norm": at_end.mean(0).tolist(),
        **growth,
    }


def _chunks(starts: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Boundaries of chunks that end where a sequence does, the sequence of each, and its number in the sequence."""
    bounds, sequence_of, order = [0], list[int](), list[int]()
    for sequence, (first, last) in enumerate(pairwise(starts)):
        ends = [*range(first + CHUNK, last, CHUNK), last]
        bounds += ends
        sequence_of += [sequence] * len(ends)
        order += range(len(ends))
    return bounds, sequence_of, order


def _spectral_norm(matrices: Tensor) -> Tensor:
    """The largest singular value of `[..., K, K]`, by squaring `A^T A`; too large by a factor of K^(1 / 32768) at most.

    The trace of a positive matrix's m-th power, to the power 1 / m, lies between its largest eigenvalue and
    `K^(1 / m)` times that. Squaring needs only matrix products, which are faster than singular values on GPUs.
    """
    scale = matrices.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(matrices.dtype).tiny)
    power = (matrices / scale).mT @ (matrices / scale)
    log_norm = 2 * scale[..., 0, 0].log()
    for number in range(_SQUARINGS + 1):
        if number:
            power = power @ power
        size = power.diagonal(dim1=-2, dim2=-1).sum(-1)
        power = power / size[..., None, None].clamp_min(torch.finfo(power.dtype).tiny)
        log_norm = log_norm + size.log() / 2**number
    return (log_norm / 2).exp()


def _gate_figures(tokens: _Row, call: RecordedCall, heads: int) -> list[dict[str, GateShares]]:
    found: list[dict[str, GateShares]] = [{} for _ in range(heads)]
    for name, gate in call.gates.items():
        values = gate.values[tokens.real]
        if values.shape[1] > heads:  # micro-steps become channels
            values = rearrange(values, "m (n h) c -> m h (n c)", h=heads)
        values = values.repeat_interleave(heads // values.shape[1], dim=1)
        shut = (values <= _SATURATED).float().mean((0, 2)).tolist()
        opened = (values >= 1 - _SATURATED).float().mean((0, 2)).tolist()
        for head in range(heads):
            found[head][name] = GateShares(shut[head], opened[head] if gate.has_upper_bound else None)
    return found


def _quantiles(x: Tensor) -> list[Quantiles]:
    """Quantiles of x `[M, heads]` for each head; NaN counts as largest."""
    ordered = x.sort(dim=0).values
    index = [round(level * (len(x) - 1)) for level in _LEVELS]
    return [Quantiles(*row) for row in ordered[index].T.tolist()]
