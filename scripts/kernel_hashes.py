"""A hash of the PTX of every kernel at many sizes, compiled for a Hopper card without one: same hash, same code.

    python scripts/kernel_hashes.py > before.txt    # on the commit to compare with
    python scripts/kernel_hashes.py before.txt      # on another: prints what differs, exit status 1 if any code does

Names of kernels, source lines and comments do not count, so kernels may move and be renamed: a kernel with another name
and the same code in the same call is printed as renamed. Another version of Triton gives other PTX. Takes minutes.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from pytest import MonkeyPatch

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "ops" / "triton"), str(TESTS / "ops" / "fused")]

import test_compile as chunks  # noqa: E402
import test_decode_compile as decoding  # noqa: E402
import test_fused_compile as fused  # noqa: E402

CALLS = [
    *(
        chunks.Call(decay=decay, precision=precision)
        for decay, precision in product(chunks.DECAYS, (None, "fast", "strict"))
    ),
    *(chunks.Call(decay=decay, packed=True, state=True) for decay in chunks.DECAYS),
    *(chunks.Call(decay=decay, segmented=True) for decay in chunks.DECAYS),
    *(chunks.Call(K=64, V=64, decay=decay, dtype=torch.float16) for decay in chunks.DECAYS),
    *(chunks.Call(K=64, V=64, decay=decay, dtype=torch.float32) for decay in chunks.DECAYS),
    *(chunks.Call(K=256, V=256, decay=decay) for decay in chunks.DECAYS),
]


def code(ptx: str) -> str:
    """PTX without what says where it comes from."""
    ptx = ptx.split(".section\t.debug")[0]
    (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.replace(name, "kernel").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".file", ".loc", ".section", ".target")))


class Recorder:
    """Stands in for ptxas: keeps a hash of the PTX that Triton hands it."""

    def __init__(self) -> None:
        self.hashes: list[str] = []

    def __call__(self, *arguments: Any) -> tuple[str, str] | None:
        if not arguments:  # Triton asks what to add to the key of its cache
            return "ptx only", "ptx only"
        stages = arguments[1]
        stages["cubin"] = self.assemble
        return None

    def assemble(self, ptx: str, metadata: dict[str, Any]) -> bytes:
        self.hashes.append(hashlib.blake2b(code(ptx).encode(), digest_size=8).hexdigest())
        return b"not assembled"

    def take(self) -> list[str]:
        taken, self.hashes = self.hashes, []
        return taken


def compile_all(recorder: Recorder) -> Iterator[str]:
    """`hash  what` of every kernel."""
    for call in CALLS:
        launches = {}
        for launch in chunks.launches_of(call, MonkeyPatch()):
            constants = {p.name: launch.arguments[p.name] for p in launch.kernel.params if p.is_constexpr}
            launches[str(launch), *sorted((n, str(x)) for n, x in constants.items())] = launch
        for launch in launches.values():
            launch.compile(call.arch)
            yield from (f"{digest}  {call} {launch}" for digest in recorder.take())
    for case in decoding.BUILDS:
        if case.arch == decoding.HOPPER:
            decoding.build(case)
            yield from (f"{digest}  decode {case}" for digest in recorder.take())
    for name in fused.CALLS:
        for kernel in fused.compile_call(name, MonkeyPatch()):
            yield from (f"{digest}  {name} {kernel.name}" for digest in recorder.take())


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
    recorder, found = Recorder(), list[str]()
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        triton.knobs.runtime.add_stages_inspection_hook = recorder
        for line in compile_all(recorder):
            found.append(line)
            if before is None:
                print(line, flush=True)
    if before is None:
        return 0
    renamed, changed = differences(before, found)
    print("\n".join([*renamed, *changed]))
    print(f"{len(found)} kernels, {len(renamed)} renamed, {'CODE CHANGED' if changed else 'all code as before'}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
