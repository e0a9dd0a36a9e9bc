"""
Who touched shared memory last, and whether all that do so now can know of it.

Warps of a block learn what others did where they meet. Each has a clock, and knows the time that
the clock of every other had when what was done until then became known to it, in whichever way.
The lanes of one warp are taken to keep in step.
"""

import numpy as np

GRAIN = 2
"""Bytes that are looked after together."""


class Misplaced(Exception):
    """What a lane may not do: which of those that are here, and what it was."""


class Races:
    """
    The history of the shared memory of some blocks.

    Parameters
    ----------
    num_bytes : int
        Of the shared memory of all blocks together.
    warps, warps_per_block : int
        Of all blocks, and of one.

    """

    def __init__(self, num_bytes: int, warps: int, warps_per_block: int):
        grains = -(-num_bytes // GRAIN)
        self.local = np.arange(warps) % warps_per_block
        self.known = np.zeros((warps, warps_per_block), np.int32)
        self.writer = np.zeros(grains, np.int64)
        self.written = np.zeros(grains, np.int32)
        self.read_at = np.zeros((grains, warps_per_block), np.int32)
        self._advance(np.arange(warps))

    def read(self, warps, offset, size: int) -> None:
        """Take note of reads."""
        mine = self.local[warps]
        for grain in self._grains(offset, size):
            writer = self.writer[grain]
            seen = self.written[grain] <= self.known[warps, writer]
            self._demand(len(warps), seen, writer, 'wrote')
            self.read_at[grain, mine] = self.known[warps, mine]

    def check_write(self, warps, offset, size: int) -> None:
        """Check that writes can begin."""
        for grain in self._grains(offset, size):
            writer = self.writer[grain]
            seen = self.written[grain] <= self.known[warps, writer]
            self._demand(len(warps), seen, writer, 'wrote')
            reads = self.read_at[grain] > self.known[warps]
            self._demand(len(warps), ~reads.any(-1), reads.argmax(-1), 'reads')

    def write(self, warps, offset, size: int) -> None:
        """Take note of writes."""
        self.check_write(warps, offset, size)
        mine = self.local[warps]
        for grain in self._grains(offset, size):
            self.writer[grain], self.written[grain] = mine, self.known[warps, mine]
            self._demand(len(warps), self.writer[grain] == mine, self.writer[grain], 'writes')

    def meet(self, warps) -> None:
        """Let all of these warps know what any of them did."""
        self.known[warps] = self.known[warps].max(0)
        self._advance(warps)

    def nothing(self) -> np.ndarray:
        """Return what is known of a new barrier."""
        return np.zeros(self.known.shape[1], np.int32)

    def tell(self, warps, known: np.ndarray) -> None:
        """Leave what a warp knows with a barrier."""
        np.maximum(known, self.known[warps].max(0), out=known)
        self._advance(warps)

    def learn(self, warp: int, known: np.ndarray) -> None:
        """Let a warp know what was left with a barrier."""
        np.maximum(self.known[warp], known, out=self.known[warp])

    def _advance(self, warps) -> None:
        self.known[warps, self.local[warps]] += 1

    def _grains(self, offset, size: int):
        if np.ndim(offset) and len(offset) == 1:
            yield np.arange(offset[0] // GRAIN, (offset[0] + size + GRAIN - 1) // GRAIN)
            return
        for i in range(0, size, GRAIN):
            yield (offset + i) // GRAIN

    def _demand(self, lanes: int, fine, others, what: str) -> None:
        if not fine.all():
            at = int(np.argmin(fine))
            raise Misplaced(at if lanes > 1 else 0, f'a race: warp {others[at]} {what} there too')
