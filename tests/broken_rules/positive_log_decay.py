"""Wrong: a decay gate that may give a positive logarithm."""

from deltazoo import RuleSpec, register_rule


def signed(a, A_log, dt_bias):
    return a + dt_bias


register_rule(
    RuleSpec(
        name="positive_log_decay",
        paper="none",
        summary="Wrong.",
        equation="S_t = S_{t-1}",
        step_size="euler",
        decay="scalar",
        decay_gate=signed,
    )
)
