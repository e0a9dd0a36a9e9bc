"""
Bookkeeping of the key/value cache: which slot holds what.

Slots are rows of the transformer's key and value storage, in three regions::

    [ prompt (pinned) | frames, slots_per_frame each | scratch for decode ]

A frame keeps its slots for life. Its rotary position is the *rank* of a slot in
``context_slots`` (prompt, then retained frames in time order), so a hole left by an eviction
moves no key and an endless stream never leaves the trained positions. All arrays are allocated
once.
"""

from dataclasses import dataclass

import numpy as np

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.eviction import EvictionPolicy, RetainedFrames


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """
    Sizes of the slot regions.

    Raises
    ------
    ConfigError
        A size is negative, or ``kv_slots`` has no room for one frame.

    """

    prompt_slots: int
    kv_slots: int
    slots_per_frame: int
    scratch_slots: int

    def __post_init__(self):
        """Check the sizes."""
        for field, low in (('prompt_slots', 0), ('slots_per_frame', 1), ('scratch_slots', 0)):
            if getattr(self, field) < low:
                raise ConfigError(field, f'must be >= {low}', getattr(self, field))
        if self.kv_slots < self.slots_per_frame:
            rule = f'must be >= slots_per_frame {self.slots_per_frame}'
            raise ConfigError('kv_slots', rule, self.kv_slots)

    @property
    def max_frames(self) -> int:
        """Return the number of frames that fit; a remainder of ``kv_slots`` stays unused."""
        return self.kv_slots // self.slots_per_frame

    @property
    def total_slots(self) -> int:
        """Return the number of slots in all regions."""
        return self.prompt_slots + self.kv_slots + self.scratch_slots


@dataclass(slots=True)
class Insertion:
    """
    Where a new frame goes and what it may attend to.

    Attributes
    ----------
    frame_id : int
        1, 2, 3, ... since the last reset.
    slots : int32 [slots_per_frame]
        Slots to write.
    evicted_frame_id : int or None
        The frame that left for it.
    context_slots : int32 [context]
        Prompt and earlier retained frames in time order; a view, valid until the next change.

    """

    frame_id: int
    slots: np.ndarray
    evicted_frame_id: int | None
    context_slots: np.ndarray


class KVCache:
    """
    Hands out slots to frames and evicts one when none is free.

    Parameters
    ----------
    layout : CacheLayout
        Sizes of the slot regions.
    eviction : EvictionPolicy
        Chooses the frame that leaves.
    embedding_size : int
        Length of the pooled frame embedding.
    pin_first : bool
        Never evict the first frame since the last reset.
    pin_newest : bool
        Never evict the frame that came just before the newcomer.

    Raises
    ------
    ConfigError
        The pinned frames leave none to evict.

    """

    def __init__(
        self,
        layout: CacheLayout,
        eviction: EvictionPolicy,
        embedding_size: int,
        pin_first: bool = False,
        pin_newest: bool = True,
    ):
        pinned = int(pin_first) + int(pin_newest)
        if layout.max_frames <= pinned:
            rule = f'must hold more frames than the {pinned} pinned'
            raise ConfigError('kv_slots', rule, layout.kv_slots)
        self.layout = layout
        self.version = 0
        self.retained = RetainedFrames(layout.max_frames, embedding_size)
        self._eviction = eviction
        self._pin_first = int(pin_first)
        self._pin_newest = int(pin_newest)
        self._last_frame_id = 0
        self._prompt_tokens = 0
        slots = np.arange(layout.total_slots, dtype=np.int32)
        frames_end = layout.prompt_slots + layout.max_frames * layout.slots_per_frame
        frames = slots[layout.prompt_slots : frames_end]
        self._block_slots = frames.reshape(layout.max_frames, layout.slots_per_frame)
        self.scratch_slots = slots[layout.prompt_slots + layout.kv_slots :]
        # The prompt is right-aligned before the frames, so that its length moves no frame.
        self._context = slots[:frames_end].copy()
        self._context_frames = self._context[layout.prompt_slots :].reshape(
            self._block_slots.shape
        )

    @property
    def num_frames(self) -> int:
        """Return the number of retained frames."""
        return self.retained.count

    @property
    def context_slots(self) -> np.ndarray:
        """Return prompt and retained frames in time order, int32; valid until the next change."""
        return self._context_of(self.retained.count)

    def set_prompt(self, num_tokens: int) -> None:
        """
        Say that the prompt now fills the first ``num_tokens`` slots; the frames stay.

        Raises
        ------
        ConfigError
            More tokens than ``prompt_slots``.

        """
        if not 0 <= num_tokens <= self.layout.prompt_slots:
            rule = f'must be in 0..{self.layout.prompt_slots} tokens'
            raise ConfigError('prompt', rule, num_tokens)
        self._prompt_tokens = num_tokens
        start = self.layout.prompt_slots - num_tokens
        self._context[start : self.layout.prompt_slots] = np.arange(num_tokens, dtype=np.int32)
        self.version += 1

    def insert(self, embedding: np.ndarray, stamp_ns: int) -> Insertion:
        """
        Give a new frame its slots, evicting one first when the cache is full.

        Parameters
        ----------
        embedding : float32 [embedding_size]
            Pooled embedding of the frame; a zero vector is similar to nothing.
        stamp_ns : int
            Header stamp of the image, ns; never older than the newest retained.

        Raises
        ------
        ShapeError
            The embedding has the wrong shape or type, or is not finite.
        ConfigError
            The stamp runs backwards: ``reset`` first.

        """
        frames = self.retained
        frames.prepare(embedding, stamp_ns)
        evicted_frame_id = None
        block = frames.count
        if block == self.layout.max_frames:
            last = frames.count - self._pin_newest
            rank = self._eviction.choose(frames, self._pin_first, last)
            evicted_frame_id = int(frames.ids[rank])
            block = frames.remove(rank)
        self._last_frame_id += 1
        frames.append(self._last_frame_id, block)
        count = frames.count
        # mode='clip' lets numpy write to `out` without a temporary copy
        self._block_slots.take(
            frames.blocks, axis=0, out=self._context_frames[:count], mode='clip'
        )
        self.version += 1
        return Insertion(
            self._last_frame_id,
            self._block_slots[block],
            evicted_frame_id,
            self._context_of(count - 1),
        )

    def reset(self) -> None:
        """Forget all frames; the prompt stays."""
        self.retained.reset()
        self._last_frame_id = 0
        self.version += 1

    def _context_of(self, num_frames: int) -> np.ndarray:
        prompt_slots = self.layout.prompt_slots
        end = prompt_slots + num_frames * self.layout.slots_per_frame
        return self._context[prompt_slots - self._prompt_tokens : end]
