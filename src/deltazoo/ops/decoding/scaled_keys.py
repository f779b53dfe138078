"""The write keys of a rule that scales them by a running second moment of the keys, for one token: one launch.

    A' = exp(log_decay) A + sigmoid(b) k * k      r = log(A' + 1e-6) - log_scale      key = 1.5^(-r / (1 + |r|)) * k

with k divided by its L2 norm, and the `log_decay` of `token_rule`. Source: arXiv:2604.21100, and `deltazoo.rules.pgdn`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.decoding.launch_ahead import launch_step, page_size, wait_for_inputs
from deltazoo.ops.decoding.rule import unit_head
from deltazoo.ops.fused.device_math import softplus
from deltazoo.ops.triton.launch import Constants


@triton.jit
def scaled_keys_kernel(
    mixed,  # [B, M] float32: keys from column H * K on, a and b from DECAY_AT and STEP_AT on
    moment,  # [B, H, K] float32, or pages of these; advanced in place
    A_log,  # [H] float32
    dt_bias,  # [H] float32
    log_scale,  # [H] float32
    scaled,  # [B, H, K] float32
    state_indices,  # [B], the page of each row's moment; or None
    PAGE: tl.constexpr, M: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    DECAY_AT: tl.constexpr, STEP_AT: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys = tl.arange(0, BK)
    mask = keys < K
    at = (row * H + head) * K + keys
    held = at
    if state_indices is not None:
        held = tl.load(state_indices + row).to(tl.int64) * PAGE + head * K + keys
    A = tl.load(moment + held, mask=mask, other=0.0)
    rate, bias, target = tl.exp(tl.load(A_log + head)), tl.load(dt_bias + head), tl.load(log_scale + head)
    wait_for_inputs(AHEAD)

    mixed += row * M
    k = unit_head(tl.load(mixed + (H + head) * K + keys, mask=mask, other=0.0))
    b = tl.sigmoid(tl.load(mixed + STEP_AT + head))
    A = tl.exp(-rate * softplus(tl.load(mixed + DECAY_AT + head) + bias)[0]) * A + b * k * k
    r = tl.log(A + 1e-6) - target
    tl.store(moment + held, A, mask=mask)
    log_1_5 = 0.4054651081081644
    tl.store(scaled + at, tl.exp(-log_1_5 * r / (1 + tl.abs(r))) * k, mask=mask)


def scaled_keys(
    mixed: Tensor,
    moment: Tensor,
    parameters: Sequence[Tensor],
    decay_at: int,
    step_at: int,
    state_indices: Tensor | None = None,
) -> Tensor:
    """The keys under which a token writes. It has no gradients.

    Args:
        mixed: `[B, M]` float32, the argument of `token_rule`, with one key `[H, K]`.
        moment: A, `[B, H, 1, K]` float32, contiguous; advanced in place. With `state_indices` `[pages, H, 1, K]`.
        parameters: `A_log`, `dt_bias` and `log_scale`, `[H]` float32.
        decay_at: first column of mixed of the moment's decay gates a `[H]`. step_at: that of its step gates b.
        state_indices: `[B]` integers, the page of each row's moment.

    Returns:
        `[B, H, K]` float32.
    """
    B, (_, H, _, K) = len(mixed), moment.shape
    scaled = mixed.new_empty(B, H, K)
    sizes = B, H, K, mixed.shape[1], decay_at, step_at, page_size(moment, state_indices)
    launch_step(scaled_keys_kernel, _constants, sizes, mixed, moment, *parameters, scaled, state_indices)
    return scaled


def _constants(B: int, H: int, K: int, M: int, decay_at: int, step_at: int, page: int) -> Constants:
    return Constants(
        B, H, PAGE=page, M=M, H=H, K=K, DECAY_AT=decay_at, STEP_AT=step_at, BK=triton.next_power_of_2(K),
        num_warps=1,
    )  # fmt: skip
