"""
The newest camera frame, handed from one process to others through POSIX shared memory.

One ``FrameWriter``, any number of ``FrameReader``; nobody ever waits for anybody. ``atomics.py``
holds the lock-free protocol, this module the life of the segment ``/dev/shm/<name>``:

- The writer holds an exclusive ``flock`` on the segment as long as it lives. The kernel drops the
  lock with the process, however that ends, so a name whose lock is free belongs to the dead and
  is replaced, without guessing from process ids (which mean nothing across containers). A child
  forked without exec inherits the lock; start children by exec or before the writer.
- A segment is built under the lock and its magic word is stored last; readers take one without
  it for no segment. A segment that was ever visible is never resized, only unlinked, so that a
  reader's mapping stays valid until the reader leaves it.
- A frame larger than the capacity, or a restarted writer, means a new segment of the same name.
  A reader that finds nothing new looks whether the name leads elsewhere by now, and follows.
- ``multiprocessing.shared_memory`` is not used: before Python 3.13 its resource tracker unlinks
  segments that other processes still use.
"""

from dataclasses import dataclass
import fcntl
import mmap
import os
import re
from typing import Any

import numpy as np

from vla_edge_ros.errors import ShapeError, TransportError
from vla_edge_ros.runtime import atomics
from vla_edge_ros.runtime.frame_target import fetch_newest, FrameTarget

DIRECTORY = '/dev/shm'
MAX_TRIES = 8
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.-]{0,127}')


@dataclass(frozen=True, slots=True)
class Frame:
    """One camera image with its origin."""

    image: Any  # uint8 [height, width, channels], the reader's own copy, or what its target has
    stamp_ns: int  # of the image's header, ROS time
    received_ns: int  # when the writer's process got the image, ROS time
    sequence: int  # 1, 2, 3, ...; a restarted writer begins again


