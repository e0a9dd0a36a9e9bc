"""
The kernels of a prefill of up to ``TOKENS`` tokens.

A layer takes eight, or seven where ``prefill_stream`` does the MLP: from compute capability 9.0
on, where the network fits. If only keys and values are wanted, the last layer takes its first two.
As in decode, but normalising and mixing are kernels of their own, because every block of a
product needs all tokens.
"""

from numba import cuda
from numba.core import types
import numpy as np

from vla_edge_ros.kernels.cuda import ptx, tensor
from vla_edge_ros.kernels.cuda.constants import (
    CONTEXT,
    DEPENDENT_LAUNCH,
    FRAGMENT_BYTES,
    INNER_SCALE,
    MAX_SPLITS,
    MIXED_HEADS,
    NEW_TOKENS,
    SUM_PADDING,
    THREADS,
    TILE_BYTES,
    TOKEN_TILES,
    TOKENS,
    WARPS,
)
from vla_edge_ros.kernels.cuda.device import F32, FLOATS, HALVES, I32, I64, INTS, ZERO

DEPTH, WIDE_DEPTH = 4, 3
"""Steps of weights a warp has under way, and with the many rows of gate and up."""
FEW, FEWER = 6, 3
"""Steps that a warp loads at once, with one block on a processor and with two."""
_ROW = TOKENS + SUM_PADDING
_SUMS, _SHARES = WARPS * 16 * _ROW, MIXED_HEADS * MAX_SPLITS
_BOTH_SUMS = 2 * _SUMS
_INNER = np.float32(INNER_SCALE)


