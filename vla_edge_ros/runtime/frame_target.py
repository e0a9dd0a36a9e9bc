"""
Frames that a device copies out of the frame buffer by itself.

A torn frame cannot get through. The writer may overtake such a copy like any other, but nobody
looks at it before it is known to be whole: when the device says that the copy is complete, the
reader asks whether the writer has begun to overwrite the slot (``atomics.is_whole``, where the
order of memory is argued). If it has, the newest frame is copied over what was torn, and after
some tries there is no frame, as for a reader that copies itself. Nobody writes to a copy that was
returned until the next one is asked for.
"""

from typing import Any, Protocol

import numpy as np

from vla_edge_ros.runtime import atomics


class FrameTarget(Protocol):
    """Where a ``FrameReader`` brings frames."""

    def attach(self, base: int, num_bytes: int) -> None:
        """Make a segment reachable that was just mapped, or note that it is not."""
        ...

    def detach(self, base: int) -> None:
        """Let go of a segment that is about to be unmapped."""
        ...

    def fetch(self, address: int, shape: tuple[int, ...]) -> Any:
        """Copy a frame of the segment and return it when that is complete; None if it cannot."""
        ...

    def room(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return uint8 memory the device can copy from, for the reader to fill; None if none."""
        ...


def fetch_newest(
    target: FrameTarget, base: int, stride: int, meta: np.ndarray, tries: int,
) -> tuple[int, Any]:
    """
    Let a target copy the newest frame.

    Parameters
    ----------
    target : FrameTarget
        Attached to the segment.
    base, stride, meta
        As of ``atomics.copy_newest``.
    tries : int
        Copies begun at most.

    Returns
    -------
    sequence : int
        Of the frame, or ``EMPTY`` or ``TORN``.
    image
        What the target made of it, None if it cannot reach the frame.

    """
    sequence = atomics.TORN
    for _ in range(tries):
        sequence = atomics.find_newest(base, stride, meta)
        if sequence == atomics.TORN:
            continue
        if sequence == atomics.EMPTY:
            break
        address = atomics.payload_of(base, stride, sequence)
        image = target.fetch(address, tuple(meta[2:].tolist()))
        if image is None or atomics.is_whole(base, sequence):
            return sequence, image
        sequence = atomics.TORN
    return sequence, None
