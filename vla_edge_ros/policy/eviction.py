"""
Which frame leaves a full cache.

A policy is asked when a frame has come and no slot is free: it sees the retained frames in time
order and the stamp of the newcomer, and names the rank of the frame to evict. The newcomer
itself always gets in. Ranks outside ``first..last-1`` are pinned.
"""

from typing import Protocol

import numpy as np

from vla_edge_ros.errors import ConfigError, ShapeError

SIMILARITY_DECIMALS = 9  # above the rounding of a float64 dot product: equal frames tie exactly


class RetainedFrames:
    """
    The frames of a cache in time order, with the similarity of each to its successor.

    Parameters
    ----------
    max_frames : int
        Capacity; every array is allocated here and never again.
    embedding_size : int
        Length of a pooled frame embedding.

    Notes
    -----
    A frame keeps its ``block`` (row of the embeddings, place of its slots) while its rank falls.
    An embedding whose norm is below 1e-100 has no direction: its similarity to all is 0.

    """

    def __init__(self, max_frames: int, embedding_size: int):
        self.max_frames = max_frames
        self.embedding_size = embedding_size
        self.count = 0
        # by rank; the column after the last frame holds the newcomer's stamp
        self._by_rank = np.zeros((3, max_frames + 1), np.int64)
        self._ids, self._stamps_ns, self._blocks = self._by_rank
        self._similarities = np.zeros(max_frames, np.float64)
        self._units = np.zeros((max_frames, embedding_size), np.float64)
        self._incoming = np.zeros(embedding_size, np.float64)

    @property
    def ids(self) -> np.ndarray:
        """Return the frame ids, oldest first (a view)."""
        return self._ids[: self.count]

    @property
    def stamps_ns(self) -> np.ndarray:
        """Return the stamps in ns, oldest first (a view)."""
        return self._stamps_ns[: self.count]

    @property
    def stamps_with_newcomer_ns(self) -> np.ndarray:
        """Return the stamps in ns and after them the prepared newcomer's (a view)."""
        return self._stamps_ns[: self.count + 1]

    @property
    def blocks(self) -> np.ndarray:
        """Return the blocks, oldest first (a view)."""
        return self._blocks[: self.count]

    @property
    def similarities(self) -> np.ndarray:
        """Return the cosines of ranks ``i`` and ``i + 1``; one fewer than frames (a view)."""
        return self._similarities[: max(self.count - 1, 0)]

    def prepare(self, embedding: np.ndarray, stamp_ns: int) -> None:
        """
        Check the newcomer and hold it for :meth:`append`; changes no frame.

        Raises
        ------
        ShapeError
            The embedding is not float32 ``[embedding_size]`` or has a NaN or infinite element.
        ConfigError
            The stamp is older than the newest retained one.

        """
        if embedding.shape != (self.embedding_size,) or embedding.dtype != np.float32:
            rule = f'must be float32 [{self.embedding_size}]'
            raise ShapeError('embedding', rule, (str(embedding.dtype), embedding.shape))
        if self.count and stamp_ns < self._stamps_ns[self.count - 1]:
            newest_ns = int(self._stamps_ns[self.count - 1])
            raise ConfigError('stamp_ns', f'must be >= the newest retained {newest_ns}', stamp_ns)
        self._incoming[:] = embedding
        norm = float(np.dot(self._incoming, self._incoming)) ** 0.5
        if not norm < np.inf:
            raise ShapeError('embedding', 'must have finite elements', f'norm {norm}')
        self._incoming *= 1.0 / norm if norm > 1e-100 else 0.0
        self._stamps_ns[self.count] = stamp_ns

    def append(self, frame_id: int, block: int) -> None:
        """Add the prepared newcomer as the newest frame."""
        rank = self.count
        self._ids[rank] = frame_id
        self._blocks[rank] = block
        self._units[block] = self._incoming
        self.count += 1
        if rank:
            self._similarities[rank - 1] = self._similarity(rank - 1, rank)

    def remove(self, rank: int) -> int:
        """Drop the frame at ``rank`` and return the block it leaves."""
        block = int(self._blocks[rank])
        self._by_rank[:, rank : self.count] = self._by_rank[:, rank + 1 : self.count + 1]
        self._similarities[rank : self.count - 1] = self._similarities[rank + 1 : self.count]
        self.count -= 1
        if 0 < rank < self.count:
            self._similarities[rank - 1] = self._similarity(rank - 1, rank)
        return block

    def reset(self) -> None:
        """Forget all frames."""
        self.count = 0

    def _similarity(self, older: int, newer: int) -> float:
        units, blocks = self._units, self._blocks
        cosine = float(np.dot(units[blocks[older]], units[blocks[newer]]))
        return round(cosine, SIMILARITY_DECIMALS)


class EvictionPolicy(Protocol):
    """Names the frame that leaves."""

    def choose(self, frames: RetainedFrames, first: int, last: int) -> int:
        """
        Return the rank to evict.

        Parameters
        ----------
        frames : RetainedFrames
            The retained frames and the prepared newcomer.
        first, last : int
            Ranks ``first..last-1`` may be evicted; there is at least one.

        """
        ...


class FifoEviction:
    """The oldest frame goes."""

    def choose(self, frames: RetainedFrames, first: int, last: int) -> int:
        """Return the oldest rank that is not pinned."""
        return first


class SemanticEviction:
    """
    The older frame of the most similar adjacent pair goes; of equal pairs the oldest.

    A pair whose older frame is pinned is passed over. Similarities are compared to
    ``SIMILARITY_DECIMALS``, so the frames of a still scene tie and leave oldest first.
    """

    def choose(self, frames: RetainedFrames, first: int, last: int) -> int:
        """Return the older rank of the most similar pair, or ``first`` when there is no pair."""
        pairs = frames.similarities[first:last]
        return first + int(pairs.argmax()) if pairs.size else first


class UniformEviction:
    """
    Keep the retained stamps as evenly spaced over the whole stream as possible.

    The frame goes whose leaving makes the sum of the squared gaps between consecutive stamps,
    the newcomer's among them, smallest; of equals the oldest. The oldest frame marks the start
    of the stream and stays, unless no other may go.

    Notes
    -----
    Leaving merges the gaps ``a`` before and ``b`` after a frame, which adds ``2 a b`` to the sum:
    the smallest product decides. Products are float64, exact up to gaps of 90 ms.

    """

    def choose(self, frames: RetainedFrames, first: int, last: int) -> int:
        """Return the rank that stands most crowded between its neighbours."""
        first_inner = max(first, 1)
        if first_inner >= last:
            return first
        stamps_ns = frames.stamps_with_newcomer_ns[first_inner - 1 : last + 1]
        gaps = (stamps_ns[1:] - stamps_ns[:-1]).astype(np.float64)
        return first_inner + int((gaps[:-1] * gaps[1:]).argmin())


def make_eviction_policy(name: str) -> EvictionPolicy:
    """
    Return the policy called ``semantic``, ``fifo`` or ``uniform``.

    Raises
    ------
    ConfigError
        There is no such policy.

    """
    policies = {'semantic': SemanticEviction, 'fifo': FifoEviction, 'uniform': UniformEviction}
    if name not in policies:
        raise ConfigError('eviction', f'must be one of {", ".join(policies)}', name)
    return policies[name]()
