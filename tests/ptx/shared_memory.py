"""Shared memory of a thread block that notices when threads do not wait for each other, or for the matrix unit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Product:
    """A `wgmma` that has been issued and not been waited for: what it still reads, and the registers it owns."""

    issued_by: str
    accumulators: set[str]
    operands: set[str]
    bytes_read: np.ndarray


@dataclass
class SharedMemory:
    """Bytes, who last wrote them, and which warps have read them since the last barrier.

    `hazards` collects, in words, every access whose result depends on timing:

    * reads of what another warp wrote, and writes over what another warp read or wrote, with no barrier in between;
    * products that read what was written by stores with no `fence.proxy.async` since;
    * writes over what a product in flight still reads.
    """

    size: int = 232_448
    hazards: dict[str, str] = field(default_factory=dict)
    in_flight: list[Product] = field(default_factory=list)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.bytes = np.full(self.size, 0xA5, np.uint8)
        self.written_in = np.full(self.size, -1)
        self.writer = np.full(self.size, -1)
        self.read_in = np.full(self.size, -1)
        self.readers = np.zeros(self.size, np.int64)  # one bit per warp
        self.fenced = np.ones(self.size, bool)

    def record(self, kind: str, instruction: str, bad: np.ndarray) -> None:
        """Records a hazard if any byte is affected."""
        if bad.any():
            self.hazards.setdefault(f"{kind}: {instruction[:90]}", f"{int(bad.sum())} bytes")

    def barrier(self) -> None:
        """All threads have arrived."""
        self.epoch += 1

    def fence(self) -> None:
        """Stores so far are visible to the matrix unit."""
        self.fenced[:] = True

    def read(self, where: np.ndarray, warps: np.ndarray, instruction: str) -> np.ndarray:
        """Bytes at `where [threads, n]`, read by the threads' warps."""
        warps = np.broadcast_to(warps[:, None], where.shape)
        fresh = (self.written_in[where] == self.epoch) & (self.writer[where] != warps)
        self.record("read before a barrier", instruction, fresh)
        self.record("read of what was never written", instruction, self.written_in[where] < 0)
        self._forget_old_readers(where)
        np.bitwise_or.at(self.readers, where, np.int64(1) << warps)
        return self.bytes[where]

    def write(
        self, where: np.ndarray, data: np.ndarray, warps: np.ndarray, instruction: str, *, copied: bool = False
    ) -> None:
        """Stores `data [threads, n]`; `copied` by `cp.async`, which needs no fence."""
        warps = np.broadcast_to(warps[:, None], where.shape)
        self.about_to_write(where, warps, instruction)
        differs = self.bytes[where] != data
        others = (self.written_in[where] == self.epoch) & (self.writer[where] != warps) & differs
        self.record("written twice without a barrier", instruction, others)
        self.bytes[where] = data
        self.written_in[where], self.writer[where], self.fenced[where] = self.epoch, warps, copied

    def about_to_write(self, where: np.ndarray, warps: np.ndarray, instruction: str) -> None:
        """Hazards of a write that begins now."""
        self._forget_old_readers(where)
        self.record("written while others may read", instruction, (self.readers[where] & ~(np.int64(1) << warps)) != 0)
        for product in self.in_flight:
            self.record("written while a product reads", instruction, np.isin(where, product.bytes_read))

    def read_by_product(self, where: np.ndarray, warps: np.ndarray, instruction: str) -> np.ndarray:
        """Bytes that the matrix unit reads for these warps."""
        self.record("product before a barrier", instruction, self.written_in[where] == self.epoch)
        self.record("product without a fence", instruction, ~self.fenced[where])
        self._forget_old_readers(where)
        self.readers[where] = np.bitwise_or.reduce(np.int64(1) << warps)
        return self.bytes[where]

    def _forget_old_readers(self, where: np.ndarray) -> None:
        old = self.read_in[where] != self.epoch
        self.readers[where[old]] = 0
        self.read_in[where] = self.epoch
