"""
Pictures on their way to the GPU: out of the frame buffer by itself, or through pinned memory.

``FrameUpload`` is the ``target`` of a ``FrameReader``: it page-locks the mapped segment, so that
the GPU copies a frame out of it without the processor. Whether the frame was whole is the
reader's to find out, see ``runtime/frame_buffer.py``. Where the driver does not lock memory that
is mapped for reading only, the reader copies frames to pinned memory instead, as it would to any.
"""

import math

import numpy as np

from vla_edge_ros.kernels.cuda.driver import Device
from vla_edge_ros.kernels.device_array import DeviceArray


class FrameUpload:
    """
    The one picture that lies on the device, and the ways there.

    Used from one thread at a time. What is returned is valid until the next call.

    Parameters
    ----------
    device : Device
        Where to.
    address : int
        Of memory on the device as large as ``pinned``.
    pinned : uint8 [bytes]
        Pinned memory, as large as the largest picture.

    Attributes
    ----------
    route : str
        How frames of the segment reach the device; '' while there is no segment.

    """

    def __init__(self, device: Device, address: int, pinned: np.ndarray):
        self._device = device
        self._address = address
        self._pinned = pinned
        self._registered: int | None = None
        self.route = ''

    def attach(self, base: int, num_bytes: int) -> None:
        """Page-lock a segment that a reader has just mapped."""
        problem = self._device.register(base, num_bytes)
        self._registered = None if problem else base
        self.route = (
            f'through pinned memory (the frame buffer cannot be registered: {problem})'
            if problem else 'out of the frame buffer by itself')

    def detach(self, base: int) -> None:
        """Release a segment that is about to be unmapped."""
        if self._registered == base:
            self._device.unregister(base)
            self._registered = None
        self.route = ''

    def fetch(self, address: int, shape: tuple[int, ...]) -> DeviceArray | None:
        """
        Copy bytes of the attached segment to the device, and return when that is done.

        Returns None, without a copy, when the segment is not page-locked or the picture too
        large.
        """
        if self._registered is None or not self.holds(shape):
            return None
        self._device.use()
        self._device.copy_bytes_in(self._address, address, math.prod(shape))
        self._device.wait()
        return DeviceArray(self._address, shape, np.uint8)

    def holds(self, shape: tuple[int, ...]) -> bool:
        """Return whether there is room for a picture."""
        return math.prod(shape) <= self._pinned.size

    def room(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return pinned memory for a picture that :meth:`put` then need not copy; None if none."""
        return self._pinned[: math.prod(shape)].reshape(shape) if self.holds(shape) else None

    def put(self, image: np.ndarray) -> DeviceArray:
        """Queue the copy of a picture that there is room for, of any strides."""
        room = self.room(image.shape)
        if not (image.ctypes.data == room.ctypes.data and image.flags.c_contiguous):
            np.copyto(room, image)
        self._device.use()
        self._device.copy_in(self._address, room)
        return DeviceArray(self._address, image.shape, np.uint8)
