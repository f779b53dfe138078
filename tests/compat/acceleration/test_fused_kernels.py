"""`accelerate(model, fused_kernels=True)` against the plain torch it replaces: interpreted on a CPU, compiled on a GPU.

The interpreter has to be chosen before Triton is imported, so a child process runs it.
"""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from foreign_models import FUSED, accelerated, assert_equal_but_for_rounding, foreign_model, mixer_of
from fresh_process import run_interpreted
from transformers import DynamicCache

import deltazoo
from deltazoo.compat.transformers.layer import stored_state
from deltazoo.ops import fused

CHILD = "import sys; sys.path.insert(0, sys.argv[1]); import test_fused_kernels as t; t.compare(sys.argv[2:], 'cpu')"


def results(model, x, positions):
    """The layer's outputs, of packed rows too, every gradient, and outputs of pieces with a cache."""
    model.zero_grad()
    layer, cache = mixer_of(model), DynamicCache(config=model.config.get_text_config())
    inputs = x.clone().requires_grad_()
    output, packed = layer(inputs), layer(inputs, deltazoo_positions=positions)
    (output.square().sum() + packed.pow(3).sum()).backward()
    with torch.no_grad():
        pieces = [layer(piece, cache_params=cache) for piece in x.split([6, 1, 1, 4], dim=1)]
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    outputs = {"output": output.detach(), "packed": packed.detach()}
    return {**outputs, "input": inputs.grad, "pieces": torch.cat(pieces, dim=1), **gradients}


def compare(families, device):
    for family in families:
        plain = foreign_model(family).to(device)
        fused = copy.deepcopy(plain)
        deltazoo.accelerate(plain, backend="chunkwise", fused_kernels=False)
        deltazoo.accelerate(fused, backend="chunkwise", fused_kernels=True)
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0)).to(device)
        lengths = [[5, 1, 2, 4], [12]]  # documents shorter than the taps, and two rows packed differently
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).to(device)
        layer = mixer_of(fused)
        with mock.patch.object(layer, "_step", wraps=layer._step) as steps:
            actual = results(fused, x, positions)
        assert steps.call_count == 2
        assert_equal_but_for_rounding(partial(results, x=x, positions=positions), plain, actual)


def test_interpreted():
    run_interpreted(CHILD, Path(__file__).parent, FUSED[0], FUSED[-1])


@pytest.mark.gpu
def test_on_a_gpu():
    compare(FUSED, "cuda")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs them on a CPU")
def test_refused_where_they_cannot_run():
    model = foreign_model("qwen3_next")
    with pytest.raises(NotImplementedError, match="the fused kernels run where the triton backend does, but no triton"):
        deltazoo.accelerate(model, fused_kernels=True)
    assert type(mixer_of(model)).__name__ == "Qwen3NextGatedDeltaNet"


def test_convolutions_are_fused_whatever_the_rows(monkeypatch):
    model = accelerated("qwen3_next")
    layer, x = mixer_of(model), torch.randn(1, 6, 32)
    layer.deltazoo_fused_kernels = True  # accelerate() would refuse it here
    plain_decay = fused.softplus_log_decay
    monkeypatch.setattr(fused, "softplus_log_decay", lambda *inputs, fused: plain_decay(*inputs, fused=False))
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    for rows in ({}, padded, {"deltazoo_positions": torch.arange(6)[None]}):
        with pytest.raises(NotImplementedError, match="fused kernels run on NVIDIA GPUs"):
            layer(x, **rows)


def test_only_one_token_of_the_same_dtype_overwrites_the_states(monkeypatch):
    model = accelerated("qwen3_next")
    layer, cache = mixer_of(model), DynamicCache(config=model.config)
    monkeypatch.setattr(type(layer), "fuses", lambda *arguments: True)
    qkv = torch.randn(1, 1, layer.conv1d.weight.shape[0])
    with torch.no_grad():
        cache.update_conv_state(torch.randn(1, qkv.shape[2], 4), 0, conv_kernel_size=4)
        cache.update_recurrent_state(torch.randn(1, 4, 8, 16), 0)
        before = stored_state(cache, 0, 4, qkv)
        assert layer._may_overwrite(before, qkv)
        assert not layer._may_overwrite(before, qkv.bfloat16())
        assert not layer._may_overwrite(before, qkv.expand(1, 2, -1))


def test_a_norm_that_does_more_than_the_kernel_runs_by_itself(monkeypatch):
    model = accelerated("qwen3_next")
    layer, output, gate = mixer_of(model), *torch.randn(2, 1, 6, 2, mixer_of(model).head_v_dim)
    layer.deltazoo_fused_kernels = True
    monkeypatch.setattr(fused, "gated_rms_norm", lambda *arguments, **options: "the kernel")
    assert layer._norm_and_gate(output, gate) == "the kernel"

    hook = layer.norm.register_forward_hook(lambda *arguments: "a hook")
    assert layer._norm_and_gate(output, gate) == "a hook"
    hook.remove()
    monkeypatch.setitem(vars(layer.norm), "forward", lambda *arguments: "another forward")
    assert layer._norm_and_gate(output, gate) == "another forward"
    monkeypatch.delitem(vars(layer.norm), "forward")
    layer.norm = torch.nn.Bilinear(layer.head_v_dim, layer.head_v_dim, 3)
    assert layer._norm_and_gate(output, gate).shape[-1] == 3
