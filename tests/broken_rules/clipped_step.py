"""Right, with a remark: the step size exceeds 2 / |k|^2, to which the layer clips it."""

from deltazoo import DeltaRuleSpec, register_variant


def threefold(b, k):
    return 3 * b


register_variant(
    DeltaRuleSpec(
        name="clipped_step", paper="none", summary="Three Euler steps.", equation="S_t = S_{t-1}", step_size=threefold
    )
)
