"""
Publication of frames through shared memory without locks, and why it is correct.

Layout, in 8-byte words: a header page (magic, capacity, owner; ``newest`` and ``cursor`` on
cache lines of their own), then two slots of metadata and payload. Frame ``k`` (1, 2, 3, ...)
lives in slot ``k & 1`` and is moved in chunks of ``CHUNK_BYTES``.

Protocol
--------
Two words that only grow order everything::

    writer of frame k                      reader
    for every chunk c:                     k = newest               (acquire)
        cursor = (k, c)   (relaxed)        for every chunk c:
        fence             (release)            load its words       (relaxed)
        store its words   (relaxed)            fence                (acquire)
    newest = k            (release)            torn if cursor >= (k + 2, c)   (relaxed)

The writer never waits: its steps depend on the frame's size alone. A reader that is overtaken
notices within one chunk and may start again on the frame that was completed meanwhile, for which
it then has a whole write's time. Comparing chunk by chunk, instead of the whole slot, lets a
reader that runs ahead of the writer through the same slot still finish a whole frame.

Memory order
------------
Every access to shared words is atomic, so there is no data race in the C11 and LLVM model, on
any processor:

1. *Nothing older than k is read.* The acquire load of ``newest`` reads the release store made
   after frame k was stored, hence frame k's stores happen before the reader's loads, and by
   coherence a load returns frame k's word or a later one.
2. *Nothing newer than k is accepted.* Later words of this slot belong to frame k + 2 or beyond.
   If a load of chunk c returns one, then the writer's release fence before that store
   synchronises with the reader's acquire fence after the load (C11 7.17.4, fence to fence), so
   the store ``cursor = (k + 2, c)`` happens before the reader's load of ``cursor``, which by
   coherence returns at least that. The reader reports the frame as torn.

A device that copies the frame by itself (:func:`find_newest`, its copy, :func:`is_whole`) reads no
atomics, but the argument is the same with the whole slot for a chunk. Its reads begin after the
load of ``newest``, for the copy is asked for behind it, and have ended before the load of
``cursor``, for the completion is waited for. They take part in cache coherence, as those of PCIe
and of NVLink do, so what they see of frame k + 2 was visible to all, and with it, by the writer's
release fence, ``cursor = (k + 2, 0)``, before that load.

The slot of ``newest`` is never the one being written, so a writer killed at any instruction leaves
a whole frame to read. Readers write nothing shared, so their death concerns nobody.

The functions compile when this module is imported (cached on disk), never at a call. Intrinsics
and their users share this file because Numba's cache looks at one file's age only.
"""

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

MAGIC = 0x314655425F414C56  # 'VLA_BUF1'
HEADER_BYTES = 4096
MAGIC_OFFSET = 0
CAPACITY_OFFSET = 8
OWNER_OFFSET = 16
NEWEST_OFFSET = 64
CURSOR_OFFSET = 128

META_WORDS = 5  # stamp_ns, received_ns, height, width, channels
META_BYTES = 64
CHUNK_BYTES = 4096  # Small, to notice an overtaking writer early; 16 and 32 KiB are no faster.
CHUNK_BITS = 20  # of the cursor; the other 43 bits count frames: 4,600 years at 60 Hz.
MAX_CAPACITY_BYTES = CHUNK_BYTES << CHUNK_BITS

EMPTY = 0
OTHER_SIZE = -1
TORN = -2

_WORD = ir.IntType(64)
_BYTE = ir.IntType(8)


def slot_bytes(capacity_bytes):
    """Return the distance of the two slots for payloads of up to ``capacity_bytes``."""
    return META_BYTES + (capacity_bytes + 63) // 64 * 64


def segment_bytes(capacity_bytes):
    """Return the size of the whole segment."""
    return HEADER_BYTES + 2 * slot_bytes(capacity_bytes)


def _pointer(builder, address, kind=_WORD):
    return builder.inttoptr(address, kind.as_pointer())


