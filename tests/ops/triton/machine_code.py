"""What ptxas is known to get wrong about matrix products (wgmma), looked for in assembled code.

* Operands that change before the product is done: ptxas 12.8 and 12.9 put instructions that set a product's operand
  behind the product, if the operand is a constant that two products share. What the first one reads then depends on
  timing (docs/kernels.md).
* Uniform registers that nothing sets: 12.8 loses the first of four descriptors that it computes from each other. The
  products then read from anywhere in shared memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

__all__ = ["faults"]


class Product(NamedTuple):
    """A product that has been issued."""

    line: str
    left: range
    """Registers of its left operand; none if that is in shared memory."""
    accumulator: range


def faults(cubin: bytes) -> list[str]:
    """Instructions that show one of both, with what is wrong about them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
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
    name, _, rest = re.sub(r"^@!?U?P\d\s+", "", line).partition(" ")
    operands = [x.strip() for x in rest.split(",")]
    if "GMMA." in name:
        assert "F32" in name.split("."), f"accumulators of another type are not known here: {line}"
        columns = int(re.search(r"\.64x(\d+)x", name)[1])  # type: ignore[index]
        product = Product(line, _registers(operands[1], 4), _registers(operands[0], columns // 2))
        issued = [*issued[:-1], [*issued[-1], product]]
        return [*issued, []] if "gsb0" in operands else issued
    if name == "WARPGROUP.DEPBAR.LE":
        return issued[len(issued) - 1 - int(operands[-1], 16) :]
    written = _written(name, operands)
    used = {int(x) for x in re.findall(r"\bR(\d+)", rest)}.union(written)
    for product in (product for group in issued for product in group):
        if set(written) & set(product.left) or used & set(product.accumulator):
            found[f"{line} while {product.line}"] = None
    return issued


def _unset_uniform_registers(listing: str) -> list[str]:
    """Instructions that read a uniform register before any instruction in front of them writes it."""
    found, written = [], set()
    for line in _code(listing).values():
        name, _, rest = re.sub(r"^@!?U?P\d\s+", "", line).partition(" ")
        operands = [x.strip() for x in rest.split(",")]
        target = next((x for x in operands[:2] if not re.fullmatch(r"!?U?P[\dT]", x)), "")
        stores = re.match(r"ST[A-Z]*(\.|$)|RED(\.|$)", name)
        sets = None if stores else re.fullmatch(r"UR(\d+)", target)
        for operand in operands:
            count = 2 if "desc[" in operand or ".64" in name and name.startswith("U") else 1
            for number in re.findall(r"\bUR(\d+)", operand if sets is None or operand is not target else ""):
                # The left operand's descriptor in two registers, none if it is in registers, and then the right one's.
                first = int(number) + (2 if "gdesc" in operand and operands[1].startswith("R") else 0)
                last = int(number) + (4 if "gdesc" in operand else count)
                if unset := set(range(first, last)) - written:
                    found.append(f"{line} reads {', '.join(f'UR{n}' for n in sorted(unset))}, which nothing has set")
                    written |= unset
        if sets:
            count = 2 if ".64" in name or ".WIDE" in name else 1
            written |= set(range(int(sets[1]), int(sets[1]) + count))
    return found


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
