"""
The kernels of the vision encoder: three for a picture, resize, encode and pool.

Resizing is spread over all processors. Then a block takes one patch through the whole encoder,
which needs no other patch: its rows stay in shared memory, and the weights, less than a megabyte
for the embedded policy, come from the second-level cache, into which they are brought while the
picture is still resized. Pooling meets all patches. Everything is float32, added in a fixed order.
"""

from numba import cuda
from numba.core import types
import numpy as np

from vla_edge_ros.kernels.cuda import ptx
from vla_edge_ros.kernels.cuda.constants import THREADS
from vla_edge_ros.kernels.cuda.device import F32, FLOATS, I32, INTS, ZERO
from vla_edge_ros.kernels.cuda.resize import (
    AREA,
    COUNT,
    ENTRY_WORDS,
    FACTOR,
    FIRST,
    HALF_UP,
    HEADER_WORDS,
    MODE,
    ROW_BYTES,
    SUM,
    WEIGHT_FIRST,
    WEIGHT_LAST,
    WEIGHT_MIDDLE,
)
from vla_edge_ros.kernels.cuda.vision_layout import POOL_COLUMNS, VISION_THREADS

LOADS = 16
"""Weights a thread has under way: 32 KiB in a block, which keeps the way from the cache busy."""
_SCRATCH = VISION_THREADS // 32
_BYTES = types.CPointer(types.uint8)


