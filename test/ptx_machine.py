"""
A machine that runs translated PTX: threads, warps, and in which order they go on.

All threads of a launch run in lockstep as far as they can: of those that can go on, the ones
furthest behind do. With a seed the order is any other that a GPU may choose, warp by warp, and
copies arrive as early or as late as they may. Found are addresses outside of every buffer or not
aligned, shared memory read before it was written (it begins as NaN) or without having met who
did, what a kernel reads or writes before it waited for the one ahead, and threads that wait for
ever. Memory is sequentially consistent, so that a missing fence is not found, nor one that is in
the wrong place, and races of blocks only where an order of threads shows them.
"""

from collections import defaultdict

import numpy as np
from ptx_memory import Accesses, Memory, WINDOW
from ptx_races import Misplaced

PATIENCE = 1000
"""How often all threads may ask in vain before they are stuck."""
_RUBBISH = 0xA5


class MachineError(Exception):
    """Threads did what no kernel may do."""


class Machine(Accesses):
    """
    One launch, or some blocks of it.

    Parameters
    ----------
    kernel : ptx_translator.Kernel
    memory : Memory
    grid : (int, int, int)
        Extents of the whole grid.
    blocks : list of (int, int, int)
        The blocks of it to run together.
    threads, shared_bytes : int
        Of each block; the bytes are those of the launch.
    values : sequence
        The kernel's arguments.
    seed : int, optional
        Of another order of the threads.
    dependent : bool
        The kernel ahead may still run until a thread has waited for it.

    """

    def __init__(self, kernel, memory: Memory, grid, blocks, threads, shared_bytes, values,
                 seed=None, dependent=False):  # fmt: skip
        count = threads * len(blocks)
        self.kernel, self.blocks, self.threads, self.pc = kernel, blocks, threads, 0
        self.random = None if seed is None else np.random.default_rng(seed)
        self.iota = np.arange(count)
        self.block_of = self.iota // threads
        super().__init__(memory, len(blocks), shared_bytes, dependent)
        self.window = np.uint64(WINDOW)
        self.parameters = [
            kind(value) for kind, value in zip(kernel.parameters, values, strict=True)]
        thread = self.iota % threads
        self.special = {
            'tid.x': thread, 'laneid': thread % 32, 'ntid.x': np.full(count, threads),
            'dynamic_smem_size': np.full(count, shared_bytes),
        }  # fmt: skip
        for axis, name in enumerate('xyz'):
            index = np.array([block[axis] for block in blocks])
            self.special[f'ctaid.{name}'] = index[self.block_of]
            self.special[f'nctaid.{name}'] = np.full(count, grid[axis])
        self.pred = np.zeros((kernel.registers[1], count), bool)
        for width in (16, 32, 64):
            bank = np.full((kernel.registers[width], count * width // 8), _RUBBISH, np.uint8)
            for letter, kind in (('b', 'u'), ('u', 'u'), ('s', 'i'), ('f', 'f')):
                setattr(self, f'{letter}{width}', bank.view(f'{kind}{width // 8}'))
        self.alive = np.ones(count, bool)
        self.ready, self.parked = {0: [slice(0, count)]}, {}
        self.polling, self.meeting = [], defaultdict(list)

    def run(self) -> None:
        """Run until all threads have ended."""
        in_vain, seen = 0, -1
        with np.errstate(all='ignore'):
            while True:
                if self.perhaps(0.1):
                    self.deliver()
                if self.ready and not self.perhaps(0.1):
                    self._advance()
                    continue
                in_vain, seen = in_vain + 1 if self.changes == seen else 0, self.changes
                moved = self._ask_again()
                # In lockstep nothing arrives before all threads have asked for something.
                if not moved or (in_vain if self.random is None else self.perhaps(0.5)):
                    moved = self.deliver() or moved
                if not moved and not self.ready and not self.alive.any():
                    return
                if not moved and not self.ready or in_vain > PATIENCE:
                    raise MachineError('\n'.join(['threads wait for ever:', *self._stuck()]))

    def perhaps(self, probability: float) -> bool:
        return self.random is not None and self.random.random() < probability

    def _advance(self) -> None:
        """Run one basic block for the threads that are there."""
        pcs = list(self.ready)
        pc = min(pcs) if self.random is None else pcs[self.random.integers(len(pcs))]
        g = self._merge(self.ready.pop(pc))
        if self.random is not None:
            g = self._some(pc, g)
        together = self.kernel.together.get(pc)
        if together:
            g = self._whole_warps(pc, g, together(self, g))
        if g is None:
            return
        try:
            self.kernel.blocks[pc](self, g)
        except Misplaced as error:
            lane, what = error.args
            raise MachineError(f'{self._name(self.iota[g][lane])} at {self._where(self.pc)}: '
                               f'{what}') from None  # fmt: skip

    def _merge(self, groups):
        if len(groups) == 1:
            return groups[0]
        index = np.sort(np.concatenate([self.iota[group] for group in groups]))
        if index[-1] - index[0] + 1 == len(index):
            return slice(int(index[0]), int(index[-1]) + 1)
        return index

    def _some(self, pc: int, g):
        """Keep the threads of some warps, and let the others come later."""
        index = self.iota[g]
        mine = (self.random.random(len(self.iota) // 32) < 0.5)[index // 32]
        if not mine.any():
            return g
        self.go(pc, index[~mine])
        return index[mine]

    def _whole_warps(self, pc: int, g, needed):
        """Keep the warps whose lanes are all here, and let the others wait for theirs."""
        index = self.iota[g]
        whole = (self.active(g) & needed) == needed
        if whole.all():
            return g
        self.parked.setdefault(pc, []).append(index[~whole])
        return index[whole] if whole.any() else None

    def _ask_again(self) -> bool:
        polling, self.polling = self.polling, []
        for pc, g in polling:
            self.go(pc, g)
        return bool(polling)

    def _where(self, pc: int) -> str:
        item = self.kernel.instructions[pc]
        return f'{self.kernel.file}:{item.line}: {item.text}'

    def _name(self, thread: int) -> str:
        return f'thread {thread % self.threads} of block {self.blocks[thread // self.threads]}'

    def _stuck(self):
        """Yield which threads of every block are where."""
        waiting = [
            *((pc, g) for barrier in self.barriers.values() for pc, g in barrier.waiting),
            *((pc - 1, g) for arrived in self.meeting.values() for pc, g, _ in arrived),
            *((pc, g) for pc, groups in self.parked.items() for g in groups),
            *((pc - 1, g) for pc, groups in self.ready.items() for g in groups),
        ]  # fmt: skip
        found = defaultdict(list)
        for pc, g in waiting:
            for thread in self.iota[g]:
                found[self.block_of[thread], pc].append(thread)
        for (_, pc), threads in sorted(found.items()):
            yield f'{len(threads)} such as {self._name(threads[0])} at {self._where(pc)}'

    # What translated code calls, besides what is in memory.

    def go(self, pc: int, g) -> None:
        """Send threads to an instruction."""
        if isinstance(g, slice) or len(g):
            groups = self.ready.setdefault(pc, [])
            groups.append(g)
            groups += self.parked.pop(pc, [])

    def branch(self, g, taken, target, after: int) -> None:
        """Send threads to one of two instructions; no target ends them."""
        index = self.iota[g]
        self.go(after, g if not taken.any() else index[~taken])
        index = g if taken.all() else index[taken]
        self.leave(index) if target is None else self.go(target, index)

    def where(self, g, condition):
        """Return the threads for which a condition holds, or None."""
        if condition.all():
            return g
        return self.iota[g][condition] if condition.any() else None

    def poll(self, pc: int, g) -> None:
        """Go on when others had their turn."""
        if isinstance(g, slice) or len(g):
            self.polling.append((pc, g))

    def leave(self, g) -> None:
        """End threads."""
        self.alive[g] = False
        for key in list(self.meeting):
            self._try_release(key)

    def meet(self, g, number, count, after: int) -> None:
        """Wait at a barrier for ``count`` threads of the block, or all that live."""
        index = self.iota[g]
        blocks = self.block_of[index]
        for block in np.unique(blocks):
            key = int(block), int(np.max(number))
            self.meeting[key].append((after, index[blocks == block], count))
            self._try_release(key)

    def _try_release(self, key) -> None:
        groups = self.meeting[key]
        count = groups[0][2]
        if count is None:
            count = self.alive[self.block_of == key[0]].sum()
        if sum(len(index) for _, index, _ in groups) >= count:
            del self.meeting[key]
            self.races.meet(np.unique(np.concatenate([index for _, index, _ in groups]) // 32))
            for after, index, _ in groups:
                self.go(after, index)

    def active(self, g) -> np.ndarray:
        """Return which lanes of its warp are here, for each thread."""
        index = self.iota[g]
        here = np.zeros(len(self.iota), np.uint32)
        here[index] = 1
        bits = here.reshape(-1, 32) << np.arange(32, dtype=np.uint32)
        return bits.sum(-1, dtype=np.uint32)[index // 32]

    def shuffle(self, g, value, how: str, offset, mask) -> np.ndarray:
        """Return the values of other lanes; of one that is not here, rubbish."""
        index = self.iota[g]
        lane = index % 32
        if not ((mask >> lane.astype(np.uint32)) & 1).all():
            raise Misplaced(0, 'a lane shuffles that is not in its mask')
        source = {'bfly': lane ^ offset, 'down': lane + offset, 'up': lane - offset}[how]
        source = np.where((source < 0) | (source > 31), lane, source)
        values = np.full(4 * len(self.iota), _RUBBISH, np.uint8).view(value.dtype)
        values[index] = value
        return values[index - lane + source]

    def multiply(self, g, a, b, c):
        """Multiply with the tensor core: 16 x k by k x 8, laid out as in the manual of PTX."""
        lane, pair = np.arange(32)[:, None, None], np.arange(2)
        row, column = lane >> 2, (lane & 3) * 2 + pair
        a, b = (np.stack(part, -1).view(np.float16).reshape(-1, 32, len(part), 2)
                for part in (a, b))  # fmt: skip
        depth = 4 * a.shape[2]
        n = np.arange(a.shape[2])[:, None]
        left = np.empty((len(a), 16, depth), np.float32)
        left[:, row + 8 * (n & 1), column + 8 * (n >> 1)] = a
        n = np.arange(b.shape[2])[:, None]
        right = np.empty((len(b), depth, 8), np.float32)
        right[:, column + 8 * n, row + 0 * n] = b
        n = np.arange(2)[:, None]
        row, column = row + 8 * n, column + 0 * n
        total = np.empty((len(a), 16, 8), np.float32)
        total[:, row, column] = np.stack(c, -1).reshape(-1, 32, 2, 2)
        total += left @ right
        return total[:, row, column].reshape(-1, 4).T
