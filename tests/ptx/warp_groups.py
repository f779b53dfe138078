"""Runs one thread block of a Gluon kernel whose groups of warps go their own ways: `thread_block`, a group each.

Groups meet at barriers, which have an order in time, and through copies by the copy engine (TMA), which have none until
somebody waits for them. So a block can be run with copies at the earliest and at the latest moment, and with groups in
any order: results that depend on either are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from ptx.program import Program
from ptx.shared_memory import SharedMemory
from ptx.thread_block import ThreadBlock

Array = np.ndarray
COPY_ENGINE = 62
"""Stands for a warp where the copy engine writes."""


@dataclass(frozen=True)
class Tile:
    """A tensor as a kernel gets it for the copy engine: address, sizes and strides, rows of a box, bytes per number."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int
    itemsize: int


@dataclass
class Rendezvous:
    """A barrier in shared memory (mbarrier)."""

    count: int
    pending: int = field(init=False)
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def change(self, arrivals: int, copied: int) -> None:
        """Arrivals, and bytes that copies are to bring (negative: have brought)."""
        self.pending -= arrivals
        self.bytes += copied
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


def box_of(tile: Tile, at: int, corner: list[int]) -> tuple[Array, Array, Array]:
    """Of each element of a box with rows of 128 bytes: its bytes in shared memory, its address, whether it exists."""
    box = [1] * (len(corner) - 2) + [tile.rows, 128 // tile.itemsize]
    index = np.stack(np.unravel_index(np.arange(prod(box)), box)) + np.array(corner)[:, None]
    where = at + tile.itemsize * np.arange(prod(box))
    where ^= (where >> 7 & 7) << 4  # swizzled
    inside = ((index >= 0) & (index < np.array(tile.shape)[:, None])).all(0)
    source = tile.start + tile.itemsize * (index * np.array(tile.strides)[:, None]).sum(0)
    return where[:, None] + np.arange(tile.itemsize), source, inside


class Block:
    """A thread block. `late` copies happen as late as possible; `first` is the group that runs whenever it can."""

    def __init__(
        self, program: Program, arguments: list[float | Tile], memory: Array, position: tuple[int, ...],
        grid: tuple[int, ...], late: bool, first: int,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.grid, self.late, self.first = program, memory, grid, late, first
        self.tiles = [x for x in arguments if isinstance(x, Tile)]
        values = [1 << 40 | self.tiles.index(x) if isinstance(x, Tile) else x for x in arguments]
        self.shared = SharedMemory()
        self.rendezvous: dict[int, Rendezvous] = {}
        self.barriers: dict[int, list[int]] = {}
        """Threads that have arrived, and how often all have."""
        self.loads: list[tuple[Array, Array, int]] = []
        self.groups: list[Group] = []
        for begin in range(0, program.threads, 128):
            threads = np.arange(begin, min(begin + 128, program.threads))
            self.groups.append(Group(self, values, position, threads))

    def run(self) -> dict[str, str]:
        """Runs to the end; the hazards that were met, in words."""
        while any(not group.ended for group in self.groups):
            order = sorted(self.groups, key=lambda group: group.threads[0] // 128 != self.first)
            if not any([group.advance() for group in order]):
                assert self.loads, "all groups wait: " + "; ".join(g.text for g in self.groups if not g.ended)
                self.finish_load(0)
        for group in self.groups:
            group.store(0)
        return self.shared.hazards

    def load(self, where: Array, data: Array, barrier: int) -> None:
        """A copy to shared memory begins."""
        self.loads.append((where, data, barrier))
        if not self.late:
            self.finish_load(0)

    def finish_load(self, which: int) -> None:
        """A copy to shared memory arrives."""
        where, data, barrier = self.loads.pop(which)
        self.shared.epoch = 1 << 40
        self.shared.write(where, data, np.full(len(where), COPY_ENGINE), "copy engine", copied=True)
        self.rendezvous[barrier].change(0, -data.size)


class Group(ThreadBlock):
    """Warps that run in step."""

    def __init__(self, block: Block, values: list[float], position: tuple[int, ...], threads: Array) -> None:
        super().__init__(block.program, values, block.memory, position)
        self.block, self.shared, self.values = block, block.shared, values
        self.threads, self.warps = threads, threads // 32
        self.at, self.ended, self.text = 0, False, ""
        self.waits: tuple[int, int] | None = None
        self.stores: list[list[tuple[Tile, int, list[int]]]] = [[]]
        self.epoch = 0

    def advance(self) -> bool:
        """Runs until it has to wait; whether it did anything."""
        begun = False
        while not self.ended:
            if self.waits is not None:
                barrier, times = self.waits
                if self.block.barriers[barrier][1] == times:
                    return begun
                self.waits, self.epoch = None, self.epoch + 1
            predicate, operation, operands, self.text = self.program.code[self.at]
            self.active = np.ones(len(self.threads), bool)
            if predicate is not None:
                self.active = self.registers[predicate.lstrip("@!")] ^ (predicate[1] == "!")
            if operation.startswith("mbarrier.wait") and not self.completed(operands):
                return begun
            begun = True
            self.at += 1
            self.shared.epoch = (int(self.threads[0]) << 24) + self.epoch
            if operation == "ret":
                self.ended = True
            elif operation.startswith("bra"):
                self.branch(np.where(self.active, self.program.labels[operands[0]], self.at))
            elif operation.startswith("brx"):
                targets = self.program.code[self.program.labels[operands[1]]][2]
                self.branch(np.array([self.program.labels[targets[i]] for i in self.get(operands[0])]))
            elif not operation.startswith("."):
                self.execute(operation, operands)
        return begun

    def branch(self, targets: Array) -> None:
        """Go on there; warps that go elsewhere become a group of their own."""
        for target in np.unique(targets)[1:]:
            apart = targets == target
            assert len(np.unique(self.warps[apart])) * 32 == apart.sum(), f"a warp parts ways: {self.text}"
            other = Group(self.block, self.values, self.position, self.threads[apart])
            other.registers = {name: x[apart] for name, x in self.registers.items()}
            other.at, other.epoch = int(target), self.epoch
            self.block.groups.append(other)
        stays = targets == np.unique(targets)[0]
        self.registers = {name: x[stays] for name, x in self.registers.items()}
        self.threads, self.warps, self.at = self.threads[stays], self.warps[stays], int(np.unique(targets)[0])

    def get(self, name: str, kind: str = "u32") -> Array:
        if name in self.parameters:  # the address of a tile's descriptor
            return np.full(len(self.threads), self.parameters[name], np.uint64)
        if name.startswith("%nctaid"):
            return np.full(len(self.threads), self.block.grid["xyz".index(name[-1])], np.uint32)
        if name.startswith("%rs") and name not in self.registers:  # half of a register that nobody reads
            return np.full(len(self.threads), 0x7FC0, np.uint32)
        return super().get(name, kind)

    def op_cvta(self, rest: list[str], a: list[str]) -> None:
        self.put(a[0], self.get(a[1], "u64"))

    def op_setmaxnreg(self, rest: list[str], a: list[str]) -> None:
        pass

    def op_elect(self, rest: list[str], a: list[str]) -> None:
        register, predicate = a[0].split("|")
        self.put(register, self.threads * 0)
        self.put(predicate, self.threads % 32 == 0)

    # Waiting for each other.

    def op_bar(self, rest: list[str], a: list[str]) -> None:
        if rest[0] == "warp":
            return
        (barrier,) = map(int, np.unique(self.get(a[0])))
        count = int(a[1]) if len(a) > 1 else self.program.threads
        state = self.block.barriers.setdefault(barrier, [0, 0])
        self.waits = barrier, state[1]
        state[0] += len(self.threads)
        assert state[0] <= count, f"more threads than the barrier counts: {self.text}"
        if state[0] == count:
            state[:] = 0, state[1] + 1

    op_barrier = op_bar

    def op_fence(self, rest: list[str], a: list[str]) -> None:
        self.shared.fenced |= np.isin(self.shared.writer, np.unique(self.warps))

    def completed(self, a: list[str]) -> bool:
        """Whether the phase of this parity is over."""
        barrier = self.block.rendezvous[int(self.address(a[0], "u32")[0])]
        return barrier.phase % 2 != int(self.get(a[1])[0]) % 2

    def op_mbarrier(self, rest: list[str], a: list[str]) -> None:
        if rest[0] == "wait" or not self.active.any():
            return
        where = 0 if rest[0] in ("init", "inval") else 1
        address = int(self.address(a[where], "u32")[self.active][0])
        if rest[0] == "init":
            self.block.rendezvous[address] = Rendezvous(int(a[1]))
        elif rest[0] == "inval":
            del self.block.rendezvous[address]
        else:
            expected = int(a[2]) if "expect_tx" in rest else 0
            self.block.rendezvous[address].change(int(self.active.sum()), expected)

    # The copy engine.

    def op_cp(self, rest: list[str], a: list[str]) -> None:
        if rest[1] != "bulk":
            super().op_cp(rest, a)
        elif rest[2] == "commit_group":
            self.stores.append([])
        elif rest[2] == "wait_group":
            self.store(int(a[0]))
        else:
            for thread in np.flatnonzero(self.active):
                self.copy(rest[4].startswith("shared"), a, thread)

    def copy(self, loads: bool, a: list[str], thread: int) -> None:
        """A copy of a box begins, to or from shared memory."""
        descriptor, _, coordinates = a[1 if loads else 0].strip("[]").partition(",")
        tile = self.block.tiles[int(self.get(descriptor.strip(), "u64")[thread]) & 0xFFFF]
        corner = [int(self.get(x, "s32")[thread]) for x in self.parts(coordinates)][::-1]
        at = int(self.address(a[0 if loads else 1], "u32")[thread])
        if loads:
            where, source, inside = box_of(tile, at, corner)
            data = self.memory[np.where(inside, source, 0)[:, None] + np.arange(tile.itemsize)]
            data = np.where(inside[:, None], data, 0)
            self.block.load(where, data.astype(np.uint8), int(self.address(a[2], "u32")[thread]))
        else:
            self.stores[-1].append((tile, at, corner))
            if not self.block.late:
                self.write(self.stores[-1].pop())

    def store(self, pending: int) -> None:
        """Copies to memory have read what they copy, but for the last `pending` groups."""
        ready = max(len(self.stores) - 1 - pending, 0)
        for copy in [copy for group in self.stores[:ready] for copy in group]:
            self.write(copy)
        del self.stores[:ready]

    def write(self, copy: tuple[Tile, int, list[int]]) -> None:
        """A copy to memory happens."""
        tile, at, corner = copy
        where, target, inside = box_of(tile, at, corner)
        unfenced = ~self.shared.fenced[where[inside]]
        self.shared.record("copy without a fence", f"to tile {self.block.tiles.index(tile)}", unfenced)
        self.memory[target[inside][:, None] + np.arange(tile.itemsize)] = self.shared.bytes[where[inside]]

    # What `ThreadBlock` knows of one group only.

    def op_wgmma(self, rest: list[str], a: list[str]) -> None:
        super().op_wgmma(rest, a)
        flying = [product for group in self.block.groups for products in group.products for product in products]
        self.shared.in_flight = flying
