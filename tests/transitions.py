"""What each token does to the state, as a matrix, built from what a layer passes to the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from deltazoo.layers import DeltaRuleAttention, RuleInputs


def steps(layer: DeltaRuleAttention, inputs: RuleInputs) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Per micro-step key, erase key `[B, T, HV, K]`, value and step size, all float64."""
    inputs = RuleInputs(*(None if x is None else x.double() for x in inputs))  # type: ignore[arg-type]
    n = layer.num_micro_steps
    erase_key = inputs.k if inputs.erase_key is None else inputs.erase_key
    beta = torch.ones(inputs.v.shape[:3]).double() if inputs.beta is None else inputs.beta
    keys, erase_keys, values, betas = (x.chunk(n, dim=2) for x in (inputs.k, erase_key, inputs.v, beta))
    group = values[0].shape[2] // keys[0].shape[2]
    keys, erase_keys = ([x.repeat_interleave(group, 2) for x in xs] for xs in (keys, erase_keys))
    return list(zip(keys, erase_keys, values, betas, strict=True))


def factors_and_writes(layer: DeltaRuleAttention, inputs: RuleInputs) -> tuple[Tensor, Tensor]:
    """What each token multiplies the state by, `[B, T, HV, K, K]`, and adds to it, `[B, T, HV, K, V]`, in float64."""
    shape = (*inputs.v.shape[:2], layer.num_v_heads, layer.key_expansion * layer.head_k_dim)
    log_decay = torch.zeros(shape) if inputs.log_decay is None else inputs.log_decay
    decay = log_decay.double().exp()
    factor = torch.diag_embed((decay if decay.ndim == 4 else decay[..., None]).expand(shape))
    write = factor.new_zeros(*shape, layer.head_v_dim)
    for number, (k, e, v, beta) in enumerate(steps(layer, inputs)):
        column, row = (beta[..., None] * k)[..., None], e[..., None, :]
        if layer.spec.corrects:
            before_decay = layer.spec.erase_reads == "undecayed" and number == 0
            factor = factor - column @ (row if before_decay else row @ factor)
            write = write - column @ (row @ write)
        write = write + column * v[..., None, :]
    return factor, write