def define_vision(capability: tuple[int, int], head_dim: int, device) -> list[tuple]:
    """Return (name, function, argument types) of every kernel."""
    del capability, head_dim  # the device functions know the one, the other is the decoder's
    times, nearest, fraction = ptx.times, ptx.nearest, ptx.fraction
    quotient, remainder, inverse_root = ptx.quotient, ptx.remainder, ptx.inverse_root
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    dot = ptx.make_dot(LOADS)
    signal, wait, bring = device.signal, device.wait, device.bring
    block_sum, swiglu = device.block_sum, device.swiglu
    f32, i32, i64 = np.float32, np.int32, np.int64

    @cuda.jit(device=True)
    def at(item, count, first, middle, last):
        """Return the weight of pixel ``item`` of ``count``."""
        if item == 0:
            return first
        return last if item == count - 1 else middle

    @cuda.jit(device=True)
    def resized(frame, table, shares, down, across, channel):
        """Return one byte of the result as float32, see ``resize.py``."""
        row_bytes = table[ROW_BYTES]
        rows, columns = table[down + COUNT], table[across + COUNT]
        corner = i64(table[down + FIRST]) * row_bytes + 3 * table[across + FIRST] + channel
        if table[MODE] == SUM:
            count = i32(0)
            for row in range(rows):
                for column in range(columns):
                    count = i32(count + frame[corner + row * row_bytes + 3 * column])
            if table[HALF_UP]:
                return f32((count + 2) >> 2)
            return f32(nearest(times(f32(count), shares[FACTOR])))
        if table[MODE] == AREA:
            total = ZERO
            left, inside, right = (shares[across + WEIGHT_FIRST], shares[across + WEIGHT_MIDDLE],
                                   shares[across + WEIGHT_LAST])
            upper, between, lower = (shares[down + WEIGHT_FIRST], shares[down + WEIGHT_MIDDLE],
                                     shares[down + WEIGHT_LAST])
            for row in range(rows):
                line = ZERO
                for column in range(columns):
                    value = f32(frame[corner + row * row_bytes + 3 * column])
                    line += times(value, at(column, columns, left, inside, right))
                total += times(line, at(row, rows, upper, between, lower))
            return f32(nearest(total))
        level = i32(2)
        next_column, next_row = 3 * (columns - 1), (rows - 1) * row_bytes
        for row in range(2):
            start = corner + row * next_row
            line = i32(frame[start] * table[across + WEIGHT_FIRST]
                       + frame[start + next_column] * table[across + WEIGHT_LAST])
            share = table[down + WEIGHT_LAST] if row else table[down + WEIGHT_FIRST]
            level = i32(level + ((share * (line >> 4)) >> 16))
        return f32(level >> 2)

    def vision_resize(frame, table, shares, levels, height, columns, patch, count, patches):
        """
        Resize a picture, standardise it and cut it into patches.

        One thread computes one number. ``table`` and ``shares`` are the same memory as integers
        and as numbers; ``levels`` [2, 3] is the scale and the shift of each channel.
        """
        wait()
        signal()
        item = i32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if item < count:
            pixels = i32(patch * patch)
            index = quotient(item, i32(3 * pixels))
            pixel, channel = quotient(item, i32(3)), remainder(item, i32(3))
            pixel = i32(pixel - index * pixels)
            y = quotient(index, columns) * patch + quotient(pixel, patch)
            x = remainder(index, columns) * patch + remainder(pixel, patch)
            value = resized(
                frame, table, shares, i32(HEADER_WORDS + ENTRY_WORDS * y),
                i32(HEADER_WORDS + ENTRY_WORDS * (height + x)), channel)
            patches[item] = times(value, levels[channel]) - levels[3 + channel]

    @cuda.jit(device=True)
    def multiply(floats, x, depth, weights, columns, first, count, parts):
        """
        Multiply a row in shared memory with ``count`` columns from ``first`` on.

        ``weights`` is [depth, columns]; ``x`` and ``parts`` are places in ``floats``. Where there
        are fewer columns than threads, several share the depth of one: ``added`` completes it.
        """
        slices = max(quotient(i32(VISION_THREADS), count), 1)
        for item in range(cuda.threadIdx.x, count * slices, VISION_THREADS):
            part, column = quotient(i32(item), count), remainder(i32(item), count)
            low = quotient(i32(depth * part), slices)
            high = quotient(i32(depth * (part + 1)), slices)
            floats[parts + item] = dot(
                shared_address(floats, i32(x + low)),
                generic_address(weights, i64(low) * columns + first + column),
                i64(columns) * 4, i32(high - low))
        cuda.syncthreads()
        return slices

    @cuda.jit(device=True)
    def added(floats, parts, count, slices, column):
        """Return one product, whose slices are added in order."""
        total = ZERO
        for part in range(slices):
            total += floats[parts + part * count + column]
        return total

    @cuda.jit(device=True)
    def normalise(floats, first, size, gain, eps, scratch, other):
        """
        Give a row in shared memory mean 0 and variance 1, then scale and shift it.

        ``gain`` [2, size] is both. The first ``THREADS`` threads add up.
        """
        thread = cuda.threadIdx.x
        value = ZERO
        if thread < THREADS:
            for i in range(thread, size, THREADS):
                value += floats[first + i]
        mean = fraction(block_sum(value, scratch), f32(size))
        squares = ZERO
        if thread < THREADS:
            for i in range(thread, size, THREADS):
                squares += (floats[first + i] - mean) * (floats[first + i] - mean)
        scale = inverse_root(fraction(block_sum(squares, other), f32(size)) + eps)
        for i in range(thread, size, VISION_THREADS):
            floats[first + i] = (floats[first + i] - mean) * scale * gain[i] + gain[size + i]
        cuda.syncthreads()

    @cuda.jit(device=True)
    def bring_share(weights, count):
        """Ask for this block's share of a matrix."""
        block, blocks = i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
        share = quotient(i32(count + blocks - 1), blocks)
        low = i32(min(block * share, count))
        bring(generic_address(weights, low), i32(min(share, count - low) * 4))

    def vision_encode(patches, embed, positions, norm1, gate_up, down, norm2, projector, bias,
                      depth, width, inner, hidden, eps, features, tokens):  # fmt: skip
        """
        Encode one patch a block, and project it to a token.

        Matrices are [depth, columns]; ``gate_up`` [width, 2 * inner] has the gates first. The bias
        of the embedding is part of ``positions`` [patches, width]. ``norm1`` and ``norm2`` are
        [2, width].
        """
        floats = cuda.shared.array(0, F32)
        scratch = cuda.shared.array(_SCRATCH, F32)
        other = cuda.shared.array(_SCRATCH, F32)
        thread, patch = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        row = max(depth, inner)
        parts = row + width
        bring_share(embed, i32(depth * width))
        bring_share(gate_up, i32(width * 2 * inner))
        bring_share(down, i32(inner * width))
        bring_share(projector, i32(width * hidden))
        wait()
        signal()
        for i in range(thread, depth, VISION_THREADS):
            floats[i] = patches[patch * depth + i]
        cuda.syncthreads()
        slices = multiply(floats, i32(0), depth, embed, width, i32(0), width, parts)
        for i in range(thread, width, VISION_THREADS):
            floats[row + i] = added(floats, parts, width, slices, i) + positions[patch * width + i]
        cuda.syncthreads()
        normalise(floats, row, width, norm1, eps, scratch, other)
        both = i32(2 * inner)
        slices = multiply(floats, row, width, gate_up, both, i32(0), both, parts)
        for i in range(thread, inner, VISION_THREADS):
            floats[i] = swiglu(added(floats, parts, both, slices, i),
                               added(floats, parts, both, slices, inner + i))
        cuda.syncthreads()
        slices = multiply(floats, i32(0), inner, down, width, i32(0), width, parts)
        for i in range(thread, width, VISION_THREADS):
            floats[row + i] += added(floats, parts, width, slices, i)
        cuda.syncthreads()
        normalise(floats, row, width, norm2, eps, scratch, other)
        for i in range(thread, width, VISION_THREADS):
            features[patch * width + i] = floats[row + i]
        slices = multiply(floats, row, width, projector, hidden, i32(0), hidden, parts)
        for i in range(thread, hidden, VISION_THREADS):
            tokens[patch * hidden + i] = added(floats, parts, hidden, slices, i) + bias[i]

    def vision_pool(features, projector, bias, patches, width, hidden, embedding, token):
        """Write the mean of all patches, and project it; each block some columns of the token."""
        floats = cuda.shared.array(0, F32)
        thread = i32(cuda.threadIdx.x)
        first = i32(cuda.blockIdx.x * POOL_COLUMNS)
        bring_share(projector, i32(width * hidden))
        wait()
        signal()
        for i in range(thread, width, VISION_THREADS):
            total = ZERO
            for patch in range(patches):
                total += features[patch * width + i]
            floats[i] = fraction(total, f32(patches))
            if cuda.blockIdx.x == 0:
                embedding[i] = floats[i]
        cuda.syncthreads()
        count = i32(min(POOL_COLUMNS, hidden - first))
        slices = multiply(floats, i32(0), width, projector, hidden, first, count, width)
        for i in range(thread, count, VISION_THREADS):
            token[first + i] = added(floats, width, count, slices, i) + bias[first + i]

    by, fl, it, n, f = _BYTES, FLOATS, INTS, I32, types.float32
    return [
        ('vision_resize', vision_resize, (by, it, fl, fl, n, n, n, n, fl)),
        ('vision_encode', vision_encode, (*(fl,) * 9, n, n, n, n, f, fl, fl)),
        ('vision_pool', vision_pool, (fl, fl, fl, n, n, n, fl, fl)),
    ]
