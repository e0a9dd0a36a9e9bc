"""
The kernels of one decoded token: five a layer, then the head.

Each begins with what only it needs of the one ahead: normalise and project to queries, keys and
values; attend (``attention.py``); mix and project; normalise, gate and expand; contract. The
products onto the residual are left in chunks, which the next normalisation adds.
"""

from numba import cuda
from numba.core import types
import numpy as np

from vla_edge_ros.kernels.cuda import ptx, tensor
from vla_edge_ros.kernels.cuda.constants import (
    BATCH,
    CONTEXT,
    FIRST_ROW,
    FIRST_TOKEN,
    INNER_SCALE,
    MAX_HEADS,
    MAX_SPLITS,
    NUM_ROWS,
    STEP,
    SUMS,
    THREADS,
    TILE_BYTES,
    WARPS,
)
from vla_edge_ros.kernels.cuda.device import F32, FLOATS, HALVES, I32, I64, INTS, NEVER, U16, ZERO

DEPTH = 6
"""Steps of weights a warp has under way."""
_BATCH_SUMS, _SHARES = BATCH * SUMS, MAX_HEADS * MAX_SPLITS
_INNER, _OUTER = np.float32(INNER_SCALE), np.float32(1 / INNER_SCALE)


def define_decode(capability: tuple[int, int], head_dim: int, device) -> list[tuple]:
    """Return (name, function, argument types) of every kernel."""
    to_half, to_float, inverse_root = ptx.to_half, ptx.to_float, ptx.inverse_root
    quotient, remainder, ratio, again = ptx.quotient, ptx.remainder, ptx.ratio, ptx.again
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    product = tensor.make_product(DEPTH, capability)
    half_dim = head_dim // 2
    signal, wait, arrived = device.signal, device.wait, device.arrived
    share, bring, bring_weights = device.share, device.bring, device.bring_weights
    block_sum, copy_row, add_sums = device.block_sum, device.copy_row, device.add_sums
    better, best_of_block = device.better, device.best_of_block
    embedding_index, rotary = device.embedding_index, device.rotary
    store_qkv, split_size, swiglu = device.store_qkv, device.split_size, device.swiglu
    mixing_shares, mix_four = device.mixing_shares, device.mix_four
    f32, i32, i64 = np.float32, np.int32, np.int64

    @cuda.jit(device=True)
    def normalise(residual, kept, sums, num_sums, gain, size, eps, x, floats, scratch):
        """
        Wait for the kernel ahead, complete the residual, write it RMS-normalised to ``x``.

        ``floats`` lies over ``x`` and holds the row and the gain behind it. The first block keeps
        the residual for the next normalisation, where nobody reads it yet.
        """
        first = size // 2
        copy_row(gain, 4 * size, floats, first + size)
        wait()
        copy_row(residual, 4 * size, floats, first)
        arrived()
        cuda.syncthreads()
        add_sums(sums, size, num_sums, floats, first, size)
        squares = ZERO
        for i in range(cuda.threadIdx.x, size, THREADS):
            squares += floats[first + i] * floats[first + i]
            if cuda.blockIdx.x == 0:
                kept[i] = floats[first + i]
        scale = inverse_root(ratio(block_sum(squares, scratch), f32(size)) + eps)
        for i in range(cuda.threadIdx.x, size, THREADS):
            x[i] = to_half(floats[first + i] * scale * floats[first + size + i])
        cuda.syncthreads()

    @cuda.jit(device=True)
    def multiply(weights, tile, count, steps, chunk_low, chunk_high, x, sums):
        """Leave the eight warps' shares of ``count`` tiles in ``sums`` [count, WARPS, 16]."""
        thread = cuda.threadIdx.x
        warp, lane = thread >> 5, thread & 31
        low = chunk_low + (chunk_high - chunk_low) * warp // WARPS
        high = chunk_low + (chunk_high - chunk_low) * (warp + 1) // WARPS
        out = i32(warp * 16 + (lane >> 2))
        if high > low:
            product(
                weights + (i64(tile) * steps + low) * TILE_BYTES + lane * 16,
                shared_address(x, i32(low * STEP + (lane & 3) * 8)),
                i32(high - low),
                shared_address(sums, out),
                i32(count),
                i64(steps - (high - low)) * TILE_BYTES,
            )
        elif lane & 3 == 0:
            for i in range(count):
                sums[i * SUMS + out] = ZERO
                sums[i * SUMS + out + 8] = ZERO
        cuda.syncthreads()

    @cuda.jit(device=True)
    def total(sums, tile, row):
        value = ZERO
        for warp in range(WARPS):
            value += sums[tile * SUMS + warp * 16 + row]
        return value

    def embed(state, step, num_tokens, candidates, chosen_rows, num_candidates, embedding, size,
              residual, tokens):  # fmt: skip
        """Choose the best candidate of the last step, and fetch what it is fed back as."""
        best = cuda.shared.array(WARPS, F32)
        rows = cuda.shared.array(WARPS, I32)
        wait()
        signal()
        thread = cuda.threadIdx.x
        token = state[FIRST_TOKEN]
        if step > 0:
            value, row = f32(-np.inf), NEVER
            for i in range(thread, num_candidates, THREADS):
                if better(value, row, candidates[i], chosen_rows[i]):
                    value, row = candidates[i], chosen_rows[i]
            value, row = best_of_block(best, 0, rows, 0, value, row)
            # Without a number among the logits there is no best one: the first row, as on the CPU.
            token = row if value > f32(-np.inf) else state[FIRST_ROW]
            if thread == 0:
                tokens[step - 1] = token
        if step < num_tokens:
            for k in range(thread, size, THREADS):
                residual[k] = to_float(embedding[embedding_index(token, k, size // STEP)])

    def gather(ids, embedding, size, out):
        """Fetch the embeddings of many tokens, one a block."""
        row = cuda.blockIdx.x
        for k in range(cuda.threadIdx.x, size, THREADS):
            out[row * size + k] = to_float(embedding[embedding_index(ids[row], k, size // STEP)])

    def decode_qkv(weights, tiles, steps, residual, kept, prior, num_prior, gain, eps, bias,
                   cosine, sine, state, step, order, keys, values, rotated, pairs, queries, heads,
                   kv_heads, ranks, query_rows):  # fmt: skip
        x = cuda.shared.array(0, U16)
        floats = cuda.shared.array(0, F32)
        sums = cuda.shared.array(_BATCH_SUMS, F32)
        scratch = cuda.shared.array(WARPS, F32)
        size = steps * STEP
        rank = state[CONTEXT] + step
        bring_weights(weights, tiles, steps, 1)
        first, stop, low, high = share(tiles, steps, 1)
        bring(generic_address(bias, first * 16), (stop - first) * 64)
        bring(generic_address(cosine, rank * half_dim), half_dim * 4)
        bring(generic_address(sine, rank * half_dim), half_dim * 4)
        slot = order[rank]
        normalise(residual, kept, prior, num_prior, gain, size, eps, x, floats, scratch)
        signal()
        for tile in range(first, stop, BATCH):
            count = min(stop - tile, BATCH)
            multiply(weights, tile, count, steps, low, high, x, sums)
            for item in range(cuda.threadIdx.x, count * 8, THREADS):
                i, row = item >> 3, item & 7
                place = (tile + i) * 16 + row
                turn = rank * half_dim + rotary(tile + i, row)
                store_qkv(tile + i, row, 0, total(sums, i, row) + bias[place],
                          total(sums, i, row + 8) + bias[place + 8], rank, cosine[turn],
                          sine[turn], slot, keys, values, rotated, pairs, queries, heads,
                          kv_heads, ranks, query_rows)  # fmt: skip
            cuda.syncthreads()

    def decode_output(weights, tiles, steps, partials, extremes, state, step, heads, kv_heads,
                      query_rows, warps, left):  # fmt: skip
        # In one chunk: each block would mix the attention anew.
        x = cuda.shared.array(0, U16)
        sums = cuda.shared.array(_BATCH_SUMS, F32)
        shares = cuda.shared.array(_SHARES, F32)
        bring_weights(weights, tiles, steps, 1)
        first, stop, low, high = share(tiles, steps, 1)
        seen = state[CONTEXT] + step + 1
        part = split_size(seen, warps)
        splits = quotient(i32(seen + part - 1), i32(part))
        wait()
        mixing_shares(0, splits, extremes, 0, heads, heads, kv_heads, query_rows, shares)
        k = i32(4 * cuda.threadIdx.x)
        while k < steps * STEP:
            out = generic_address(x, i64(k))
            mix_four(k, 0, splits, partials, 0, heads, kv_heads, query_rows, shares, out)
            k = again(i32(k + 4 * THREADS))
        cuda.syncthreads()
        signal()
        for tile in range(first, stop, BATCH):
            count = min(stop - tile, BATCH)
            multiply(weights, tile, count, steps, low, high, x, sums)
            for item in range(cuda.threadIdx.x, count * 16, THREADS):
                left[tile * 16 + item] = total(sums, item >> 4, item & 15)
            cuda.syncthreads()

    def decode_mlp(weights, tiles, steps, residual, kept, prior, num_prior, gain, eps, inner):
        x = cuda.shared.array(0, U16)
        floats = cuda.shared.array(0, F32)
        sums = cuda.shared.array(_BATCH_SUMS, F32)
        scratch = cuda.shared.array(WARPS, F32)
        size = steps * STEP
        bring_weights(weights, tiles, steps, 1)
        normalise(residual, kept, prior, num_prior, gain, size, eps, x, floats, scratch)
        signal()
        first, stop, low, high = share(tiles, steps, 1)
        for tile in range(first, stop, BATCH):
            count = min(stop - tile, BATCH)
            multiply(weights, tile, count, steps, low, high, x, sums)
            for item in range(cuda.threadIdx.x, count * 8, THREADS):
                i, row = item >> 3, item & 7
                value = swiglu(total(sums, i, row), total(sums, i, row + 8))
                inner[tile * 8 + item] = to_half(value * _INNER)
            cuda.syncthreads()

    def decode_down(weights, tiles, steps, chunks, inner, left):
        x = cuda.shared.array(0, U16)
        sums = cuda.shared.array(_BATCH_SUMS, F32)
        bring_weights(weights, tiles, steps, chunks)
        first, stop, low, high = share(tiles, steps, chunks)
        wait()
        copy_row(inner + low * STEP * 2, (high - low) * STEP * 2, x, low * STEP)
        arrived()
        cuda.syncthreads()
        signal()
        base = remainder(i32(cuda.blockIdx.x), chunks) * tiles * 16
        for tile in range(first, stop, BATCH):
            count = min(stop - tile, BATCH)
            multiply(weights, tile, count, steps, low, high, x, sums)
            for item in range(cuda.threadIdx.x, count * 16, THREADS):
                left[base + tile * 16 + item] = _OUTER * total(sums, item >> 4, item & 15)
            cuda.syncthreads()

    def decode_head(weights, steps, residual, kept, prior, num_prior, gain, eps, state, normed,
                    logits, candidates, chosen_rows):  # fmt: skip
        """Write the logits of the rows asked for and each block's best."""
        x = cuda.shared.array(0, U16)
        floats = cuda.shared.array(0, F32)
        sums = cuda.shared.array(_BATCH_SUMS, F32)
        scratch = cuda.shared.array(WARPS, F32)
        best = cuda.shared.array(WARPS, F32)
        rows = cuda.shared.array(WARPS, I32)
        size = steps * STEP
        first_row, stop_row = state[FIRST_ROW], state[FIRST_ROW] + state[NUM_ROWS]
        origin = first_row >> 4
        tiles = ((stop_row + 15) >> 4) - origin
        weights += i64(origin) * steps * TILE_BYTES
        bring_weights(weights, tiles, steps, 1)
        normalise(residual, kept, prior, num_prior, gain, size, eps, x, floats, scratch)
        if normed:
            for k in range(cuda.threadIdx.x, size, THREADS):
                x[k] = to_half(floats[size // 2 + k])
            cuda.syncthreads()
        signal()
        first, stop, low, high = share(tiles, steps, 1)
        value, chosen = f32(-np.inf), NEVER
        for tile in range(first, stop, BATCH):
            count = min(stop - tile, BATCH)
            multiply(weights, tile, count, steps, low, high, x, sums)
            for item in range(cuda.threadIdx.x, count * 16, THREADS):
                row = i32((origin + tile) * 16 + item)
                if first_row <= row < stop_row:
                    logit = total(sums, item >> 4, item & 15)
                    logits[row] = logit
                    if logit > value:
                        value, chosen = logit, row
            cuda.syncthreads()
        value, chosen = best_of_block(best, 0, rows, 0, value, chosen)
        if cuda.threadIdx.x == 0:
            candidates[cuda.blockIdx.x], chosen_rows[cuda.blockIdx.x] = value, chosen

    fl, ha, it, n, a, f = FLOATS, HALVES, INTS, I32, I64, types.float32
    row = (a, fl, a, n, a, f)  # residual, kept, prior, num_prior, gain, eps
    cache = (fl, ha, ha, ha, ha)  # keys, values, rotated, pairs, queries
    return [
        ('embed', embed, (it, n, n, fl, it, n, ha, n, fl, it)),
        ('gather', gather, (it, ha, n, fl)),
        ('decode_qkv', decode_qkv, (a, n, n, *row, fl, fl, fl, it, n, it, *cache, n, n, n, n)),
        ('decode_output', decode_output, (a, n, n, ha, fl, it, n, n, n, n, n, fl)),
        ('decode_mlp', decode_mlp, (a, n, n, *row, ha)),
        ('decode_down', decode_down, (a, n, n, n, a, fl)),
        ('decode_head', decode_head, (a, n, *row, it, n, fl, fl, it)),
    ]