def define_prefill(capability: tuple[int, int], head_dim: int, device) -> list[tuple]:
    """Return (name, function, argument types) of every kernel."""
    to_half, inverse_root = ptx.to_half, ptx.inverse_root
    quotient, remainder, ratio, again = ptx.quotient, ptx.remainder, ptx.ratio, ptx.again
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    half_dim = head_dim // 2
    signal, wait, arrived = device.signal, device.wait, device.arrived
    share, bring_weights, rotary = device.share, device.bring_weights, device.rotary
    block_sum, copy_row, add_sums = device.block_sum, device.copy_row, device.add_sums
    store_qkv, split_size, swiglu = device.store_qkv, device.split_size, device.swiglu
    mixing_shares, mix_four = device.mixing_shares, device.mix_four
    fragment_index = device.fragment_index
    f32, i32, i64 = np.float32, np.int32, np.int64

    def make_multiply(products):

        @cuda.jit(device=True)
        def multiply(weights, tile, steps, first, stop, x, sums, half):
            """Leave the eight warps' shares of a tile in a half of ``sums`` [WARPS, 16, _ROW]."""
            thread = cuda.threadIdx.x
            warp, lane = thread >> 5, thread & 31
            low = first + (stop - first) * warp // WARPS
            high = first + (stop - first) * (warp + 1) // WARPS
            row = (half * WARPS + warp) * 16 + (lane >> 2)
            products(
                weights + (i64(tile) * steps + low) * TILE_BYTES + lane * 16,
                x + low * (TOKEN_TILES * FRAGMENT_BYTES) + lane * 16,
                i32(high - low),
                shared_address(sums, i32(row * _ROW + (lane & 3) * 2)),
            )
            cuda.syncthreads()

        return multiply

    multiply, multiply_wide = (
        make_multiply(tensor.make_products(TOKENS, depth, capability))
        for depth in (DEPTH, WIDE_DEPTH))
    multiply_few, multiply_fewer = (
        make_multiply(tensor.make_products_at_once(TOKENS, most, held, capability))
        for most, held in ((FEW, 3), (FEWER, 2)))
    at_once = capability >= DEPENDENT_LAUNCH

    @cuda.jit(device=True)
    def total(sums, half, row, token):
        value = ZERO
        for warp in range(WARPS):
            value += sums[((half * WARPS + warp) * 16 + row) * _ROW + token]
        return value

    def prefill_norm(residual, sums, num_sums, gain, eps, size, state, x, hidden, keep):
        """Add what the last product left, normalise, and lay out in fragment order."""
        floats = cuda.shared.array(0, F32)
        scratch = cuda.shared.array(WARPS, F32)
        token = cuda.blockIdx.x
        signal()
        copy_row(gain, 4 * size, floats, size)
        wait()
        if token >= state[NEW_TOKENS]:
            return
        copy_row(generic_address(residual, token * size), 4 * size, floats, 0)
        arrived()
        cuda.syncthreads()
        add_sums(generic_address(sums, token * size), TOKENS * size, num_sums, floats, 0, size)
        squares = ZERO
        for i in range(cuda.threadIdx.x, size, THREADS):
            squares += floats[i] * floats[i]
            residual[token * size + i] = floats[i]
        scale = inverse_root(ratio(block_sum(squares, scratch), f32(size)) + eps)
        for i in range(cuda.threadIdx.x, size, THREADS):
            value = floats[i] * scale * floats[size + i]
            x[fragment_index(token, i)] = to_half(value)
            if keep:
                hidden[token * size + i] = value

    def prefill_qkv(weights, tiles, steps, x, bias, cosine, sine, state, order, keys, values,
                    rotated, pairs, queries, heads, kv_heads, ranks, query_rows):  # fmt: skip
        sums = cuda.shared.array(_SUMS, F32)
        bring_weights(weights, tiles, steps, 1)
        first, stop, low, high = share(tiles, steps, 1)
        row, token = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        rank = state[CONTEXT] + token
        tokens = state[NEW_TOKENS]
        signal()
        for tile in range(first, stop):
            if at_once and steps <= FEW * WARPS:
                multiply_few(weights, tile, steps, low, high, x, sums, 0)
            else:
                wait()
                multiply(weights, tile, steps, low, high, x, sums, 0)
            if token < tokens:
                place = tile * 16 + row
                turn = rank * half_dim + rotary(tile, row)
                store_qkv(tile, row, token, total(sums, 0, row, token) + bias[place],
                          total(sums, 0, row + 8, token) + bias[place + 8], rank, cosine[turn],
                          sine[turn], order[rank], keys, values, rotated, pairs, queries, heads,
                          kv_heads, ranks, query_rows)  # fmt: skip
            cuda.syncthreads()

    def prefill_mix(partials, extremes, state, heads, kv_heads, query_rows, warps, x):
        """Put the splits of a few heads together, one token a block, in fragment order."""
        shares = cuda.shared.array(_SHARES, F32)
        token, head = cuda.blockIdx.x, i32(cuda.blockIdx.y * MIXED_HEADS)
        wait()
        signal()
        if token >= state[NEW_TOKENS]:
            return
        seen = state[CONTEXT] + state[NEW_TOKENS]
        part = split_size(seen, warps)
        splits = quotient(i32(seen + part - 1), i32(part))
        last = min(i32(head + MIXED_HEADS), heads)
        mixing_shares(token, splits, extremes, head, last, heads, kv_heads, query_rows, shares)
        k = i32(head * head_dim + 4 * cuda.threadIdx.x)
        while k < last * head_dim:
            out = generic_address(x, i64(fragment_index(token, k)))
            mix_four(k, token, splits, partials, head, heads, kv_heads, query_rows, shares, out)
            k = again(i32(k + 4 * THREADS))

    def prefill_mlp(weights, tiles, steps, x, inner):
        sums = cuda.shared.array(_SUMS, F32)
        bring_weights(weights, tiles, steps, 1)
        first, stop, low, high = share(tiles, steps, 1)
        wait()
        signal()
        for tile in range(first, stop):
            multiply_wide(weights, tile, steps, low, high, x, sums, 0)
            row, token = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
            value = swiglu(total(sums, 0, row, token), total(sums, 0, row + 8, token))
            inner[fragment_index(token, tile * 8 + row)] = to_half(value * _INNER)
            cuda.syncthreads()

    def prefill_partial(weights, tiles, steps, chunks, x, factor, partials):
        """
        Multiply in ``chunks`` of the depth, each to a sum of its own.

        A warp may begin the next tile while others still add this one.
        """
        sums = cuda.shared.array(_BOTH_SUMS, F32)
        bring_weights(weights, tiles, steps, chunks)
        first, stop, low, high = share(tiles, steps, chunks)
        base = remainder(i32(cuda.blockIdx.x), chunks) * TOKENS
        signal()
        for tile in range(first, stop):
            if at_once and high - low <= FEWER * WARPS:
                multiply_fewer(weights, tile, steps, low, high, x, sums, tile & 1)
            else:
                wait()
                multiply(weights, tile, steps, low, high, x, sums, tile & 1)
            row, token = cuda.threadIdx.x & 15, cuda.threadIdx.x >> 4
            for more in (0, TOKENS // 2):
                place = (base + token + more) * tiles * 16 + tile * 16 + row
                partials[place] = total(sums, tile & 1, row, token + more) * factor

    fl, ha, it, n, a, f = FLOATS, HALVES, INTS, I32, I64, types.float32
    cache = (fl, ha, ha, ha, ha)  # keys, values, rotated, pairs, queries
    return [
        ('prefill_norm', prefill_norm, (fl, fl, n, a, f, n, it, ha, fl, n)),
        ('prefill_qkv', prefill_qkv, (a, n, n, a, fl, fl, fl, it, it, *cache, n, n, n, n)),
        ('prefill_mix', prefill_mix, (ha, fl, it, n, n, n, n, ha)),
        ('prefill_mlp', prefill_mlp, (a, n, n, a, ha)),
        ('prefill_partial', prefill_partial, (a, n, n, n, a, f, fl)),
    ]
