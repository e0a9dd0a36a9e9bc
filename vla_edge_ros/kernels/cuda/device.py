"""What the kernels share: shares of a product, mixing, the best row, small helpers."""

from types import SimpleNamespace

from numba import cuda
from numba.core import types
import numpy as np

from vla_edge_ros.kernels.cuda import ptx
from vla_edge_ros.kernels.cuda.constants import (
    MAX_CHUNKS,
    MAX_SPLITS,
    THREADS,
    TILE_BYTES,
    TOKEN_TILES,
    WARPS,
)

HIDDEN = np.float32(-1e30)
"""A score no key has; finite, so that differences stay numbers."""
LOG2_E = np.float32(1.4426950408889634)
ZERO, ONE = np.float32(0), np.float32(1)
NEVER = np.int32(0x7FFFFFFF)
"""The row of no logit."""
I32, I64, F32, U16 = types.int32, types.int64, types.float32, types.uint16
FLOATS, HALVES, INTS = (types.CPointer(kind) for kind in (F32, U16, I32))


def define_device(capability: tuple[int, int], head_dim: int) -> SimpleNamespace:
    """Return the device functions, compiled with whatever kernel calls them."""
    half_dim = head_dim // 2
    tiles_per_head = head_dim // 16
    to_half, exp2, load_float = ptx.to_half, ptx.exp2, ptx.load_float
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    prefetch, quotient, remainder, ratio, again = (
        ptx.prefetch, ptx.quotient, ptx.remainder, ptx.ratio, ptx.again)
    copy, arrived = ptx.make_copy(capability)
    mix, add = ptx.make_mix(MAX_SPLITS), ptx.make_sum(MAX_CHUNKS)
    meet, who = ptx.meet, ptx.who
    device = cuda.jit(device=True)
    i32, i64 = np.int32, np.int64

    @device
    def block_sum(value, scratch):
        """Return the sum over all threads of a block; ``scratch`` is float32 [WARPS]."""
        for distance in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, distance)
        thread = cuda.threadIdx.x
        if thread & 31 == 0:
            scratch[thread >> 5] = value
        cuda.syncthreads()
        total = ZERO
        for warp in range(WARPS):
            total += scratch[warp]
        return total

    @device
    def fragment_index(token, k):
        """Return where element ``k`` of a token lies in the fragment order of a prefill."""
        return ((((k >> 5) * TOKEN_TILES + (token >> 3)) * 32 + (token & 7) * 4
                 + ((k >> 3) & 3)) * 8 + (k & 7))  # fmt: skip

    @device
    def embedding_index(row, k, steps):
        """Return where element ``k`` of a row lies in a packed matrix."""
        fragment = ((row >> 4) * steps + (k >> 5)) * 2 + ((row >> 3) & 1)
        return fragment * 256 + (row & 7) * 32 + (k & 31)

    @device
    def share(tiles, steps, chunks):
        """Return this block's first and last tile, and the first and last step of its chunk."""
        block, blocks = i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
        if chunks == 1:
            return (quotient(i32(tiles * block), blocks),
                    quotient(i32(tiles * (block + 1)), blocks), i32(0), i32(steps))  # fmt: skip
        chunk, index = remainder(block, chunks), quotient(block, chunks)
        size = i32(quotient(i32(blocks - chunk + chunks - 1), chunks))
        return (
            quotient(i32(tiles * index), size), quotient(i32(tiles * (index + 1)), size),
            quotient(i32(steps * chunk), chunks), quotient(i32(steps * (chunk + 1)), chunks))

    @device
    def bring(address, num_bytes):
        """Ask for memory that is read later, by all threads of a block."""
        prefetch(
            i32(cuda.threadIdx.x * 128), i32(cuda.blockDim.x * 128), i32(num_bytes), i64(address))

    @device
    def bring_weights(weights, tiles, steps, chunks):
        """Ask for the first of this block's tiles while the kernel ahead still runs."""
        first, stop, low, high = share(tiles, steps, chunks)
        for tile in range(first, min(stop, first + 2)):
            bring(weights + (i64(tile) * steps + low) * TILE_BYTES, (high - low) * TILE_BYTES)

    @device
    def copy_row(address, num_bytes, shared, first):
        """Begin to copy bytes to a shared array, from element ``first`` on."""
        copy(i32(cuda.threadIdx.x * 16), i32(THREADS * 16), i32(num_bytes), address,
             shared_address(shared, i32(first)))  # fmt: skip

    @device
    def add_sums(sums, stride, count, floats, first, size):
        """Add what the chunks of a product left, in order, to a row in shared memory."""
        i = i32(4 * cuda.threadIdx.x)
        while i < size:
            add(sums + 4 * i, 4 * stride, i32(count),
                shared_address(floats, i32(first + i)))  # fmt: skip
            i = again(i32(i + 4 * THREADS))
        cuda.syncthreads()

    @device
    def query_row(head, token, heads, kv_heads, query_rows):
        """Return the row, over all KV heads, of a token's query of one head."""
        group = quotient(heads, kv_heads)
        kv = quotient(i32(head), group)
        return kv * query_rows + token * group + head - kv * group

    @device
    def rotary(tile, row):
        """Return which pair of a head row ``row`` of a tile holds."""
        return (tile % tiles_per_head) * 8 + row

    @device
    def store_qkv(tile, row, token, low, high, rank, c, s, slot, keys, values, rotated, pairs,
                  queries, heads, kv_heads, ranks, query_rows):  # fmt: skip
        """Rotate and store one pair of a query, a key or a value."""
        head = tile // tiles_per_head
        d = rotary(tile, row)
        turned_low = low * c - high * s
        turned_high = high * c + low * s
        if head < heads:
            place = query_row(head, token, heads, kv_heads, query_rows) * head_dim + d
            scale = LOG2_E * query_scale
            queries[place] = to_half(turned_low * scale)
            queries[place + half_dim] = to_half(turned_high * scale)
            return
        if head < heads + kv_heads:
            kv = head - heads
            place = (slot * kv_heads + kv) * head_dim + d
            keys[place] = low
            keys[place + half_dim] = high
            place = (kv * ranks + rank) * head_dim + d
            rotated[place] = to_half(turned_low)
            rotated[place + half_dim] = to_half(turned_high)
            return
        kv = head - heads - kv_heads
        place = (slot * kv_heads + kv) * head_dim + d
        values[place] = to_half(low)
        values[place + half_dim] = to_half(high)
        place = (kv * ranks + (rank & ~1)) * head_dim + 2 * d + (rank & 1)
        pairs[place] = to_half(low)
        pairs[place + head_dim] = to_half(high)

    query_scale = np.float32(head_dim**-0.5)

    @device
    def split_size(keys, warps):
        """Return how many keys one split takes."""
        return max((keys + MAX_SPLITS * 16 - 1) // (MAX_SPLITS * 16) * 16, 16 * warps)

    @device
    def mixing_shares(token, splits, extremes, first, last, heads, kv_heads, query_rows, shares):
        """Write the share of each split of some heads to shared memory; a warp for a head."""
        for item in range(cuda.threadIdx.x, (last - first) * MAX_SPLITS, THREADS):
            head, split = first + item // MAX_SPLITS, item % MAX_SPLITS
            top, total = HIDDEN, ZERO
            if split < splits:
                row = query_row(head, token, heads, kv_heads, query_rows)
                place = (split * kv_heads * query_rows + row) * 2
                top = load_float(generic_address(extremes, place))
                total = load_float(generic_address(extremes, place + 1))
            most = top
            for distance in (16, 8, 4, 2, 1):
                most = max(most, cuda.shfl_xor_sync(0xFFFFFFFF, most, distance))
            part = total * exp2(top - most)
            total = part
            for distance in (16, 8, 4, 2, 1):
                total += cuda.shfl_xor_sync(0xFFFFFFFF, total, distance)
            shares[item] = ratio(part, total)
        cuda.syncthreads()

    @device
    def mix_four(k, token, splits, partials, first, heads, kv_heads, query_rows, shares, out):
        """Mix elements ``k`` to ``k + 3`` of a token's attention to the address ``out``."""
        head = k // head_dim
        row = query_row(head, token, heads, kv_heads, query_rows)
        mix(
            generic_address(partials, row * head_dim + k % head_dim),
            2 * head_dim * kv_heads * query_rows,
            shared_address(shares, i32((head - first) * MAX_SPLITS)),
            i32(splits),
            out,
        )

    @device
    def swiglu(gate, up):
        """Return ``silu(gate) * up``."""
        return ratio(gate, ONE + exp2(-gate * LOG2_E)) * up

    @device
    def better(value, row, other_value, other_row):
        return other_value > value or (other_value == value and other_row < row)

    @device
    def best_of_warp(value, row):
        for distance in (16, 8, 4, 2, 1):
            other_value = cuda.shfl_xor_sync(0xFFFFFFFF, value, distance)
            other_row = cuda.shfl_xor_sync(0xFFFFFFFF, row, distance)
            if better(value, row, other_value, other_row):
                value, row = other_value, other_row
        return value, row

    @device
    def best_of_block(floats, first, ints, start, value, row):
        """Return the largest value, and the lowest row of equals, of all threads."""
        value, row = best_of_warp(value, row)
        thread = who()
        if thread & 31 == 0:
            floats[first + (thread >> 5)] = value
            ints[start + (thread >> 5)] = row
        meet()
        for warp in range(WARPS):
            other_value, other_row = floats[first + warp], ints[start + warp]
            if better(value, row, other_value, other_row):
                value, row = other_value, other_row
        return value, row

    names = (
        block_sum, fragment_index, embedding_index, share, bring, bring_weights, copy_row,
        add_sums, rotary, store_qkv, split_size, mixing_shares, mix_four, swiglu, better,
        best_of_warp, best_of_block,
    )  # fmt: skip
    functions = {function.__name__: function for function in names}
    signal, wait = ptx.make_launch_control(capability)
    return SimpleNamespace(**functions, arrived=arrived, signal=signal, wait=wait)
