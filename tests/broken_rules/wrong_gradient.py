"""Wrong: a step size whose backward pass is not the derivative of its forward pass."""

import torch

from deltazoo import RuleSpec, register_rule


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, b):
        return b / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def half(b, k):
    return Half.apply(b)


register_rule(RuleSpec(name="wrong_gradient", paper="none", summary="Wrong.", equation="S_t = S_{t-1}", step_size=half))
