"""Times of the Gluon kernels that are not chosen yet beside those that are, of the same calls. Needs an H200 or H100.

    python scripts/measure_hopper_kernels.py --out benchmarks/results/hopper_kernels_h200.json --commit COMMIT

`RECORDED_FORWARD` and `STRICT_SCANS` of `ops/triton/hopper/support.py` become True where their GPU tests pass
(`test_recorded_forward_pass_and_strict_scans`) and this says that they are faster. `rest` is the number of chunks that
a program of the launch prepares which completes what the fused forward pass left.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from deltazoo.ops import delta_rule
from deltazoo.ops.triton.hopper import support
from deltazoo.ops.triton.launch import Constants
from deltazoo.ops.triton.plan import Plan, plan_for
from deltazoo.workbench.bench.inputs import Inputs, make_inputs
from deltazoo.workbench.bench.shapes import Shape
from deltazoo.workbench.bench.timing import CudaTimer
from deltazoo.workbench.provenance import describe_run

GATES = {"delta": "none", "gdn": "medium", "kda": "medium"}
SHAPES = [Shape(8, 4096, 16, 128, 128), Shape(1, 32768, 16, 128, 128), Shape(4, 2048, 8, 128, 128)]
FORMS = {
    "chosen": (False, False, None),
    "recorded forward": (True, False, None),
    "strict scans": (False, True, None),
    "both": (True, True, None),
    **{f"both, rest {chunks}": (True, True, chunks) for chunks in (1, 2, 4)},
}


@contextmanager
def form(recorded_forward: bool, strict_scans: bool, rest: int | None) -> Iterator[None]:
    """The tables as this form wants them."""
    prepare_rest = Plan.prepare_rest

    @cache
    def with_chunks(plan: Plan) -> Constants:
        constants = prepare_rest(plan)
        if rest is None:
            return constants
        HV, NT, B = plan.chunk_grid()
        return Constants(HV, -(-NT // rest), B, **constants.named | dict(chunks=rest))

    with (
        mock.patch.object(support, "RECORDED_FORWARD", recorded_forward),
        mock.patch.object(support, "STRICT_SCANS", strict_scans),
        mock.patch.object(Plan, "prepare_rest", with_chunks),
    ):
        plan_for.cache_clear()
        yield
    plan_for.cache_clear()


def calls_of(x: Inputs) -> dict[str, Callable[[], object]]:
    """A call that records no gradients, and one with all of them."""
    leaves = [t for t in (x.q, x.k, x.v, x.beta, x.log_decay) if t is not None]

    def forward() -> object:
        with torch.no_grad():
            return delta_rule(x.q, x.k, x.v, x.beta, x.log_decay, backend="triton")

    def both() -> object:
        output = delta_rule(x.q, x.k, x.v, x.beta, x.log_decay, backend="triton").output
        return torch.autograd.grad(output, leaves, x.v.detach())

    return {"forward": forward, "forward+backward": both}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    run = describe_run(device="cuda", commit=arguments.commit, command=[Path(sys.argv[0]).name, *sys.argv[1:]])
    rows: list[dict[str, object]] = []
    timer = CudaTimer()
    for shape in SHAPES:
        for op, gates in GATES.items():
            usual = make_inputs(shape, op, gates, device="cuda")
            large = replace(usual, beta=(2 * usual.beta.detach()).requires_grad_())
            for gain, x in (("small", usual), ("large", large)):
                for name, options in FORMS.items():
                    with form(*options):
                        for kind, call in calls_of(x).items():
                            ms, peak = timer.milliseconds(call).median, timer.peak_mib(call)
                            row = dict(shape=str(shape), op=op, gain=gain, form=name, kind=kind, ms=ms, peak_mib=peak)
                            rows.append(row)
                            print(*row.values(), flush=True)
                arguments.out.write_text(json.dumps({"run": asdict(run), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
