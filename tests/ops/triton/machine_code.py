"""Assembled code: the registers that it needs, and what ptxas is known to get wrong about matrix products (wgmma).

* Operands that change before the product is done: ptxas 12.8 and 12.9 put instructions that set a product's operand
  behind the product, if the operand is a constant that two products share. What the first one reads then depends on
  timing (docs/kernels.md).
* Uniform registers that nothing sets: 12.8 loses the first of four descriptors that it computes from each other. The
  products then read from anywhere in shared memory. A register that held something else before hides it.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.cache import CacheManager, get_cache_manager

__all__ = ["disassembled", "faults", "keep", "more_spilled", "resources", "to_ptx", "told"]


def more_spilled(most: int) -> int:
    """Bytes per thread that a kernel may spill beyond its limit, that of Triton 3.6 and 3.7: 0 there, else `most`.

    Triton 3.9 assembles for Hopper with ptxas 13.4, which spills up to 480 more in the scans, where 12.8 spills nothing
    of the same PTX, 370 in the fused backward pass, and 1,200 in the strict one.
    """
    return 0 if triton.__version__.startswith(("3.6.", "3.7.")) else most


class _ToPTX:
    """Triton's hook: asked for what a compilation's key has besides, and called with its stages."""

    def __call__(self, *of: Any) -> tuple[str, str] | None:
        if not of:
            return "to PTX", "to PTX"
        of[1]["cubin"] = lambda *_: b""
        return None


@contextmanager
def to_ptx() -> Iterator[None]:
    """In the meantime Triton compiles to PTX, of which ptxas makes nothing."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _ToPTX()
        yield


def told(tool: str, kernel: bytes, *options: str) -> str:
    """What a tool writes about a kernel's code; kept beside Triton's compiled kernels, since some take a second."""
    kept = _kept(tool, kernel, options)
    if (path := kept.get_file("told")) is not None:
        return Path(path).read_text()
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        code.write_bytes(kernel)
        done = subprocess.run([tool, *options, str(code)], capture_output=True, text=True, cwd=folder, check=True)
    return keep(done.stdout + done.stderr, tool, kernel, *options)


def keep(text: str, tool: str, kernel: bytes, *options: str) -> str:
    """The text, which `told` returns from now on."""
    _kept(tool, kernel, options).put(text, "told", binary=False)
    return text


def _kept(tool: str, kernel: bytes, options: tuple[str, ...]) -> CacheManager:
    asked = hashlib.sha256(repr((triton.__version__, Path(tool).name, options)).encode() + kernel)
    return get_cache_manager(asked.hexdigest())


