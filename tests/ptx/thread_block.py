"""Runs one thread block of a Triton kernel's PTX, all threads in step, with numpy as the arithmetic.

What it covers is what the chunk kernels of this package compile to for Hopper; `Program` raises NotImplementedError for
anything else. Registers hold bits as uint32 or uint64 arrays, one entry per thread, predicates booleans.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import numpy as np

from ptx.matrix_unit import (
    LANE,
    columns_of_registers,
    descriptor_bytes,
    from_bits,
    result_position,
    tile_of_registers,
    to_bits,
)
from ptx.program import Program
from ptx.shared_memory import Product, SharedMemory

Array = np.ndarray
COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
COMPARE |= {"ge": operator.ge}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": np.fmin, "max": np.fmax,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
UNARY: dict[str, Callable[[Array], Array]] = {"neg": operator.neg, "not": operator.invert, "abs": operator.abs}


class ThreadBlock:
    """One block at `position` of the grid; `memory` is all of global memory, and pointers are offsets into it."""

    def __init__(self, program: Program, arguments: list[float], memory: Array, position: tuple[int, ...]) -> None:
        self.program, self.memory, self.position = program, memory, position
        self.threads = np.arange(program.threads)
        self.warps = self.threads // 32
        self.registers: dict[str, Array] = {}
        self.executed = [0] * len(program.code)  # how often each instruction was, by a warp
        self.shared = SharedMemory()
        self.copies: list[list[tuple[Array, Array, Array, str]]] = [[]]  # groups of cp.async, the last one still open
        self.products: list[list[Product]] = [[]]  # groups of wgmma, likewise
        self.parameters = {
            name: int(np.float32(value).view(np.uint32)) if kind == "f32" else int(value)
            for (kind, name), value in zip(program.parameters, arguments, strict=True)
        }

    def run(self) -> dict[str, str]:
        """Runs to the end; the hazards that were met, in words."""
        at = 0
        while True:
            predicate, operation, operands, self.text = self.program.code[at]
            self.executed[at] += 1
            self.active = np.ones(len(self.threads), bool)
            if predicate is not None:
                self.active = self.registers[predicate.lstrip("@!")] ^ (predicate[1] == "!")
            at += 1
            if operation == "ret":
                return self.shared.hazards
            if operation.startswith("bra"):
                if self.active.any() != self.active.all():
                    raise NotImplementedError(f"threads part ways: {self.text}")
                at = self.program.labels[operands[0]] if self.active.all() else at
                continue
            self.execute(operation, operands)

    def execute(self, operation: str, operands: list[str]) -> None:
        """One instruction that is no branch."""
        name, *rest = operation.split(".")
        self.watch_accumulators(name, operands)
        method = getattr(self, f"op_{name}", None)
        if method is not None:
            method(rest, operands)
        else:
            self.arithmetic(name, rest, operands)

    # Operands.

    def get(self, name: str, kind: str = "u32") -> Array:
        """A register, constant or special register as a numpy array of `kind`."""
        if name.startswith("%ctaid"):
            x = np.full(len(self.threads), self.position["xyz".index(name[-1])], np.uint64)
        elif name == "%tid.x":
            x = self.threads.astype(np.uint64)
        elif name.startswith("%"):
            x = self.registers[name]
        else:
            value = (
                0 if name == "global_smem" else int(name[2:], 16) if name.startswith("0f") else int(name.rstrip("U"), 0)
            )
            x = np.full(len(self.threads), value & (1 << 64) - 1, np.uint64)
        if kind == "pred":
            return x.astype(bool)
        bits = int(re.sub(r"\D", "", kind))
        x = x.astype(np.uint64) & np.uint64((1 << bits) - 1)
        if bits == 64:
            return x.view(np.int64) if kind[0] == "s" else x
        if kind == "f32":
            return x.astype(np.uint32).view(np.float32)
        return x.astype(np.uint32).view(np.int32) if kind == "s32" else x.astype(np.uint32)

    def put(self, name: str, value: Array) -> None:
        """Writes the active threads' part of a register."""
        value = np.ascontiguousarray(value)
        if value.dtype != bool:
            value = value.view(np.uint64 if value.dtype.itemsize == 8 else np.uint32)
        old = self.registers.get(name, np.zeros(len(self.threads), value.dtype))
        self.registers[name] = np.where(self.active, value, old.astype(value.dtype))

    def address(self, operand: str, kind: str) -> Array:
        """`[register + offset]`."""
        base, _, offset = operand.strip("[] ").replace(" ", "").partition("+")
        return self.get(base, kind).astype(np.int64) + int(offset or 0)

    @staticmethod
    def parts(operand: str) -> list[str]:
        """The registers of `{a, b}`."""
        return [part.strip() for part in operand.strip("{} ").split(",")]

    # Arithmetic.

    def arithmetic(self, name: str, rest: list[str], a: list[str]) -> None:
        """Everything that reads registers of one type and writes one of it."""
        if "f16" in rest[-1]:
            self.of_16_bits(name, rest[-1], a)
            return
        kind = rest[-1].replace("b", "u") if rest[-1] != "pred" else "pred"
        if name in ("fma", "mad") or "wide" in rest or "hi" in rest:
            self.put(a[0], self.multiply(name, rest, kind, a))
        elif name in ("shl", "shr"):
            x, by, bits = self.get(a[1], kind), self.get(a[2]).astype(np.int64), int(kind[1:])
            if kind[0] == "s":
                result = x >> np.minimum(by, bits - 1).astype(x.dtype)
            else:
                shift = operator.lshift if name == "shl" else operator.rshift
                wide = shift(x.astype(np.uint64), np.minimum(by, 63).astype(np.uint64))
                result = np.where(by < bits, wide & np.uint64((1 << bits) - 1), np.uint64(0)).astype(x.dtype)
            self.put(a[0], result)
        elif name in UNARY:
            self.put(a[0], UNARY[name](self.get(a[1], kind)))
        elif name == "div" and kind == "f32":
            self.put(a[0], self.get(a[1], kind) / self.get(a[2], kind))
        elif name in ("div", "rem"):
            x, y = (self.get(operand, kind).astype(np.int64) for operand in a[1:])
            quotient = np.sign(x) * np.sign(y) * (abs(x) // abs(y))
            self.put(a[0], (quotient if name == "div" else x - quotient * y).astype(f"i{int(kind[1:]) // 8}"))
        elif name in BINARY:
            result = BINARY[name](self.get(a[1], kind), self.get(a[2], kind))
            self.put(a[0], result & np.uint32(0xFFFF) if kind == "u16" else result)
        else:
            raise NotImplementedError(self.text)

    def multiply(self, name: str, rest: list[str], kind: str, a: list[str]) -> Array:
        """Products with a sum, or with more bits than their factors."""
        if kind == "f32":
            x, y, z = (self.get(operand, kind).astype(np.float64) for operand in a[1:])
            return (x * y + z).astype(np.float32)
        if "wide" in rest or "hi" in rest:
            wide = (self.get(a[1], kind).astype(np.int64) * self.get(a[2], kind).astype(np.int64)).view(np.uint64)
            if "hi" in rest:
                return (wide >> np.uint64(32)).astype(np.uint32)
            return wide + self.get(a[3], "u64") if name == "mad" else wide
        return self.get(a[1], kind) * self.get(a[2], kind) + self.get(a[3], kind)

    def op_mov(self, rest: list[str], a: list[str]) -> None:
        bits = 64 if rest[-1].endswith("64") else 32
        if a[0].startswith("{"):
            names, x = self.parts(a[0]), self.get(a[1], f"u{bits}").astype(np.uint64)
            each = bits // len(names)
            for i, name in enumerate(names):
                self.put(name, (x >> np.uint64(each * i) & np.uint64((1 << each) - 1)).astype(np.uint32))
        elif a[1].startswith("{"):
            names = self.parts(a[1])
            each = bits // len(names)
            words = [
                self.get(name, f"u{each}").astype(np.uint64) << np.uint64(each * i) for i, name in enumerate(names)
            ]
            self.put(a[0], np.bitwise_or.reduce(words).astype(np.uint64 if bits == 64 else np.uint32))
        else:
            self.put(a[0], self.get(a[1], rest[-1]))

    def op_bfe(self, rest: list[str], a: list[str]) -> None:
        x, first, length = self.get(a[1]), int(a[2]), int(a[3])
        field = x >> np.uint32(first) & np.uint32((1 << length) - 1)
        if rest[-1] == "s32":
            field = np.where(
                field >> np.uint32(length - 1), field | np.uint32(0xFFFFFFFF << length & 0xFFFFFFFF), field
            )
        self.put(a[0], field.astype(np.uint32))

    def op_prmt(self, rest: list[str], a: list[str]) -> None:
        both = self.get(a[1]).astype(np.uint64) | self.get(a[2]).astype(np.uint64) << np.uint64(32)
        selector, result = self.get(a[3]).astype(np.uint64), np.zeros(len(both), np.uint64)
        for i in range(4):
            which = selector >> np.uint64(4 * i) & np.uint64(15)
            byte = both >> np.uint64(8) * (which & np.uint64(7)) & np.uint64(0xFF)
            byte = np.where(which < 8, byte, (byte >> np.uint64(7)) * np.uint64(0xFF))  # its sign, eight times
            result |= byte << np.uint64(8 * i)
        self.put(a[0], result.astype(np.uint32))

    def op_setp(self, rest: list[str], a: list[str]) -> None:
        if rest[-1] in ("bf16", "f16"):
            x, y = (from_bits(self.get(operand, "u16"), rest[-1]) for operand in a[1:])
        else:
            x, y = (self.get(operand, rest[-1].replace("b", "u")) for operand in a[1:])
        nan = (x != x) | (y != y)
        if rest[0] in ("num", "nan"):
            self.put(a[0], ~nan if rest[0] == "num" else nan)
        else:
            unordered = len(rest[0]) == 3  # "geu" and the like are true for NaN
            self.put(a[0], COMPARE[rest[0][:2]](x, y) & ~nan | (unordered & nan))

    def op_selp(self, rest: list[str], a: list[str]) -> None:
        kind = "u" + rest[-1][1:]
        self.put(a[0], np.where(self.get(a[3], "pred"), self.get(a[1], kind), self.get(a[2], kind)))

    def op_cvt(self, rest: list[str], a: list[str]) -> None:
        to, of = rest[-2:]
        if "tf32" in rest:
            self.put(a[0], self.get(a[1]) + np.uint32(0x1000) & np.uint32(0xFFFFE000))
            return
        if to.endswith("x2"):
            high, low = (to_bits(self.get(operand, "f32"), to.removesuffix("x2")) for operand in a[1:])
            self.put(a[0], high << np.uint32(16) | low)
            return
        x = from_bits(self.get(a[1], "u16"), of) if of in ("bf16", "f16") else self.get(a[1], of)
        if "rmi" in rest:  # a floor
            x = np.floor(x)
        types = {"f32": np.float32, "u64": np.uint64, "s64": np.int64, "u32": np.uint32, "s32": np.int32}
        if to in ("bf16", "f16"):
            self.put(a[0], to_bits(x.astype(np.float32), to))
        else:
            self.put(a[0], x.astype(np.uint32) & np.uint32(0xFFFF) if to == "u16" else x.astype(types[to]))

    def op_ex2(self, rest: list[str], a: list[str]) -> None:
        with np.errstate(over="ignore"):  # a GPU gives inf without a word
            self.put(a[0], np.exp2(self.get(a[1], "f32")))

    def op_rcp(self, rest: list[str], a: list[str]) -> None:
        self.put(a[0], np.float32(1) / self.get(a[1], "f32"))

    def of_16_bits(self, name: str, kind: str, a: list[str]) -> None:
        """A sum, difference, negation or magnitude of bf16 or f16, or of two of them in a register (x2)."""
        terms = [self.get(operand).astype(np.uint32) for operand in a[1:]]
        result, of = np.zeros_like(terms[0]), kind.removesuffix("x2")
        for shift in map(np.uint32, (0, 16) if kind.endswith("x2") else (0,)):
            values = (from_bits(x >> shift & 0xFFFF, of) for x in terms)
            result |= to_bits((BINARY | UNARY)[name](*values), of) << shift
        self.put(a[0], result)

    def op_shfl(self, rest: list[str], a: list[str]) -> None:
        if int(a[3]) != (0 if rest[1] == "up" else 31):
            raise NotImplementedError(f"parts of warps: {self.text}")
        lane, by = self.threads % 32, self.get(a[2]).astype(np.int64)
        source = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": by}[rest[1]]
        source = np.where((source >= 0) & (source < 32), source, lane)
        self.put(a[0], self.get(a[1])[np.arange(len(lane)) - lane + source])

    def op_redux(self, rest: list[str], a: list[str]) -> None:
        reduce = {"min": np.min, "max": np.max, "add": np.sum, "or": np.bitwise_or.reduce}[rest[1]]
        by_warp = self.get(a[1], rest[-1]).reshape(-1, 32)
        self.put(a[0], np.repeat(reduce(by_warp, axis=1), 32).astype(by_warp.dtype))

    # Memory.

    def op_ld(self, rest: list[str], a: list[str]) -> None:
        if rest[0] == "param":
            value = self.parameters[a[1].strip("[]")]
            self.put(a[0], self.get(str(value), "u" + rest[-1][1:]))
            return
        size, where = int(rest[-1][1:]) // 8, self.address(a[1], "u32" if rest[0] == "shared" else "u64")
        for i, name in enumerate(self.parts(a[0])):
            at = (where + i * size)[:, None] + np.arange(size)
            data = np.zeros((len(self.threads), 8), np.uint8)
            if rest[0] == "shared":
                data[self.active, :size] = self.shared.read(at[self.active], self.warps[self.active], self.text)
            else:
                data[self.active, :size] = self.memory[at[self.active]]
            word = data.view(np.uint64)[:, 0]
            self.put(name, word if size == 8 else word.astype(np.uint32))

    def op_st(self, rest: list[str], a: list[str]) -> None:
        size, where = int(rest[-1][1:]) // 8, self.address(a[0], "u32" if rest[0] == "shared" else "u64")
        for i, name in enumerate(self.parts(a[1])):
            at = ((where + i * size)[:, None] + np.arange(size))[self.active]
            data = self.get(name, "u64").view(np.uint8).reshape(-1, 8)[self.active, :size]
            if rest[0] == "shared":
                self.shared.write(at, data, self.warps[self.active], self.text)
            else:
                self.memory[at] = data

    def op_cp(self, rest: list[str], a: list[str]) -> None:
        if rest[1] == "commit_group":
            self.copies.append([])
        elif rest[1] == "wait_group":
            arrived = max(len(self.copies) - 1 - int(a[0], 0), 0)
            for copy in [copy for group in self.copies[:arrived] for copy in group]:
                self.shared.write(*copy, copied=True)
            del self.copies[:arrived]
        else:
            size, valid = int(a[2], 0), self.get(a[3]) if len(a) > 3 else np.full(len(self.threads), int(a[2], 0))
            where, source = (
                self.address(a[i], kind)[:, None] + np.arange(size) for i, kind in ((0, "u32"), (1, "u64"))
            )
            inside = np.arange(size) < valid[:, None]
            data = np.where(inside, self.memory[np.where(inside & self.active[:, None], source, 0)], 0)[self.active]
            where, warps = where[self.active], self.warps[self.active]
            self.shared.about_to_write(where, np.broadcast_to(warps[:, None], where.shape), self.text)
            self.copies[-1].append((where, data.astype(np.uint8), warps, self.text))

    def op_ldmatrix(self, rest: list[str], a: list[str]) -> None:
        self.exchange(rest, self.parts(a[0]), self.address(a[1], "u32"), load=True)

    def op_stmatrix(self, rest: list[str], a: list[str]) -> None:
        self.exchange(rest, self.parts(a[1]), self.address(a[0], "u32"), load=False)

    def exchange(self, rest: list[str], names: list[str], where: Array, load: bool) -> None:
        """8 x 8 tiles of 16 bits between registers and the rows whose addresses eight lanes give."""
        warps = len(self.threads) // 32
        for i, name in enumerate(names):
            rows = where.reshape(warps, 32)[:, 8 * i : 8 * i + 8].reshape(-1, 1) + np.arange(16)
            owners = np.repeat(self.warps[::32], 8)
            if load:
                tile = self.shared.read(rows, owners, self.text).view(np.uint16).reshape(warps, 8, 8).astype(np.uint32)
                tile = tile.transpose(0, 2, 1) if "trans" in rest else tile
                word = tile[:, LANE // 4, LANE % 4 * 2] | tile[:, LANE // 4, LANE % 4 * 2 + 1] << np.uint32(16)
                self.put(name, word.reshape(-1))
            else:
                word, tile = self.get(name).reshape(warps, 32), np.zeros((warps, 8, 8), np.uint16)
                tile[:, LANE // 4, LANE % 4 * 2], tile[:, LANE // 4, LANE % 4 * 2 + 1] = word & 0xFFFF, word >> 16
                tile = np.ascontiguousarray(tile.transpose(0, 2, 1) if "trans" in rest else tile)
                self.shared.write(rows, tile.view(np.uint8).reshape(-1, 16), owners, self.text)

    def op_bar(self, rest: list[str], a: list[str]) -> None:
        self.shared.barrier()

    def op_fence(self, rest: list[str], a: list[str]) -> None:
        self.shared.fence()

    # The matrix unit.

    def op_mma(self, rest: list[str], a: list[str]) -> None:
        kind = next(k for k in ("tf32", "bf16", "f16") if k in rest)
        left, right = ([self.get(name) for name in self.parts(operand)] for operand in a[1:3])
        self.accumulate(a[0], self.parts(a[3]), tile_of_registers(left, kind) @ columns_of_registers(right, kind))

    def op_wgmma(self, rest: list[str], a: list[str]) -> None:
        if rest[0] == "mma_async":
            self.product(rest, a)
        elif rest[0] == "commit_group":
            self.products.append([])
        elif rest[0] == "wait_group":
            del self.products[: max(len(self.products) - 1 - int(a[0]), 0)]
        self.shared.in_flight = [product for group in self.products for product in group]

    def product(self, rest: list[str], a: list[str]) -> None:
        """One `wgmma`, done at once but noted as in flight."""
        kind, columns, groups = rest[-1], int(re.search(r"n(\d+)k", self.text)[1]), len(self.threads) // 128  # type: ignore[index]
        touched: list[Array] = []

        def from_shared(operand: str, rows: int, transposed: bool) -> Array:
            tiles = []
            for descriptor in self.get(operand, "u64")[::128]:
                where = descriptor_bytes(int(descriptor), rows, kind, transposed)
                data = self.shared.read_by_product(where, np.unique(self.warps), self.text)
                touched.append(where.ravel())
                bits = data.astype(np.uint32) << 8 * np.arange(data.shape[-1], dtype=np.uint32)
                tiles.append(from_bits(bits.sum(-1, dtype=np.uint32), kind))
            return np.stack(tiles)

        flags = a[-2:] if kind != "tf32" and not a[1].startswith("{") else ["0", a[-1] if kind != "tf32" else "0"]
        if a[1].startswith("{"):
            left = tile_of_registers([self.get(name) for name in self.parts(a[1])], kind).reshape(groups, 64, -1)
        else:
            left = from_shared(a[1], 64, flags[0] == "1")
        result = left @ from_shared(a[2], columns, flags[1] == "1").transpose(0, 2, 1)
        added = self.get(a[3], "pred")[0] if a[3].startswith("%") else a[3] != "0"
        names = self.parts(a[0])
        self.accumulate(a[0], names if added else [], result)
        operands = set(self.parts(a[1])) if a[1].startswith("{") else set()
        self.products[-1].append(Product(self.text, set(names), operands, np.unique(np.concatenate(touched))))

    def accumulate(self, target: str, added: list[str], result: Array) -> None:
        """Spreads a product `[warps or groups, rows, columns]` over result registers."""
        result = result.reshape(-1, result.shape[-1])
        for i, name in enumerate(self.parts(target)):
            value = result[result_position(i, len(self.threads))]
            self.put(name, (value + self.get(added[i], "f32") if added else value).astype(np.float32))

    def watch_accumulators(self, name: str, operands: list[str]) -> None:
        """Registers of products in flight that another instruction uses as operands or results.

        Copies are left out: they belong to the wait that follows, and ptxas knows to wait before them.
        """
        in_flight = [product for group in self.products for product in group]
        if name in ("wgmma", "mov") or not in_flight:
            return
        used = set(re.findall(r"%\w+", " ".join(operands)))
        for product in in_flight:
            for register in used & product.accumulators:
                self.shared.hazards.setdefault(f"result used before the wait: {self.text[:90]}", register)
            if operands and operands[0] in product.operands:
                self.shared.hazards.setdefault(f"operand overwritten before the wait: {self.text[:90]}", operands[0])
