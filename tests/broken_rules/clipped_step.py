"""Right, with a remark: the step size exceeds 2 / |k|^2, to which the layer clips it."""

from deltazoo import RuleSpec, register_rule


def threefold(b, k):
    return 3 * b


register_rule(
    RuleSpec(
        name="clipped_step", paper="none", summary="Three Euler steps.", equation="S_t = S_{t-1}", step_size=threefold
    )
)
