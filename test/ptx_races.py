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
        warps, grains = self._spread(warps, offset, size)
        writer, mine = self.writer[grains], self.local[warps]
        self._demand(self.written[grains] <= self.known[warps, writer], writer, size, 'wrote')
        self.read_at[grains, mine] = self.known[warps, mine]

    def check_write(self, warps, offset, size: int) -> None:
        """Check that writes can begin."""
        warps, grains = self._spread(warps, offset, size)
        writer = self.writer[grains]
        self._demand(self.written[grains] <= self.known[warps, writer], writer, size, 'wrote')
        reads = self.read_at[grains] > self.known[warps]
        if reads.any():
            self._demand(~reads.any(-1), reads.argmax(-1), size, 'reads')

    def write(self, warps, offset, size: int) -> None:
        """Take note of writes."""
        self.check_write(warps, offset, size)
        warps, grains = self._spread(warps, offset, size)
        mine = self.local[warps]
        self.writer[grains], self.written[grains] = mine, self.known[warps, mine]
        self._demand(self.writer[grains] == mine, self.writer[grains], size, 'writes')

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

    def _spread(self, warps, offset, size: int):
        """Return warp and grain of every grain of accesses of a size."""
        count = -(-size // GRAIN)
        grains = (offset // GRAIN)[:, None] + np.arange(count)
        return np.repeat(warps, count), grains.reshape(-1)

    def _demand(self, fine, others, size: int, what: str) -> None:
        if not fine.all():
            at = int(np.argmin(fine))
            raise Misplaced(at // -(-size // GRAIN), f'a race: warp {others[at]} {what} there too')
