"""A hash of the PTX of every kernel in many calls, compiled for a Hopper card without one: same hash, same code.

    python scripts/kernel_hashes.py > before.txt    # on the commit to compare with
    python scripts/kernel_hashes.py before.txt      # on another: prints what differs, exit status 1 if any code does

Kernels in plain Triton and in Gluon: of the operator, of decoding and the fused ones. Their names, source lines, files
and comments do not count, so kernels may move and be renamed: a kernel with another name and the same code in the same
call is printed as renamed. Another version of Triton gives other PTX; `benchmarks/results/kernel_hashes_triton*.txt`
are of 3.6.0 and 3.7.1. Takes minutes of every core.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from pytest import MonkeyPatch
from triton.compiler import CompiledKernel

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), *(str(TESTS / "ops" / folder) for folder in ("triton", "fused", "decoding"))]

import test_compile as chunks  # noqa: E402
import test_decoding_compile as step  # noqa: E402
import test_fused_compile as fused  # noqa: E402
import test_hopper as hopper  # noqa: E402
import test_hopper_forward as inference  # noqa: E402
import test_step_compile as decoding  # noqa: E402
from ops.triton import gluon_compile  # noqa: E402
from ops.triton.launches import HOPPER, arguments_of, launched_by, routed  # noqa: E402

from deltazoo.ops.context.product import transition_halves, transition_pair, transition_product  # noqa: E402

Kernels = Iterable[tuple[str, CompiledKernel]]
"""What each is, its call first, and the kernel."""

OPTIONS: list[dict[str, Any]] = [
    {},
    dict(precision="linear", packed=True, state=True),
    dict(precision="strict", segmented=True),
    dict(K=64, V=64, dtype=torch.float32, erase_key=True),
    dict(K=64, V=64, dtype=torch.float16, erase_key=True, undecayed=True, num_micro_steps=2),
]
HOPPER_OPTIONS: list[dict[str, Any]] = [
    {},
    dict(keep=False, state=False, in_place=True),
    dict(strict=False, dtype=torch.float16),
    dict(few=True, erase_key=True),
    dict(strict=True, erase_key=True, undecayed=True, segmented=True),
]


def code(ptx: str) -> str:
    """PTX without what says where it comes from."""
    (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
    assert ".func" not in ptx, "a function that is not inlined, whose name tells the module"
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.replace(name, "kernel").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".target", ".version")))


def only_ptx(*arguments: Any) -> tuple[str, str] | None:
    """Takes ptxas out of the stages of a compilation."""
    if not arguments:  # Triton asks what to add to the key of its cache
        return "ptx only", "ptx only"
    arguments[1]["cubin"] = lambda ptx, metadata: b"not assembled"
    return None


def without_undecayed_channels(per_channel: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Options without the undecayed read, which calls with a decay per channel have on no GPU."""
    return {name: x for name, x in options.items() if not (per_channel and name == "undecayed")}


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """What runs the operator's kernels on meta tensors: in plain Triton, in Gluon, and between ranks."""
    for decay, options in product(chunks.DECAYS, OPTIONS):
        call = chunks.Call(decay=decay, **without_undecayed_channels(decay == "channel", options))
        yield str(call), call.run
    for decay, options in product(hopper.DECAYS, HOPPER_OPTIONS):
        options = without_undecayed_channels(decay == "channel", options)
        named = [decay, *(f"{name}={value}" for name, value in options.items())]
        yield f"hopper-{'-'.join(named)}", hopper.Call(decay=decay, **options).run
    for decay, strict in product(inference.DECAYS, (None, False)):
        call = inference.meta_call(decay, strict=strict, state=strict is None)
        yield f"hopper-{decay}-{strict=}-inference", lambda call=call: inference.infer(inference.Problem(call))
    for K, transposed in product((64, 128), (False, True)):
        matrices = torch.empty(4, 1, K, K, device="meta")
        launch = partial(transition_product.launch, matrices, matrices, None if transposed else matrices, transposed)
        yield f"{K}x{K}-{transposed=}", launch
        yield f"{K}x{K}-halves-{transposed}", partial(transition_halves.launch, *[matrices] * 3, transposed)
    for K in (64, 128):
        matrices = torch.empty(4, 1, K, K, device="meta")
        yield f"{K}x{K}-pair", partial(transition_pair.launch, *[matrices] * 4)