def _load(ordering):
    @intrinsic
    def load(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.load_atomic(_pointer(builder, arguments[0]), ordering, 8)

        return types.int64(types.int64), generate

    return load


def _store(ordering):
    @intrinsic
    def store(typing_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), ordering, 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return store


def _fence(ordering):
    @intrinsic
    def fence(typing_context):
        def generate(context, builder, signature, arguments):
            builder.fence(ordering)
            return context.get_dummy_value()

        return types.void(), generate

    return fence


def _load_private(kind, numba_type):
    @intrinsic
    def load(typing_context, address):
        def generate(context, builder, signature, arguments):
            return builder.load(_pointer(builder, arguments[0], kind), align=1)

        return numba_type(types.int64), generate

    return load


def _store_private(kind, numba_type):
    @intrinsic
    def store(typing_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store(arguments[1], _pointer(builder, arguments[0], kind), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), generate

    return store


load_relaxed = _load('monotonic')
load_acquire = _load('acquire')
store_relaxed = _store('monotonic')
store_release = _store('release')
fence_acquire = _fence('acquire')
fence_release = _fence('release')
# The caller's own image: not shared while it is copied, of any alignment.
_load_word = _load_private(_WORD, types.int64)
_load_byte = _load_private(_BYTE, types.uint8)
_store_word = _store_private(_WORD, types.int64)
_store_byte = _store_private(_BYTE, types.uint8)

_IMAGE = types.Array(types.uint8, 3, 'C')
_READONLY_IMAGE = types.Array(types.uint8, 3, 'C', readonly=True)


@njit('int64(int64, int64)', cache=True, nogil=True)
def load_header(base, offset):
    """Load one header word with acquire order."""
    return load_acquire(base + offset)


@njit('void(int64, int64, int64)', cache=True, nogil=True)
def store_header(base, offset, value):
    """Store one header word with release order."""
    store_release(base + offset, value)


@njit(
    [
        types.void(types.int64, types.int64, image, types.int64, types.int64, types.int64)
        for image in (_IMAGE, _READONLY_IMAGE)
    ],
    cache=True,
    nogil=True,
)
def publish_frame(base, stride, image, sequence, stamp_ns, received_ns):
    """
    Store frame ``sequence`` and publish it; wait-free.

    Parameters
    ----------
    base : int
        Address of the segment.
    stride : int
        ``slot_bytes(capacity)``.
    image : uint8 [height, width, channels]
        Not larger than the capacity, which the caller has checked.
    sequence : int
        One more than that of the last frame.
    stamp_ns, received_ns : int
        Times that travel with the frame.

    """
    cursor = base + CURSOR_OFFSET
    slot = base + HEADER_BYTES + (sequence & 1) * stride
    store_relaxed(cursor, sequence << CHUNK_BITS)
    fence_release()
    store_relaxed(slot, stamp_ns)
    store_relaxed(slot + 8, received_ns)
    for axis in range(3):
        store_relaxed(slot + 16 + 8 * axis, image.shape[axis])
    payload = slot + META_BYTES
    source = image.ctypes.data
    num_bytes = image.size
    for start in range(0, num_bytes, CHUNK_BYTES):
        store_relaxed(cursor, (sequence << CHUNK_BITS) + start // CHUNK_BYTES)
        fence_release()
        end = min(start + CHUNK_BYTES, num_bytes)
        whole = end & ~7
        for offset in range(start, whole, 8):
            store_relaxed(payload + offset, _load_word(source + offset))
        if whole < end:
            word = types.int64(0)
            for offset in range(whole, end):
                word |= types.int64(_load_byte(source + offset)) << (8 * (offset - whole))
            store_relaxed(payload + whole, word)
    store_release(base + NEWEST_OFFSET, sequence)


@njit('int64(int64, int64, int64)', cache=True, nogil=True)
def payload_of(base, stride, sequence):
    """Return the address of the bytes of a frame."""
    return base + HEADER_BYTES + (sequence & 1) * stride + META_BYTES


@njit('boolean(int64, int64)', cache=True, nogil=True)
def is_whole(base, sequence):
    """Return whether all that was read of a frame until now was of that frame."""
    fence_acquire()
    return load_relaxed(base + CURSOR_OFFSET) < (sequence + 2) << CHUNK_BITS


@njit(types.int64(types.int64, types.int64, types.int64[::1]), cache=True, nogil=True)
def find_newest(base, stride, meta):
    """
    Read what is said of the newest frame; returns its sequence, EMPTY or TORN.

    Arguments as of :func:`copy_newest`; ``meta`` is undefined after TORN.
    """
    sequence = load_acquire(base + NEWEST_OFFSET)
    if sequence == 0:
        return EMPTY
    slot = base + HEADER_BYTES + (sequence & 1) * stride
    for word in range(META_WORDS):
        meta[word] = load_relaxed(slot + 8 * word)
    return sequence if is_whole(base, sequence) else TORN


@njit(
    types.int64(types.int64, types.int64, _IMAGE, types.int64[::1]),
    cache=True,
    nogil=True,
)
def copy_newest(base, stride, out, meta):
    """
    Try once to copy the newest frame; returns its sequence, EMPTY, OTHER_SIZE or TORN.

    Parameters
    ----------
    base, stride : int
        As of :func:`publish_frame`.
    out : uint8 [height, width, channels]
        Receives the payload; undefined after TORN, untouched after EMPTY and OTHER_SIZE.
    meta : int64 [META_WORDS]
        Receives stamp_ns, received_ns, height, width, channels, valid also after OTHER_SIZE.

    """
    sequence = find_newest(base, stride, meta)
    if sequence <= 0:
        return sequence
    cursor = base + CURSOR_OFFSET
    overwrite = (sequence + 2) << CHUNK_BITS
    num_bytes = meta[2] * meta[3] * meta[4]
    if num_bytes != out.size:
        return OTHER_SIZE
    payload = payload_of(base, stride, sequence)
    target = out.ctypes.data
    for start in range(0, num_bytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, num_bytes)
        whole = end & ~7
        for offset in range(start, whole, 8):
            _store_word(target + offset, load_relaxed(payload + offset))
        if whole < end:
            word = load_relaxed(payload + whole)
            for offset in range(whole, end):
                _store_byte(target + offset, types.uint8(word >> (8 * (offset - whole))))
        fence_acquire()
        if load_relaxed(cursor) >= overwrite + start // CHUNK_BYTES:
            return TORN
    return sequence
