"""
The CUDA kernels, written in Numba for one compute capability and head size.

A decode step of a layer is five kernels, each beginning with what only it needs of the one ahead:
normalise and project to queries, keys and values; attend in splits of the keys; mix the splits and
project; normalise, gate and expand; contract. A prefill of up to 32 tokens is the same with the
normalisation and the mixing as kernels of their own, because every block needs all tokens.

Eight warps of a block share the depth of sixteen rows of a matrix and add up through shared
memory, always in the same order: equal input gives equal bits. Rows are ordered so that the two
numbers one thread holds belong together: two halves of a rotary pair, or gate and up.

Kernel arguments are integers, float32 and pointers; ``state`` is int32 [STATE_WORDS]: number of
context slots, of new tokens, the first token, first row and number of rows of the head, and the
first rank to arrange. ``order`` is int32 [ranks]: the slot of each rank.
"""

import math

from numba import cuda
from numba.core import types
import numpy as np

from vla_edge_ros.kernels.cuda import ptx
from vla_edge_ros.kernels.cuda.constants import (
    ARRANGE_FROM,
    CONTEXT,
    FIRST_ROW,
    FIRST_TOKEN,
    FRAGMENT_BYTES,
    INNER_SCALE,
    MAX_HEADS,
    MAX_SPLITS,
    NEW_TOKENS,
    NUM_ROWS,
    PREFILL_WARPS,
    STEP,
    THREADS,
    TILE_BYTES,
    TOKENS,
    WARPS,
)

_TOKEN_TILES = TOKENS // 8

ARRANGE_RANKS = 32

_SUMS_ONE, _SUMS_MANY, _SHARES = WARPS * 16, WARPS * 16 * TOKENS, MAX_HEADS * MAX_SPLITS
_I32, _I64, _F32 = types.int32, types.int64, types.float32
_FLOATS, _HALVES, _INTS = (types.CPointer(kind) for kind in (_F32, types.uint16, _I32))
_ZERO, _ONE = np.float32(0), np.float32(1)
_INNER, _OUTER = np.float32(INNER_SCALE), np.float32(1 / INNER_SCALE)
_HIDDEN = np.float32(-1e30)
_LOG2_E = np.float32(1.4426950408889634)


