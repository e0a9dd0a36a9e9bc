"""What translated PTX does with memory: loads and stores, copies under way, barriers."""

from bisect import bisect_right
from collections import defaultdict

import numpy as np
from ptx_races import Misplaced, Races

BASE, WINDOW = 1 << 40, 1 << 45
"""Addresses of global memory, and of shared memory when seen as any other."""
RESERVED = 1024
"""Bytes at the front of shared memory that are the system's own."""


class Memory:
    """
    Global memory; each buffer is followed by as much that nobody may touch.

    Attributes
    ----------
    bytes : uint8 ndarray
    valid : bool ndarray
        Whether a byte belongs to a buffer.
    fresh : bool ndarray
        Whether a kernel wrote it that those launched since depend on.

    """

    def __init__(self):
        self.bytes = np.zeros(0, np.uint8)
        self.valid = np.zeros(0, bool)
        self.fresh = np.zeros(0, bool)
        self.starts, self.sizes = [], []

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new, zeroed memory."""
        start, room = len(self.bytes), (2 * num_bytes + 1023) // 512 * 512
        for name in ('bytes', 'valid', 'fresh'):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros(room, old.dtype)]))
        self.valid[start : start + num_bytes] = True
        self.starts.append(start)
        self.sizes.append(num_bytes)
        return BASE + start

    def view(self, address: int, num_bytes: int) -> np.ndarray:
        """Return the bytes at an address, for the host."""
        start = address - BASE
        assert start >= 0 and self.valid[start : start + max(num_bytes, 1)].all()
        return self.bytes[start : start + num_bytes]

    def place(self, where: np.ndarray, size: int, alignment: int) -> np.ndarray:
        """Return offsets of addresses after a check that all their bytes may be touched."""
        offset = where - BASE
        wrong = (offset < 0) | (offset + size > len(self.bytes)) | (offset % alignment != 0)
        if not wrong.any():
            wrong = ~(self.valid[offset] & self.valid[offset + size - 1])
        if wrong.any():
            lane = int(np.argmax(wrong))
            at = int(offset[lane])
            buffer = max(bisect_right(self.starts, at) - 1, 0)
            raise Misplaced(lane, f'{size} bytes at {at - self.starts[buffer]} of buffer '
                            f'{buffer}, which has {self.sizes[buffer]}')  # fmt: skip
        return offset


class Barrier:
    """An mbarrier: a phase is over when all have arrived, threads and bytes."""

    def __init__(self, expected: int, known: np.ndarray):
        self.expected = self.pending = expected
        self.bytes = self.phase = 0
        self.waiting = []
        self.known = known


class Accesses:
    """
    The part of a machine that accesses memory, called by translated code.

    Expects of the machine ``kernel``, ``threads`` (of a block), ``iota`` and ``block_of`` (every
    thread's number and block), ``random``, ``perhaps``, ``go`` and ``poll``.
    """

    def __init__(self, memory: Memory, blocks: int, shared_bytes: int, dependent: bool):
        self.memory = memory
        end, self.symbols = RESERVED, {}
        for name, (size, dynamic) in self.kernel.shared.items():
            if not dynamic:
                self.symbols[name], end = end, -(-(end + size) // 16) * 16
        self.symbols |= dict.fromkeys(self.kernel.shared.keys() - self.symbols.keys(), end)
        self.shared_end = end + shared_bytes
        self.stride = -(-self.shared_end // 16) * 16
        self.shared = np.full(self.stride * blocks, 0xFF, np.uint8)
        self.waited = np.full(len(self.iota), not dependent)
        self.copies, self.bulk, self.barriers = [], [], {}
        self.committed = np.zeros(len(self.iota), int)
        self.warp_of = self.iota // 32
        self.races = Races(len(self.shared), len(self.iota) // 32, self.threads // 32)
        self.changes = 0

    def place(self, g, space: str, where, size: int, alignment: int = 0):
        """Return the memory of a space and the threads' offsets into it."""
        index, alignment = self.iota[g], alignment or size
        where = np.broadcast_to(where, index.shape)
        if space == 'generic':
            inside = where >= WINDOW
            if inside.any() and not inside.all():
                raise Misplaced(0, 'shared and global addresses in one instruction')
            space = 'shared' if inside.any() else 'global'
            where = where - WINDOW if inside.any() else where
        if space != 'shared':
            return self.memory.bytes, self.memory.place(where, size, alignment)
        wrong = (where < RESERVED) | (where + size > self.shared_end) | (where % alignment != 0)
        if wrong.any():
            lane = int(np.argmax(wrong))
            raise Misplaced(lane, f'{size} bytes at {where[lane] - RESERVED} of shared memory, '
                            f'which has {self.shared_end - RESERVED}')  # fmt: skip
        return self.shared, where + self.block_of[index] * self.stride

    def load(self, g, space: str, where, dtype, count: int):
        """Return ``count`` neighbours of each thread, one array each."""
        size = np.dtype(dtype).itemsize
        memory, offset = self.place(g, space, where, size * count)
        if memory is self.shared:
            self.races.read(self.warp_of[g], offset, size * count)
        else:
            self._check_fresh(g, offset, space == 'constant')
        memory, offset = memory.view(dtype), offset // size
        return [memory[offset + i] for i in range(count)]

    def store(self, g, space: str, where, dtype, values) -> None:
        """Store neighbours."""
        size = np.dtype(dtype).itemsize
        memory, offset = self.place(g, space, where, size * len(values))
        for i, value in enumerate(values):
            memory.view(dtype)[offset // size + i] = value
        self._changed(g, memory, offset, size * len(values))

    def add(self, g, where, dtype, value) -> None:
        """Add in global memory, one thread after the other."""
        size = np.dtype(dtype).itemsize
        memory, offset = self.place(g, 'global', where, size)
        np.add.at(memory.view(dtype), offset // size, value)
        self._changed(g, memory, offset, size)

    def fetch_add(self, g, where, dtype, value) -> np.ndarray:
        """Add the same in every thread, as ``add`` does; return what each found there."""
        before = self.load(g, 'global', where, dtype, 1)[0]
        earlier = np.array([np.count_nonzero(where[:i] == at) for i, at in enumerate(where)])
        self.add(g, where, dtype, value)
        return (before + earlier * value).astype(dtype)

    def prefetch(self, g, where) -> None:
        """Check that what is asked for is there."""
        self.place(g, 'global', where, 1)

    def depend(self, g) -> None:
        """Wait for the kernel ahead."""
        self.waited[g] = True

    def _check_fresh(self, g, offset, constant: bool = False) -> None:
        waited = self.waited[g] & (not constant)
        if not waited.all():
            early = ~waited & self.memory.fresh[offset]
            if early.any():
                raise Misplaced(int(np.argmax(early)), 'read while the kernel ahead may write it')

    def _changed(self, g, memory, offset, size: int) -> None:
        self.changes += 1
        if memory is self.shared:
            self.races.write(self.warp_of[g], offset, size)
            return
        if not self.waited[g].all():
            raise Misplaced(0, 'stored before it waited for the kernel ahead')
        for i in range(0, size, 2):
            self.memory.fresh[offset + i] = True

    def copy(self, g, to, source, size) -> None:
        """Copy to shared memory, now or when it is waited for."""
        size = int(np.max(size))
        _, to = self.place(g, 'shared', to, size)
        _, source = self.place(g, 'global', source, size)
        self._check_fresh(g, source)
        self.races.check_write(self.warp_of[g], to, size)
        self.copies.append((self.iota[g], self.committed[g].copy(), to, source, size))
        if self.perhaps(0.5):
            self.await_copies(g)

    def commit(self, g) -> None:
        """Make a group of what these threads copy since their last one."""
        self.committed[g] += 1

    def await_copies(self, g, later: int = -1) -> None:
        """Complete what these threads copy, but for the groups committed last."""
        until = np.full(len(self.iota), -1)
        until[g] = self.committed[g] - later
        copies, self.copies = self.copies, []
        for index, group, to, source, size in copies:
            now = group < until[index]
            for i in range(size):
                self.shared[to[now] + i] = self.memory.bytes[source[now] + i]
            self.races.write(self.warp_of[index[now]], to[now], size)
            if not now.all():
                self.copies.append(tuple(
                    part[~now] for part in (index, group, to, source)) + (size,))  # fmt: skip

    def bulk_copy(self, g, to, source, size, where) -> None:
        """Begin to copy to shared memory; the barrier is told when all has arrived."""
        size = np.broadcast_to(size, to.shape)
        for lane, barrier in enumerate(self._barriers(g, where)):
            one, count = self.iota[g][lane : lane + 1], int(size[lane])
            _, first = self.place(one, 'shared', to[lane], count, 16)
            _, offset = self.place(one, 'global', source[lane], count, 16)
            if count % 16 or not self.memory.valid[offset[0] : offset[0] + count].all():
                raise Misplaced(lane, f'a copy of {count} bytes')
            # The copy may write from now on, and who sees the barrier sees what it wrote.
            self.races.write(self.warp_of[one], first, count)
            self.races.tell(self.warp_of[one], barrier.known)
            self.bulk.append((int(first[0]), int(offset[0]), count, barrier))

    def deliver(self) -> bool:
        """Let one of the bulk copies under way arrive."""
        if not self.bulk:
            return False
        at = 0 if self.random is None else int(self.random.integers(len(self.bulk)))
        to, source, size, barrier = self.bulk.pop(at)
        self.shared[to : to + size] = self.memory.bytes[source : source + size]
        barrier.bytes -= size
        self._complete(barrier)
        return True

    def make_barrier(self, g, where, count) -> None:
        """Begin with barriers."""
        self.place(g, 'shared', where, 8)
        count = np.broadcast_to(count, where.shape)
        for lane, block in enumerate(self.block_of[g]):
            self.barriers[int(block), int(where[lane])] = Barrier(
                int(count[lane]), self.races.nothing())

    def arrive(self, g, where, num_bytes) -> None:
        """Count threads in at barriers, which then expect so many bytes more."""
        num_bytes = np.broadcast_to(num_bytes, where.shape)
        for lane, barrier in enumerate(self._barriers(g, where)):
            self.races.tell(self.warp_of[g][lane : lane + 1], barrier.known)
            barrier.bytes += int(num_bytes[lane])
            barrier.pending -= 1
            if barrier.pending < 0:
                raise Misplaced(lane, 'more threads arrive than the barrier expects')
            self._complete(barrier)

    def is_over(self, g, where, parity) -> np.ndarray:
        """Return whether the phases of this parity are over."""
        barriers = self._barriers(g, where)
        over = np.array([barrier.phase for barrier in barriers]) != parity
        learn = {(int(self.warp_of[g][lane]), barriers[lane]) for lane in np.flatnonzero(over)}
        for warp, barrier in learn:
            self.races.learn(warp, barrier.known)
        return over

    def wait(self, g, where, parity, again: int, after: int) -> np.ndarray:
        """Let threads go on when the phases of this parity are over, or tell them to ask anew."""
        over, index = self.is_over(g, where, parity), self.iota[g]
        self.go(after, index[over])
        if self.perhaps(0.5):
            self.poll(after, index[~over])
            return over
        lanes = defaultdict(list)
        for lane, barrier in enumerate(self._barriers(g, where)):
            if not over[lane]:
                lanes[barrier].append(lane)
        for barrier, waiting in lanes.items():
            barrier.waiting.append((again, index[waiting]))
        return np.ones(len(index), bool)

    def _barriers(self, g, where) -> list[Barrier]:
        keys = zip(self.block_of[g].tolist(), where.tolist(), strict=True)
        return [self.barriers[key] for key in keys]

    def _complete(self, barrier: Barrier) -> None:
        self.changes += 1
        if barrier.pending == barrier.bytes == 0:
            barrier.phase, barrier.pending = barrier.phase ^ 1, barrier.expected
            waiting, barrier.waiting = barrier.waiting, []
            for pc, g in waiting:
                self.go(pc, g)