def launched(name: str, run: Callable[[], Any]) -> Kernels:
    """The kernels that a call of the operator launches."""
    launches: list[chunks.Launch] = []

    def record(kernel: Any, constants: Any, *tensors: Any) -> None:
        launches.append(chunks.Launch(kernel, arguments_of(kernel, constants, tensors)))

    with launched_by(record), routed(HOPPER if name.startswith("hopper") else None):
        run()
    for launch in launches:
        gluon = launch.kernel.is_gluon()
        compiled = gluon_compile.build(launch.kernel, launch.arguments) if gluon else launch.compile(chunks.HOPPER)
        yield f"{name} {launch}", compiled


def compiled_call(tests: Any, name: str) -> Kernels:
    return ((f"{name} {compiled.name}", compiled) for compiled in tests.compile_call(name, MonkeyPatch()))


def decoding_step(build: decoding.Build) -> Kernels:
    yield f"decode {build}", decoding.build(build)


COMPILATIONS: list[Callable[[], Kernels]] = [
    *(partial(launched, name, run) for name, run in calls()),
    *(partial(decoding_step, x) for x in (*decoding.BUILDS, *decoding.UPDATES) if x.arch == decoding.HOPPER),
    *(partial(compiled_call, tests, name) for tests in (fused, step) for name in tests.CALLS),
]


def lines(number: int) -> list[str]:
    """`hash  what` of every kernel of a call."""
    hashes = ((what, hashlib.blake2b(code(x.asm["ptx"]).encode(), digest_size=8)) for what, x in COMPILATIONS[number]())
    return list(dict.fromkeys(f"{digest.hexdigest()}  {what}" for what, digest in hashes))


def differences(before: Iterable[str], after: Iterable[str]) -> tuple[list[str], list[str]]:
    """Kernels that were renamed, and lines whose code is gone or new, from the lines of two runs.

    The first word behind a hash names the call. Two lines of one call with one hash are the same kernel.
    """
    gone, new = Counter(before), Counter(after)
    gone, new = gone - new, new - gone
    renamed, by_code = [], defaultdict(list)
    for line in new.elements():
        digest, what = line.split(maxsplit=1)
        by_code[digest, what.split()[0]].append(line)
    for line in list(gone.elements()):
        digest, what = line.split(maxsplit=1)
        if same := by_code[digest, what.split()[0]]:
            other = same.pop(0)
            renamed.append(f"renamed, same code: {what} -> {other.split(maxsplit=1)[1]}")
            gone[line] -= 1
            new[other] -= 1
    changed = [f"- {line}" for line in gone.elements()] + [f"+ {line}" for line in new.elements()]
    return renamed, sorted(changed, key=lambda line: line.split(maxsplit=2)[2])


def main() -> int:
    before = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines() if len(sys.argv) > 1 else None
    found: list[str] = []
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        triton.knobs.compilation.disable_line_info = True
        triton.knobs.runtime.add_stages_inspection_hook = only_ptx
        with multiprocessing.get_context("fork").Pool() as pool:
            for some in pool.imap(lines, range(len(COMPILATIONS))):
                found += some
                if before is None:
                    print(*some, sep="\n", flush=True)
    if before is None:
        return 0
    renamed, changed = differences(before, found)
    print("\n".join([*renamed, *changed]))
    print(f"{len(found)} kernels, {len(renamed)} renamed, {'CODE CHANGED' if changed else 'all code as before'}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