def define(capability: tuple[int, int], head_dim: int) -> dict[str, tuple]:
    """Return ``{name: (function, signature)}`` of every kernel."""
    half_dim = head_dim // 2
    tiles_per_head = head_dim // 16
    to_half, to_float, exp2 = ptx.to_half, ptx.to_float, ptx.exp2
    shared_address, prefetch = ptx.shared_address, ptx.prefetch
    start = ptx.make_dependent_launch(capability)
    product = ptx.make_product(1, 6, capability)
    products = ptx.make_product(TOKENS, 4, capability)
    device = cuda.jit(device=True)
    f32, i32 = np.float32, np.int32

    @device
    def block_sum(value, scratch):
        for distance in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, distance)
        thread = cuda.threadIdx.x
        if thread & 31 == 0:
            scratch[thread >> 5] = value
        cuda.syncthreads()
        total = _ZERO
        for warp in range(WARPS):
            total += scratch[warp]
        return total

    @device
    def fragment_index(token, k):
        return ((((k >> 5) * _TOKEN_TILES + (token >> 3)) * 32 + (token & 7) * 4
                 + ((k >> 3) & 3)) * 8 + (k & 7))  # fmt: skip

    @device
    def embedding_index(row, k, steps):
        fragment = ((row >> 4) * steps + (k >> 5)) * 2 + ((row >> 3) & 1)
        return fragment * 256 + (row & 7) * 32 + (k & 31)

    @device
    def bring_weights(weights, tiles, steps):
        """Ask for this block's first tiles while the kernel ahead still runs."""
        tile_bytes = steps * TILE_BYTES
        for tile in range(cuda.blockIdx.x, min(tiles, cuda.blockIdx.x + 2 * cuda.gridDim.x),
                          cuda.gridDim.x):  # fmt: skip
            for line in range(cuda.threadIdx.x * 128, tile_bytes, THREADS * 128):
                prefetch(weights + tile * tile_bytes + line)

    @device
    def normalise(residual, gain, size, eps, x, scratch):
        """Write the RMS-normalised row to shared memory as float16."""
        squares = _ZERO
        for i in range(cuda.threadIdx.x, size, THREADS):
            squares += residual[i] * residual[i]
        scale = _ONE / f32(math.sqrt(block_sum(squares, scratch) / f32(size) + eps))
        for i in range(cuda.threadIdx.x, size, THREADS):
            x[i] = to_half(residual[i] * scale * gain[i])
        cuda.syncthreads()

    @device
    def multiply_one(weights, tile, steps, x, sums):
        """Leave the eight warps' shares of sixteen rows in ``sums``."""
        thread = cuda.threadIdx.x
        warp, lane = thread >> 5, thread & 31
        low, high = steps * warp // WARPS, steps * (warp + 1) // WARPS
        product(
            weights + (tile * steps + low) * TILE_BYTES + lane * 16,
            shared_address(x, i32(low * STEP + (lane & 3) * 8)),
            i32(high - low),
            shared_address(sums, i32(warp * 16 + (lane >> 2))),
        )
        cuda.syncthreads()

    @device
    def total_one(sums, row):
        total = _ZERO
        for warp in range(WARPS):
            total += sums[warp * 16 + row]
        return total

    @device
    def multiply_many(weights, tile, steps, first, stop, x, sums):
        thread = cuda.threadIdx.x
        warp, lane = thread >> 5, thread & 31
        low = first + (stop - first) * warp // WARPS
        high = first + (stop - first) * (warp + 1) // WARPS
        products(
            weights + (tile * steps + low) * TILE_BYTES + lane * 16,
            x + low * (_TOKEN_TILES * FRAGMENT_BYTES) + lane * 16,
            i32(high - low),
            shared_address(sums, i32((warp * 16 + (lane >> 2)) * TOKENS + (lane & 3) * 2)),
        )
        cuda.syncthreads()

    @device
    def total_many(sums, row, token):
        total = _ZERO
        for warp in range(WARPS):
            total += sums[(warp * 16 + row) * TOKENS + token]
        return total

    @device
    def swiglu(gate, up):
        return gate / (_ONE + exp2(-gate * _LOG2_E)) * up * _INNER

    @device
    def store_qkv(tile, row, token, low, high, first, bias, cosine, sine, order, keys, values,
                  rotated, pairs, queries, heads, kv_heads, ranks, query_rows):  # fmt: skip
        """Add the bias, rotate, and store one pair of a query, a key or a value."""
        low += bias[tile * 16 + row]
        high += bias[tile * 16 + 8 + row]
        head = tile // tiles_per_head
        d = (tile % tiles_per_head) * 8 + row
        rank = first + token
        turn = rank * half_dim + d
        turned_low = low * cosine[turn] - high * sine[turn]
        turned_high = high * cosine[turn] + low * sine[turn]
        if head < heads:
            group = heads // kv_heads
            place = (head // group * query_rows + token * group + head % group) * head_dim + d
            scale = _LOG2_E / f32(math.sqrt(f32(head_dim)))
            queries[place] = to_half(turned_low * scale)
            queries[place + half_dim] = to_half(turned_high * scale)
            return
        slot = order[rank]
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

    @device
    def split_size(keys, warps):
        """Return how many keys one split takes."""
        least = 16 * warps
        return max((keys + MAX_SPLITS * 16 - 1) // (MAX_SPLITS * 16) * 16, least)

    @device
    def mixing_weights(token, splits, extremes, heads, kv_heads, query_rows, weights):
        """Write the share of each split of each head to shared memory."""
        group = heads // kv_heads
        for head in range(cuda.threadIdx.x, heads, THREADS):
            row = head // group * query_rows + token * group + head % group
            top, total = _HIDDEN, _ZERO
            for split in range(splits):
                top = max(top, extremes[(split * kv_heads * query_rows + row) * 2])
            for split in range(splits):
                place = (split * kv_heads * query_rows + row) * 2
                share = extremes[place + 1] * exp2(extremes[place] - top)
                weights[head * MAX_SPLITS + split] = share
                total += share
            for split in range(splits):
                weights[head * MAX_SPLITS + split] /= total
        cuda.syncthreads()

    @device
    def mixed(k, token, splits, partials, heads, kv_heads, query_rows, weights):
        head = k // head_dim
        group = heads // kv_heads
        row = head // group * query_rows + token * group + head % group
        value = _ZERO
        for split in range(splits):
            place = (split * kv_heads * query_rows + row) * head_dim + k % head_dim
            value += weights[head * MAX_SPLITS + split] * to_float(partials[place])
        return value

    # Decode: one token.

    def embed(state, step, num_tokens, candidates, chosen_rows, num_candidates, embedding, size,
              residual, tokens):  # fmt: skip
        """Choose the best candidate of the last step, and fetch what it is fed back as."""
        best = cuda.shared.array(THREADS, _F32)
        rows = cuda.shared.array(THREADS, _I32)
        start()
        thread = cuda.threadIdx.x
        token = state[FIRST_TOKEN]
        if step > 0:
            value, row = f32(-np.inf), i32(0x7FFFFFFF)
            for i in range(thread, num_candidates, THREADS):
                if candidates[i] > value or (candidates[i] == value and chosen_rows[i] < row):
                    value, row = candidates[i], chosen_rows[i]
            best[thread], rows[thread] = value, row
            cuda.syncthreads()
            distance = THREADS // 2
            while distance > 0:
                if thread < distance:
                    other = thread + distance
                    if best[other] > best[thread] or (
                        best[other] == best[thread] and rows[other] < rows[thread]
                    ):
                        best[thread], rows[thread] = best[other], rows[other]
                cuda.syncthreads()
                distance //= 2
            token = min(rows[0], state[FIRST_ROW] + state[NUM_ROWS] - 1)
            if thread == 0:
                tokens[step - 1] = token
        if step < num_tokens:
            for k in range(thread, size, THREADS):
                residual[k] = to_float(embedding[embedding_index(token, k, size // 32)])

    def gather(ids, embedding, size, out):
        """Fetch the embeddings of many tokens, one a block."""
        row = cuda.blockIdx.x
        for k in range(cuda.threadIdx.x, size, THREADS):
            out[row * size + k] = to_float(embedding[embedding_index(ids[row], k, size // 32)])

    def decode_qkv(weights, tiles, steps, residual, gain, eps, bias, cosine, sine, state, step,
                   order, keys, values, rotated, pairs, queries, heads, kv_heads, ranks,
                   query_rows):  # fmt: skip
        x = cuda.shared.array(0, types.uint16)
        sums = cuda.shared.array(_SUMS_ONE, _F32)
        scratch = cuda.shared.array(WARPS, _F32)
        bring_weights(weights, tiles, steps)
        start()
        normalise(residual, gain, steps * STEP, eps, x, scratch)
        for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            multiply_one(weights, tile, steps, x, sums)
            row = cuda.threadIdx.x
            if row < 8:
                store_qkv(tile, row, 0, total_one(sums, row), total_one(sums, row + 8),
                          state[CONTEXT] + step, bias, cosine, sine, order, keys, values, rotated,
                          pairs, queries, heads, kv_heads, ranks, query_rows)  # fmt: skip
            cuda.syncthreads()

    def decode_output(weights, tiles, steps, residual, partials, extremes, state, step, heads,
                      kv_heads, query_rows, warps):  # fmt: skip
        x = cuda.shared.array(0, types.uint16)
        sums = cuda.shared.array(_SUMS_ONE, _F32)
        shares = cuda.shared.array(_SHARES, _F32)
        bring_weights(weights, tiles, steps)
        start()
        seen = state[CONTEXT] + step + 1
        size = split_size(seen, warps)
        splits = (seen + size - 1) // size
        mixing_weights(0, splits, extremes, heads, kv_heads, query_rows, shares)
        for k in range(cuda.threadIdx.x, steps * STEP, THREADS):
            x[k] = to_half(mixed(k, 0, splits, partials, heads, kv_heads, query_rows, shares))
        cuda.syncthreads()
        for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            multiply_one(weights, tile, steps, x, sums)
            row = cuda.threadIdx.x
            if row < 16:
                residual[tile * 16 + row] += total_one(sums, row)
            cuda.syncthreads()

    def decode_mlp(weights, tiles, steps, residual, gain, eps, inner):
        x = cuda.shared.array(0, types.uint16)
        sums = cuda.shared.array(_SUMS_ONE, _F32)
        scratch = cuda.shared.array(WARPS, _F32)
        bring_weights(weights, tiles, steps)
        start()
        normalise(residual, gain, steps * STEP, eps, x, scratch)
        for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            multiply_one(weights, tile, steps, x, sums)
            row = cuda.threadIdx.x
            if row < 8:
                value = swiglu(total_one(sums, row), total_one(sums, row + 8))
                inner[tile * 8 + row] = to_half(value)
            cuda.syncthreads()

    def decode_down(weights, tiles, steps, residual, inner):
        x = cuda.shared.array(0, types.uint16)
        sums = cuda.shared.array(_SUMS_ONE, _F32)
        bring_weights(weights, tiles, steps)
        start()
        for k in range(cuda.threadIdx.x, steps * STEP, THREADS):
            x[k] = inner[k]
        cuda.syncthreads()
        for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            multiply_one(weights, tile, steps, x, sums)
            row = cuda.threadIdx.x
            if row < 16:
                residual[tile * 16 + row] += total_one(sums, row) * _OUTER
            cuda.syncthreads()

    def decode_head(weights, steps, residual, gain, eps, state, normed, logits, candidates,
                    chosen_rows):  # fmt: skip
        """Write the logits of the rows asked for and each block's best."""
        x = cuda.shared.array(0, types.uint16)
        sums = cuda.shared.array(_SUMS_ONE, _F32)
        scratch = cuda.shared.array(WARPS, _F32)
        best = cuda.shared.array(16, _F32)
        rows = cuda.shared.array(16, _I32)
        start()
        if normed:
            for k in range(cuda.threadIdx.x, steps * STEP, THREADS):
                x[k] = to_half(residual[k])
            cuda.syncthreads()
        else:
            normalise(residual, gain, steps * STEP, eps, x, scratch)
        first, stop = state[FIRST_ROW], state[FIRST_ROW] + state[NUM_ROWS]
        value, chosen = f32(-np.inf), i32(0x7FFFFFFF)
        for tile in range((first >> 4) + cuda.blockIdx.x, (stop + 15) >> 4, cuda.gridDim.x):
            multiply_one(weights, tile, steps, x, sums)
            thread = cuda.threadIdx.x
            row = tile * 16 + thread
            if thread < 16 and first <= row < stop:
                logit = total_one(sums, thread)
                logits[row] = logit
                if logit > value:
                    value, chosen = logit, i32(row)
            cuda.syncthreads()
        if cuda.threadIdx.x < 16:
            best[cuda.threadIdx.x], rows[cuda.threadIdx.x] = value, chosen
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for i in range(1, 16):
                if best[i] > value or (best[i] == value and rows[i] < chosen):
                    value, chosen = best[i], rows[i]
            candidates[cuda.blockIdx.x], chosen_rows[cuda.blockIdx.x] = value, chosen

    # Prefill: up to TOKENS tokens.

    def prefill_norm(residual, partials, num_partials, gain, eps, size, state, x, hidden, keep):
        """Add what the last product left, normalise, and lay out in fragment order."""
        scratch = cuda.shared.array(WARPS, _F32)
        start()
        token = cuda.blockIdx.x
        if token >= state[NEW_TOKENS]:
            return
        squares = _ZERO
        for i in range(cuda.threadIdx.x, size, THREADS):
            value = residual[token * size + i]
            for part in range(num_partials):
                value += partials[(part * TOKENS + token) * size + i]
            residual[token * size + i] = value
            squares += value * value
        scale = _ONE / f32(math.sqrt(block_sum(squares, scratch) / f32(size) + eps))
        for i in range(cuda.threadIdx.x, size, THREADS):
            value = residual[token * size + i] * scale * gain[i]
            x[fragment_index(token, i)] = to_half(value)
            if keep:
                hidden[token * size + i] = value

    def prefill_qkv(weights, tiles, steps, x, bias, cosine, sine, state, order, keys, values,
                    rotated, pairs, queries, heads, kv_heads, ranks, query_rows):  # fmt: skip
        sums = cuda.shared.array(_SUMS_MANY, _F32)
        bring_weights(weights, tiles, steps)
        start()
        for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            multiply_many(weights, tile, steps, 0, steps, x, sums)
            row, token = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
            if token < state[NEW_TOKENS]:
                store_qkv(tile, row, token, total_many(sums, row, token),
                          total_many(sums, row + 8, token), state[CONTEXT], bias, cosine, sine,
                          order, keys, values, rotated, pairs, queries, heads, kv_heads, ranks,
                          query_rows)  # fmt: skip
            cuda.syncthreads()

    def prefill_mix(partials, extremes, state, heads, kv_heads, query_rows, warps, x):
        """Put the splits of attention together, one token a block, in fragment order."""
        shares = cuda.shared.array(_SHARES, _F32)
        start()
        token = cuda.blockIdx.x
        if token >= state[NEW_TOKENS]:
            return
        seen = state[CONTEXT] + state[NEW_TOKENS]
        size = split_size(seen, warps)
        splits = (seen + size - 1) // size
        mixing_weights(token, splits, extremes, heads, kv_heads, query_rows, shares)
        for k in range(cuda.threadIdx.x, heads * head_dim, THREADS):
            value = mixed(k, token, splits, partials, heads, kv_heads, query_rows, shares)
            x[fragment_index(token, k)] = to_half(value)

    def prefill_mlp(weights, tiles, steps, x, state, inner):
        sums = cuda.shared.array(_SUMS_MANY, _F32)
        bring_weights(weights, tiles, steps)
        start()
        for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
            multiply_many(weights, tile, steps, 0, steps, x, sums)
            row, token = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
            value = swiglu(total_many(sums, row, token), total_many(sums, row + 8, token))
            inner[fragment_index(token, tile * 8 + row)] = to_half(value)
            cuda.syncthreads()

    def prefill_partial(weights, tiles, steps, chunks, x, factor, partials):
        """Multiply in ``chunks`` of the depth, each to a sum of its own."""
        sums = cuda.shared.array(_SUMS_MANY, _F32)
        start()
        for unit in range(cuda.blockIdx.x, tiles * chunks, cuda.gridDim.x):
            tile, chunk = unit // chunks, unit % chunks
            first, stop = steps * chunk // chunks, steps * (chunk + 1) // chunks
            multiply_many(weights, tile, steps, first, stop, x, sums)
            row, token = cuda.threadIdx.x & 15, cuda.threadIdx.x >> 4
            for more in (0, TOKENS // 2):
                place = (chunk * TOKENS + token + more) * tiles * 16 + tile * 16 + row
                partials[place] = total_many(sums, row, token + more) * factor
            cuda.syncthreads()

    # Both.

    def make_attention(warps, rows):
        attend = ptx.make_attend(head_dim, rows > 8, capability)
        out_size, sums_size = warps * rows * head_dim, warps * 32

        def attention(queries, rotated, pairs, state, step, single, group, query_rows, ranks,
                      partials, extremes):  # fmt: skip
            """Attend with up to sixteen rows to one split of the keys of one head."""
            out = cuda.shared.array(out_size, _F32)
            sums = cuda.shared.array(sums_size, _F32)
            start()
            kv, tile, split = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
            thread = cuda.threadIdx.x
            warp, row, quad = thread >> 5, (thread & 31) >> 2, thread & 3
            first = state[CONTEXT] + step
            tokens = 1 if single else state[NEW_TOKENS]
            seen = first + tokens
            size = split_size(seen, warps)
            begin, end = split * size, min(split * size + size, seen)
            if begin >= seen or tile * 16 >= tokens * group:
                return
            low = first + min((tile * 16 + row) // group, tokens - 1)
            high = first + min((tile * 16 + row + 8) // group, tokens - 1)
            head = kv * ranks * head_dim * 2
            attend(
                queries + ((kv * query_rows + tile * 16 + row) * head_dim * 2 + quad * 16),
                rotated + (head + row * head_dim * 2 + quad * 16),
                pairs + (head + quad * head_dim * 4 + row * 16),
                i32(begin + warp * 16), i32(end), i32(warps * 16), i32(low), i32(high),
                shared_address(out, i32((warp * rows + row) * head_dim + quad * 8)),
                shared_address(sums, i32(warp * 32 + row * 2)),
            )  # fmt: skip
            cuda.syncthreads()
            line = (split * cuda.gridDim.x + kv) * query_rows + tile * 16
            for element in range(thread, rows * head_dim, 32 * warps):
                row, d = element // head_dim, element % head_dim
                top, total, value = _HIDDEN, _ZERO, _ZERO
                for other in range(warps):
                    top = max(top, sums[other * 32 + row * 2])
                for other in range(warps):
                    share = exp2(sums[other * 32 + row * 2] - top)
                    total += share * sums[other * 32 + row * 2 + 1]
                    value += share * out[(other * rows + row) * head_dim + d]
                if total > _ZERO:
                    value /= total
                partials[(line + row) * head_dim + d] = to_half(value)
                if d == 0:
                    extremes[(line + row) * 2] = top
                    extremes[(line + row) * 2 + 1] = total

        return attention

    def arrange(state, order, keys, values, cosine, sine, rotated, pairs, layers, slots, kv_heads,
                ranks):  # fmt: skip
        """Rotate the cached keys by rank, and bring the values into pairs of ranks."""
        first, stop = state[ARRANGE_FROM], state[CONTEXT]
        chunks = (stop - first + ARRANGE_RANKS - 1) // ARRANGE_RANKS
        for unit in range(cuda.blockIdx.x, layers * kv_heads * chunks, cuda.gridDim.x):
            layer, rest = unit // (kv_heads * chunks), unit % (kv_heads * chunks)
            kv, chunk = rest // chunks, rest % chunks
            for item in range(cuda.threadIdx.x, ARRANGE_RANKS * half_dim, THREADS):
                rank, d = first + chunk * ARRANGE_RANKS + item // half_dim, item % half_dim
                if rank < stop:
                    source = ((layer * slots + order[rank]) * kv_heads + kv) * head_dim + d
                    low, high = keys[source], keys[source + half_dim]
                    c, s = cosine[rank * half_dim + d], sine[rank * half_dim + d]
                    head = (layer * kv_heads + kv) * ranks
                    place = (head + rank) * head_dim + d
                    rotated[place] = to_half(low * c - high * s)
                    rotated[place + half_dim] = to_half(high * c + low * s)
                    place = (head + (rank & ~1)) * head_dim + 2 * d + (rank & 1)
                    pairs[place] = values[source]
                    pairs[place + head_dim] = values[source + half_dim]

    fl, ha, it, n, a, f = _FLOATS, _HALVES, _INTS, _I32, _I64, _F32
    cache = (fl, ha, ha, ha, ha)  # keys, values, rotated, pairs, queries
    return {
        name: (function, types.void(*arguments))
        for name, function, arguments in (
            ('embed', embed, (it, n, n, fl, it, n, ha, n, fl, it)),
            ('gather', gather, (it, ha, n, fl)),
            ('decode_qkv', decode_qkv,
             (a, n, n, fl, fl, f, fl, fl, fl, it, n, it, *cache, n, n, n, n)),
            ('decode_output', decode_output, (a, n, n, fl, ha, fl, it, n, n, n, n, n)),
            ('decode_mlp', decode_mlp, (a, n, n, fl, fl, f, ha)),
            ('decode_down', decode_down, (a, n, n, fl, ha)),
            ('decode_head', decode_head, (a, n, fl, fl, f, it, n, fl, fl, it)),
            ('prefill_norm', prefill_norm, (fl, fl, n, fl, f, n, it, ha, fl, n)),
            ('prefill_qkv', prefill_qkv,
             (a, n, n, a, fl, fl, fl, it, it, *cache, n, n, n, n)),
            ('prefill_mix', prefill_mix, (ha, fl, it, n, n, n, n, ha)),
            ('prefill_mlp', prefill_mlp, (a, n, n, a, it, ha)),
            ('prefill_partial', prefill_partial, (a, n, n, n, a, f, fl)),
            ('decode_attention', make_attention(WARPS, 8),
             (a, a, a, it, n, n, n, n, n, ha, fl)),
            ('prefill_attention', make_attention(PREFILL_WARPS, 16),
             (a, a, a, it, n, n, n, n, n, ha, fl)),
            ('arrange', arrange, (it, it, fl, ha, fl, fl, ha, ha, n, n, n, n)),
        )
    }  # fmt: skip