def disassembled(cubin: bytes) -> str:
    """The instructions, with their addresses."""
    return told(triton.knobs.nvidia.cuobjdump.path, cubin, "-sass")


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes per thread of stack and local memory, where spilled registers go."""
    text = told(triton.knobs.nvidia.cuobjdump.path, cubin, "-res-usage")
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


class Product(NamedTuple):
    """A product that has been issued."""

    line: str
    left: range
    """Registers of its left operand; none if that is in shared memory."""
    accumulator: range


def faults(cubin: bytes) -> list[str]:
    """Instructions that show either, with what is wrong about them."""
    listing = disassembled(cubin)
    return [*_changed_operands(listing), *_unset_uniform_registers(listing)]


def _code(listing: str) -> dict[int, str]:
    """Instructions by address."""
    return {int(at, 16): line for at, line in re.findall(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", listing, re.MULTILINE)}


def _changed_operands(listing: str) -> list[str]:
    """Instructions that write the left operand of a product, or read or write its accumulator, before it is done."""
    code = _code(listing)
    found: dict[str, None] = {}
    issued: list[list[Product]] = [[]]  # in groups that are waited for; the last one is still open
    for at, line in code.items():
        issued = _step(line, issued, found)
        jump = re.match(r"(?:@!?U?P\d )?BRA (?:U?P\d, )?`?\(?(0x[0-9a-f]+)", line)
        if jump and int(jump[1], 16) < at and any(issued):  # products run on into the next trip of a loop
            running = issued
            for again, repeated in code.items():
                if int(jump[1], 16) <= again <= at and any(running):
                    running = _step(repeated, running, found)
    return list(found)


def _step(line: str, issued: list[list[Product]], found: dict[str, None]) -> list[list[Product]]:
    """The groups of products that run after an instruction; adds to `found` if it changes one of them."""
    name, operands = _parts(line)
    if "GMMA." in name:
        assert "F32" in name.split("."), f"accumulators of another type are not known here: {line}"
        columns = int(re.search(r"\.64x(\d+)x", name)[1])  # type: ignore[index]
        product = Product(line, _registers(operands[1], 4), _registers(operands[0], columns // 2))
        issued = [*issued[:-1], [*issued[-1], product]]
        return [*issued, []] if "gsb0" in operands else issued
    if name == "WARPGROUP.DEPBAR.LE":
        return issued[len(issued) - 1 - int(operands[-1], 16) :]
    written = _written(name, operands)
    used = {int(x) for operand in operands for x in re.findall(r"\bR(\d+)", operand)}.union(written)
    for product in (product for group in issued for product in group):
        if set(written) & set(product.left) or used & set(product.accumulator):
            found[f"{line} while {product.line}"] = None
    return issued


def _unset_uniform_registers(listing: str) -> list[str]:
    """Instructions that read a uniform register which none before them, in order of addresses, writes."""
    found, set_before, code = [], set[int](), _code(listing)
    for line in code.values():
        read, written = _uniform_registers(line)
        if unset := read - set_before:
            found.append(f"{line} reads {', '.join(f'UR{n}' for n in sorted(unset))}, which nothing has set")
        set_before |= read | written
        if call := re.match(r"(?:@!?U?P\d )?CALL\.REL\S* `?\(?(0x[0-9a-f]+)", line):
            set_before |= _written_by_subroutine(code, int(call[1], 16))
    return found


def _uniform_registers(line: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads, and those that it writes.

    A plain copy to a vector register counts as neither: so ptxas saves a register, whatever is in it, to use it.
    """
    name, operands = _parts(line)
    if name == "MOV":
        return set(), set()
    read, written = set[int](), set[int]()
    wide = name.startswith("U") and (".64" in name or ".WIDE" in name)
    place = 1 if re.fullmatch(r"U?P[\dT]", operands[0]) and len(operands) > 1 else 0
    if re.fullmatch(r"UR\d+", operands[place]) and re.match("U|R2UR|C?S2UR|VOTEU|C?REDUX|ELECT|LDCU", name):
        first = int(operands.pop(place)[2:])
        written = set(range(first, first + 1 + wide))
    for operand in operands:
        first, last = 0, 2 if "desc[" in operand or ".64" in name and wide else 1
        if "gdesc[" in operand:  # of the left operand, unused if that is in registers, and of the right one
            first, last = 2 if operands[1].startswith("R") else 0, 4
        for number in re.findall(r"\bUR(\d+)", operand):
            read |= set(range(int(number) + first, int(number) + last))
    return read, written


def _written_by_subroutine(code: dict[int, str], start: int) -> set[int]:
    written: set[int] = set()
    for at, line in code.items():
        if at >= start:
            written |= _uniform_registers(line)[1]
            if line.startswith("RET"):
                break
    return written


def _parts(line: str) -> tuple[str, list[str]]:
    """Name and operands of an instruction."""
    name, _, rest = re.sub(r"^@!?U?P\d\s+", "", line).partition(" ")
    return name, [x.strip() for x in rest.split(",")]


def _registers(operand: str, count: int) -> range:
    found = re.match(r"R(\d+)\b", operand)
    return range(int(found[1]), int(found[1]) + count) if found else range(0)


def _written(name: str, operands: list[str]) -> range:
    """The registers that an instruction writes."""
    if "SETP" in name:
        return range(0)
    target = operands[1] if re.fullmatch(r"P[0-6T]", operands[0]) and len(operands) > 1 else operands[0]
    count = 4 if ".128" in name or name.startswith("HMMA") else 2 if ".64" in name or ".WIDE" in name else 1
    if name.startswith("LDSM"):
        last = name.rpartition(".")[2]
        count = int(last) if last.isdigit() else 1
    if name.startswith("CS2R") and ".32" not in name:
        count = 2
    return _registers(target, count)
