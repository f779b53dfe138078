"""Precision as the erase gain needs: which chunks are strict, and that nothing else depends on it.

Through Triton's interpreter, in a child process for all checks: `python test_precision.py` is that child.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_rule_cases import DeltaRuleCase, DeltaRuleInputs
from fresh_process import run_interpreted
from helpers import relative_errors, results_and_gradients
from torch import Tensor

from deltazoo.ops import delta_rule, linear_attention

pytest.importorskip("triton")

DECAYS = ("none", "scalar", "channel")
CHUNK = 64


def inputs_of(decay: str, steps: dict[tuple[int, int], float], **options: Any) -> DeltaRuleInputs:
    """One key repeated with step size 0.7, except that tokens `start:stop` have those of `steps`."""
    case = DeltaRuleCase(
        decay, **{"B": 1, "T": 200, "H": 1, "K": 16, "V": 16, "keys": "same", "beta": 0.7} | options,
        decay=decay, log_decay=-0.01, initial_state=True,
    )  # fmt: skip
    inputs = case.make(dtype=torch.float16)
    beta = inputs.beta.clone()
    for (start, stop), step in steps.items():
        beta[:, start:stop] = step
    return replace(inputs, beta=beta)


def run(inputs: DeltaRuleInputs, precision: str | None = None) -> dict[str, Tensor]:
    return results_and_gradients(delta_rule, inputs, backend="triton", precision=precision)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def gain_decides_between_fast_and_strict() -> None:
    """Short keys show that the step size alone does not."""
    for decay, options in (("none", dict(keys="short")), ("scalar", {}), ("channel", {})):
        larger = 9 if options else 1
        small, large = (inputs_of(decay, {(0, 70): step * larger}, T=70, **options) for step in (0.7, 1.9))
        fast, strict = run(small, "fast"), run(large, "strict")
        assert same_bits(run(small), fast), decay
        assert same_bits(run(large), strict), decay
        for inputs, other in ((small, "strict"), (large, "fast")):
            a, b = (delta_rule(**inputs.arguments(), backend="triton", precision=p).output for p in (None, other))
            assert not torch.equal(a, b), decay


def gain_is_that_of_the_erase_key() -> None:
    """Its size counts, and that of every pair of tokens; the decay of an undecayed read does not."""
    for decay, reads in (
        ("none", "decayed"),
        ("scalar", "undecayed"),
        ("channel", "decayed"),
    ):
        for length, steps, expected in (
            (0.5, {(0, 70): 1.9}, "fast"),
            (1.0, {(0, 70): 1.9}, "strict"),
            (-1.0, {(0, 70): 0.0, (0, 3): 1.9}, "strict"),
        ):
            inputs = inputs_of(decay, steps, T=40)
            inputs = replace(inputs, erase_key=length * inputs.k, erase_reads=reads)
            if inputs.log_decay is not None:
                inputs.log_decay[:, 3] = -1.0
            by_gain, fast, strict = (run(inputs, p) for p in (None, "fast", "strict"))
            assert same_bits(by_gain, fast if expected == "fast" else strict), (decay, reads, length)
            assert not same_bits(fast, strict), (decay, reads, length)


def two_keys_that_turn_the_state_are_right() -> None:
    """Each token erases at right angles to its key, so `e . k` is 0, but together two of them turn the state."""
    turn = 3.0  # trace of the pair: 2 - turn
    for decay in DECAYS:
        case = DeltaRuleCase(
            decay, B=1, T=320, H=1, K=16, V=16, keys="alternating", beta=1.0, decay=decay, log_decay=-1e-4
        )
        inputs = case.make(dtype=torch.float16)
        k, e = torch.zeros_like(inputs.k), torch.zeros_like(inputs.k)
        for own, other, sign in ((0, 1, -1), (1, 0, 1)):
            k[:, own::2, :, own], e[:, own::2, :, other] = 1, sign * turn**0.5
        inputs = replace(inputs, k=k, erase_key=e)
        exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
        by_gain, fast = (max(relative_errors(run(inputs, p), exact, inputs).values()) for p in (None, "fast"))
        assert by_gain < 0.05 and fast > 5 * by_gain, (decay, by_gain, fast)


def mixed_rows_are_right() -> None:
    """Large gains between small ones: whole rows, packed, cut into segments; no worse than all strict."""
    from deltazoo.ops.triton import plan

    steps = {(70, 120): 2.0}
    for decay, options in (
        ("none", {}),
        ("scalar", dict(lengths=(30, 0, 130, 60), groups=2)),
        ("channel", {}),
        ("none", dict(segmented=True)),
        ("channel", dict(segmented=True)),
    ):
        segmented = options.pop("segmented", False)
        inputs = inputs_of(decay, steps, **dict(T=180) | options)
        exact = results_and_gradients(delta_rule, inputs.double(), backend="chunkwise")
        shortest, plan.MIN_SEGMENT = plan.MIN_SEGMENT, 2 if segmented else plan.MIN_SEGMENT
        plan.plan_for.cache_clear()
        errors, strict = (relative_errors(run(inputs, p), exact, inputs) for p in (None, "strict"))
        plan.MIN_SEGMENT = shortest
        plan.plan_for.cache_clear()
        assert all(errors[name] <= 2 * strict[name] + 2e-3 for name in errors), (decay, options, errors, strict)


def decay_has_no_gradient_from_pairs_of_one_token() -> None:
    """No decay lies between the micro-steps of a token, and one before all of them acts on an empty state.

    So the gradient is zero, as the difference of two sums that the kernels round alike: with a decay per channel those
    for strong decay, which take no factors other than 1 here.
    """
    decays = {"scalar": -0.1, "channel": -40.0}
    reads_of = (("scalar", "decayed"), ("scalar", "undecayed"), ("channel", "decayed"))
    for (decay, reads), erase in product(reads_of, ("tied", "gated")):
        strength = decays[decay]
        update = dict(log_decay=strength, erase=erase, erase_reads=reads, num_micro_steps=40)
        case = DeltaRuleCase("one", B=1, T=1, H=1, K=32, V=16, decay=decay, beta=0.7, **update)
        inputs = case.make(dtype=torch.float16)
        results = run(inputs, "fast")
        pairs = (inputs.k.double() * results["d_k"].double()).sum(-1).norm()
        assert results["d_log_decay"].abs().max() < 1e-6 * pairs, (decay, erase, reads, results["d_log_decay"], pairs)


def later_step_sizes_change_no_earlier_bit() -> None:
    for decay in DECAYS:
        before, after = inputs_of(decay, {}, T=140), inputs_of(decay, {(100, 140): 1.9}, T=140)
        a, b = (delta_rule(**x.arguments(), backend="triton").output for x in (before, after))
        assert torch.equal(a[:, :CHUNK], b[:, :CHUNK]), decay
        assert not torch.equal(a[:, 100:], b[:, 100:]), decay


def packed_sequences_decide_for_themselves() -> None:
    for decay in ("scalar", "channel"):
        lengths = (20, 0, 70, 10)
        small, large = inputs_of(decay, {}, lengths=lengths), inputs_of(decay, {(30, 90): 1.9}, lengths=lengths)
        a, b = run(small), run(large)
        for name in a:
            if name in ("final_state", "d_initial_state"):
                kept = [(a[name][n], b[name][n]) for n in (0, 1, 3)]
            else:
                kept = [(a[name][:, :20], b[name][:, :20]), (a[name][:, 90:], b[name][:, 90:])]
            assert all(torch.equal(x, y) for x, y in kept), (decay, name)


CHECKS = (
    gain_decides_between_fast_and_strict,
    gain_is_that_of_the_erase_key,
    two_keys_that_turn_the_state_are_right,
    mixed_rows_are_right,
    decay_has_no_gradient_from_pairs_of_one_token,
    later_step_sizes_change_no_earlier_bit,
    packed_sequences_decide_for_themselves,
)


def test_interpreted() -> None:
    run_interpreted(Path(__file__))


def test_unknown_precision() -> None:
    inputs = inputs_of("none", {}, T=3)
    with pytest.raises(ValueError, match="unknown precision 'stric'; did you mean 'strict'"):
        delta_rule(**inputs.arguments(), precision="stric")


def test_linear_attention_has_no_precision() -> None:
    inputs = inputs_of("none", {}, T=3)
    with pytest.raises(TypeError, match="precision"):
        linear_attention(inputs.q, inputs.k, inputs.v, precision="fast")  # type: ignore[call-arg]


@pytest.mark.gpu
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("T", [2048, 16384])
def test_graphs_and_compiled_code_decide_at_run_time(decay: str, T: int) -> None:
    """A captured call and a compiled one, made with small gains, do for large ones what a new call does."""
    case = DeltaRuleCase("graph", B=1, T=T, H=4, K=128, V=128, keys="same", beta=0.5, decay=decay, log_decay=-1e-3)
    inputs = case.make(device="cuda", dtype=torch.bfloat16)
    arguments = inputs.arguments()
    delta_rule(**arguments, backend="triton")
    compiled = torch.compile(lambda **x: delta_rule(**x, backend="triton"), fullgraph=True)
    compiled(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = delta_rule(**arguments, backend="triton")
    inputs.beta[:, T // 2 :] = 1.9
    graph.replay()
    expected, fast = (delta_rule(**arguments, backend="triton", precision=p).output for p in (None, "fast"))
    assert torch.equal(captured.output, expected) and torch.equal(compiled(**arguments).output, expected)
    assert not torch.equal(fast, expected)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for check in CHECKS:
        check()