class _Segment:
    """A mapped segment; ``base`` is its address, valid until ``close``."""

    def __init__(self, fd: int, num_bytes: int, protection: int):
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page fault in a tick
        self._map = mmap.mmap(fd, num_bytes, flags=flags, prot=protection)
        self._view = np.frombuffer(self._map, np.uint8)
        self.base = self._view.ctypes.data
        self.num_bytes = num_bytes
        self.inode = os.fstat(fd).st_ino
        self.capacity_bytes = 0
        self.stride = 0

    def set_capacity(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.stride = atomics.slot_bytes(capacity_bytes)

    def newest(self) -> int:
        return atomics.load_header(self.base, atomics.NEWEST_OFFSET)

    def is_current(self, path: str) -> bool:
        """Return whether ``path`` still leads to this segment."""
        return _inode(path) == self.inode

    def close(self) -> None:
        self._view = None  # the mapping cannot be closed under a view
        self._map.close()


class FrameWriter:
    """
    The one writer of a name; used from one thread at a time.

    Parameters
    ----------
    name : str
        Letters, digits, ``_``, ``.`` and ``-``.
    capacity_bytes : int
        Largest expected frame; a larger one costs a new segment, not an error.

    Raises
    ------
    TransportError
        The name is malformed, belongs to a living writer, to another user or to something else,
        or the memory is not there.

    """

    def __init__(self, name: str, capacity_bytes: int):
        self._path = _path_of(name)
        self._sequence = 0
        self._closed = False
        self._fd = self._segment = None
        self._open(capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Return the size of the largest frame that fits without a new segment."""
        return self._segment.capacity_bytes if self._segment else 0

    def write(self, image: np.ndarray, stamp_ns: int, received_ns: int = 0) -> int:
        """
        Publish a copy of ``image`` and return its sequence number; wait-free within the capacity.

        Parameters
        ----------
        image : uint8 [height, width, channels]
            Copied once more if it is not C-contiguous.
        stamp_ns, received_ns : int
            Times that travel with the frame.

        Raises
        ------
        ShapeError
            The image is empty, not uint8 or not three-dimensional; nothing is published.
        TransportError
            The frame needs a larger segment and there is none to be had; later writes still work.

        """
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
            kind = getattr(image, 'dtype', type(image))
            raise ShapeError('image', 'must be a uint8 array', str(kind))
        if image.ndim != 3 or image.size == 0:
            raise ShapeError('image', 'must be non-empty [height, width, channels]', image.shape)
        if image.size > self.capacity_bytes:
            self._open(image.size)
        segment = self._segment
        sequence = self._sequence + 1
        atomics.publish_frame(
            segment.base,
            segment.stride,
            np.ascontiguousarray(image),
            sequence,
            stamp_ns,
            received_ns,
        )
        self._sequence = sequence
        return sequence

    def close(self) -> None:
        """Remove the segment; readers keep what they have mapped until their next read."""
        self._closed = True
        self._release()

    def __enter__(self) -> 'FrameWriter':
        """Return self."""
        return self

    def __exit__(self, *_exception) -> None:
        """Close."""
        self.close()

    def _open(self, capacity_bytes: int) -> None:
        if self._closed:
            raise RuntimeError('write after close')
        if not 0 < capacity_bytes <= atomics.MAX_CAPACITY_BYTES:
            rule = f'must be in 1..{atomics.MAX_CAPACITY_BYTES}'
            raise TransportError('capacity_bytes', rule, capacity_bytes)
        self._release()
        try:
            self._fd = _claim(self._path)
            num_bytes = atomics.segment_bytes(capacity_bytes)
            try:
                # Reserves every page now; a sparse segment would be a SIGBUS in some later write.
                os.posix_fallocate(self._fd, 0, num_bytes)
            except OSError as error:
                rule = f'must fit into free shared memory ({error.strerror})'
                raise TransportError('capacity_bytes', rule, capacity_bytes) from error
            segment = _Segment(self._fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            self._release()
            raise
        segment.set_capacity(capacity_bytes)
        atomics.store_header(segment.base, atomics.CAPACITY_OFFSET, capacity_bytes)
        atomics.store_header(segment.base, atomics.OWNER_OFFSET, os.getpid())
        atomics.store_header(segment.base, atomics.MAGIC_OFFSET, atomics.MAGIC)
        self._segment = segment

    def _release(self) -> None:
        segment, fd = self._segment, self._fd
        self._segment = self._fd = None
        if fd is not None:
            if _inode(self._path) == os.fstat(fd).st_ino:
                os.unlink(self._path)
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)
        if segment is not None:
            segment.close()


class FrameReader:
    """
    A reader of a name; attaches when there is something, whoever started first.

    Used from one thread at a time. ``read`` makes system calls only when nothing new is there.
    After a writer's death its last frame stays readable (its stamp tells its age); after a
    writer's ``close`` there is nothing.

    With a target, frames go to it, by themselves where it can reach them, see ``frame_target.py``;
    the image of a frame is then what the target made of it, until the next ``read``.

    Parameters
    ----------
    name : str
        As of the writer.
    target : FrameTarget, optional
        Where frames are wanted.

    """

    def __init__(self, name: str, target: FrameTarget | None = None):
        self._path = _path_of(name)
        self._target = target
        self._segment = None
        self._last_sequence = 0
        self._shape = (1, 1, 1)
        self._meta = np.zeros(atomics.META_WORDS, np.int64)

    def read(self, out: np.ndarray | None = None) -> Frame | None:
        """
        Return the newest frame, whole, or None if there is none to be had at once.

        Parameters
        ----------
        out : uint8, C-contiguous, writeable, three-dimensional, optional
            Used, and undefined after None, if it has the frame's number of bytes; otherwise the
            image is a new array.

        Raises
        ------
        TransportError
            The name belongs to another user or to something that is no frame buffer.

        """
        if out is not None and not (out.dtype == np.uint8 and out.ndim == 3 and out.flags.carray):
            raise ShapeError('out', 'must be uint8 [h, w, c], C-contiguous, writeable', out.shape)
        if not self._follow():
            return None
        segment = self._segment
        if self._target is not None and out is None:
            sequence, image = fetch_newest(
                self._target, segment.base, segment.stride, self._meta, MAX_TRIES)
            if sequence <= 0:
                return None
            if image is not None:
                return self._frame(image, sequence)
        image = self._room(self._shape) if out is None else out
        for _ in range(MAX_TRIES):
            sequence = atomics.copy_newest(segment.base, segment.stride, image, self._meta)
            if sequence > 0:
                break
            if sequence == atomics.EMPTY:
                return None
            if sequence == atomics.OTHER_SIZE:
                image = self._room(tuple(self._meta[2:].tolist()))
        else:
            return None
        return self._frame(image, sequence)

    def newest_sequence(self) -> int:
        """Return the sequence number of the frame that ``read`` would return, or 0."""
        return self._segment.newest() if self._follow() else 0

    def close(self) -> None:
        """Leave the segment; a later read attaches again."""
        segment, self._segment = self._segment, None
        if segment is not None:
            if self._target is not None:
                self._target.detach(segment.base)
            segment.close()

    def __enter__(self) -> 'FrameReader':
        """Return self."""
        return self

    def __exit__(self, *_exception) -> None:
        """Close."""
        self.close()

    def _room(self, shape: tuple[int, ...]) -> np.ndarray:
        image = None if self._target is None else self._target.room(shape)
        return np.empty(shape, np.uint8) if image is None else image

    def _frame(self, image: Any, sequence: int) -> Frame:
        stamp_ns, received_ns, *shape = self._meta.tolist()
        self._shape = tuple(shape)
        self._last_sequence = sequence
        if isinstance(image, np.ndarray):
            image = image.reshape(self._shape)
        return Frame(image, stamp_ns, received_ns, sequence)

    def _follow(self) -> bool:
        """Attach to the segment that the name leads to now; return whether there is one."""
        segment = self._segment
        if segment is not None:
            if segment.newest() != self._last_sequence or segment.is_current(self._path):
                return True
            self.close()
        self._last_sequence = 0
        self._segment = segment = _attach(self._path)
        if segment is not None and self._target is not None:
            self._target.attach(segment.base, segment.num_bytes)
        return segment is not None


def _path_of(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = 'must be 1..128 letters, digits, "_", "." or "-", beginning with a letter or digit'
        raise TransportError('frame_buffer', rule, name)
    return os.path.join(DIRECTORY, name)


def _inode(path: str) -> int | None:
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None


def _open_file(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as error:
        rule = f'must be shared memory of this user ({error.strerror})'
        raise TransportError('frame_buffer', rule, os.path.basename(path)) from error


def _foreign(path: str) -> TransportError:
    rule = 'must not be that of shared memory other than a frame buffer of this version'
    return TransportError('frame_buffer', rule, os.path.basename(path))


def _header_word(fd: int, offset: int) -> int:
    return int.from_bytes(os.pread(fd, 8, offset), 'little', signed=True)


def _claim(path: str) -> int:
    """Return the descriptor of a new, empty, locked file at ``path``, replacing a dead one."""
    for _ in range(MAX_TRIES):
        try:
            fd = _open_file(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError as error:
            rule = f'needs {DIRECTORY}'
            raise TransportError('frame_buffer', rule, os.path.basename(path)) from error
        try:
            if _header_word(fd, atomics.MAGIC_OFFSET) not in (0, atomics.MAGIC):
                raise _foreign(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = _header_word(fd, atomics.OWNER_OFFSET)
                rule = f'must not be in use by another writer (process {owner})'
                raise TransportError('frame_buffer', rule, os.path.basename(path)) from error
            if _inode(path) == os.fstat(fd).st_ino:  # else someone else replaced it first
                if os.fstat(fd).st_size == 0:
                    return fd
                os.unlink(path)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    rule = 'must not be fought over by several writers'
    raise TransportError('frame_buffer', rule, os.path.basename(path))


def _attach(path: str) -> _Segment | None:
    """Map the segment at ``path``, or return None while there is none that is complete."""
    try:
        fd = _open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        num_bytes = os.fstat(fd).st_size
        if num_bytes < atomics.HEADER_BYTES:
            return None
        segment = _Segment(fd, num_bytes, mmap.PROT_READ)
    finally:
        os.close(fd)
    magic = atomics.load_header(segment.base, atomics.MAGIC_OFFSET)
    capacity_bytes = atomics.load_header(segment.base, atomics.CAPACITY_OFFSET)
    if magic == atomics.MAGIC and atomics.segment_bytes(capacity_bytes) == num_bytes:
        segment.set_capacity(capacity_bytes)
        return segment
    segment.close()
    if magic in (0, atomics.MAGIC):  # looked at while it was being built
        return None
    raise _foreign(path)
