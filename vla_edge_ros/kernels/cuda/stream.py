"""
A whole greedy decode as one kernel that streams the weights through shared memory.

One block stays on every processor. One of its threads copies the block's share of every matrix,
in the order of use, into a ring of stages, and never waits for a result: while the blocks wait
for each other, the weights behind go on arriving. Eight warps multiply out of the ring.

A layer has five phases: normalise and project to queries, keys and values; attend; put the
attention together and project; normalise, gate and expand; contract. A phase begins when all
blocks have counted themselves in behind the one ahead. The residual is a fixed-point number to
which blocks add in any order, so that equal input gives equal bits.
"""

from numba import cuda
from numba.core import types
import numpy as np

from vla_edge_ros.kernels.cuda import ptx, stream_ptx, tensor
from vla_edge_ros.kernels.cuda.constants import (
    ARRIVED,
    BARRIER_BYTES,
    BATCH,
    BULK_COPY,
    CONTEXT,
    DECODE_ROWS,
    FIRST_ROW,
    FIRST_TOKEN,
    INNER_SCALE,
    MAX_SPLITS,
    NUM_ROWS,
    STAGE_BYTES,
    STAGE_STEPS,
    STEP,
    STREAM_EXTRA,
    STREAM_SCRATCH,
    STREAM_SUMS,
    SUMS,
    THREADS,
    TILE_BYTES,
    WARPS,
)
from vla_edge_ros.kernels.cuda.device import (
    F32,
    FLOATS,
    HALVES,
    I32,
    I64,
    INTS,
    ONE,
    U16,
    ZERO,
)

_ATTENTION_SUMS = STREAM_SCRATCH
_SMALL = _ATTENTION_SUMS + WARPS * 128
_PLAN = _SMALL + 64
_RANK, _SLOT, _PART = range(_PLAN + 40, _PLAN + 52, 4)
_RING = STREAM_SCRATCH + STREAM_EXTRA
_INNER, _OUTER = np.float32(INNER_SCALE), np.float32(1 / INNER_SCALE)
_NEVER = np.int32(0x7FFFFFFF)


def define_stream(capability: tuple[int, int], head_dim: int, device) -> list[tuple]:
    """Return (name, function, argument types) of the kernel; none before compute capability 9."""
    if capability < BULK_COPY:
        return []
    to_half, to_float, load_float = ptx.to_half, ptx.to_float, ptx.load_float
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    prefetch, moved = ptx.prefetch, ptx.moved
    copy, arrived = ptx.make_copy(capability)
    make_barrier, publish_barriers = stream_ptx.make_barrier, stream_ptx.publish_barriers
    issue, bulk_copy = stream_ptx.issue, stream_ptx.bulk_copy
    bulk_prefetch = stream_ptx.bulk_prefetch
    await_parity, meet = stream_ptx.await_parity, stream_ptx.meet
    announce, await_count = stream_ptx.announce, stream_ptx.await_count
    load_int, store_long, add_long = (
        stream_ptx.load_int, stream_ptx.store_long, stream_ptx.add_long)
    to_fixed, who = stream_ptx.to_fixed, stream_ptx.who
    keep, recall, again = stream_ptx.keep, stream_ptx.recall, stream_ptx.again
    consume = stream_ptx.make_consume(capability)
    gather_parts = stream_ptx.make_gather_parts()
    attend = tensor.make_attend(head_dim, False, capability, late=True)
    normalise, combine = stream_ptx.make_normalise(), stream_ptx.make_combine(head_dim)
    total, quotient, remainder, ratio = (
        stream_ptx.total, ptx.quotient, ptx.remainder, ptx.ratio)
    embedding_index, rotary, query_row = (
        device.embedding_index, device.rotary, device.query_row)
    store_qkv, split_size, swiglu = device.store_qkv, device.split_size, device.swiglu
    half_dim, head_steps = head_dim // 2, head_dim // STEP
    f32, i32, i64 = np.float32, np.int32, np.int64
    jit = cuda.jit(device=True)

    @jit
    def next_stage(stage, parity, stages):
        stage += 1
        return (i32(0), i32(parity ^ 1)) if stage == stages else (i32(stage), i32(parity))

    @jit
    def feed(at, ring, stages, ahead, fetch, source, steps, unit, jump):
        """
        Put steps of weights into the ring, and return what ``at`` is behind them.

        ``at``: stage and parity of the next to fill, the same of the one ``ahead`` stages before,
        and how many were filled. The steps lie in units of ``unit``, ``jump`` bytes apart; 0: all
        in one piece. At most ``ahead`` stages are under way, so that what else is read does not
        queue behind them; ``fetch`` stages further are asked for, to wait nearer by.
        """
        stage, parity, late, late_parity, done = at
        first = i32(0)
        while first < steps:
            count = min(i32(STAGE_STEPS), i32(steps - first))
            barrier = i32(ring - BARRIER_BYTES + stage * 16)
            await_parity(i32(barrier + 8), i32(parity ^ 1))
            if done >= ahead:
                await_parity(i32(ring - BARRIER_BYTES + late * 16), late_parity)
                late, late_parity = next_stage(late, late_parity, stages)
            to = i32(ring + stage * STAGE_BYTES)
            issue(i32(count * TILE_BYTES), barrier)
            if unit == 0:
                bulk_copy(to, source + i64(first) * TILE_BYTES, i32(count * TILE_BYTES), barrier)
                later = first + fetch * STAGE_STEPS
                if fetch > 0 and later < steps:
                    bulk_prefetch(
                        source + i64(later) * TILE_BYTES,
                        i32(min(i32(STAGE_STEPS), i32(steps - later)) * TILE_BYTES))
            else:
                for _ in range(0, count, unit):
                    bulk_copy(to, source, i32(unit * TILE_BYTES), barrier)
                    to = i32(to + unit * TILE_BYTES)
                    source += jump
            first = i32(first + count)
            done = i32(done + 1)
            stage, parity = next_stage(stage, parity, stages)
        return stage, parity, late, late_parity, done

    @jit
    def await_all(counter, goal):
        """Wait until all blocks have finished the phases before."""
        if who() == 0:
            await_count(counter, i32(goal))
        meet()

    @jit
    def finish(counter):
        """Count this block in."""
        meet()
        if who() == 0:
            announce(counter)

    @jit
    def ask_for_gain(gains, layer, size, base):
        size = again(size)
        copy(i32(who() * 16), i32(THREADS * 16), i32(4 * size), gains + i64(layer) * size * 4,
             i32(base + 10 * size))  # fmt: skip

    @jit
    def ask_for_residual(residual, size, base):
        size = again(size)
        copy(i32(who() * 16), i32(THREADS * 16), i32(8 * size), residual,
             i32(base + 2 * size))  # fmt: skip

    @jit
    def multiply(turn, ring, stages, steps, k, depth, x, base, units):
        """Leave the warps' sums of ``units`` tiles in shared memory; return the ring's state."""
        turn = consume(turn, i32(ring), i32(stages), i32((steps + STAGE_STEPS - 1) // STAGE_STEPS),
                       i32(steps), i32(k), i32(depth), i32(x), i32(base + STREAM_SUMS),
                       i32(units))  # fmt: skip
        meet()
        return turn

    @jit
    def sum_of(base, item, row):
        """Return what all warps left of row ``row`` of tile ``item``."""
        return total(i32(base + STREAM_SUMS + item * (4 * SUMS) + row * 4))

    @jit
    def add_rows(base, units, tile, factor, residual):
        """Add what was multiplied to the residual."""
        item = who()
        if item < units * 16:
            value = sum_of(base, item >> 4, item & 15) * factor
            add_long(residual + (i64(tile) * 16 + item) * 8, to_fixed(value))

    @jit
    def better(value, row, other_value, other_row):
        return other_value > value or (other_value == value and other_row < row)

    @jit
    def best_of_warp(value, row):
        for distance in (16, 8, 4, 2, 1):
            other_value = cuda.shfl_xor_sync(0xFFFFFFFF, value, distance)
            other_row = cuda.shfl_xor_sync(0xFFFFFFFF, row, distance)
            if better(value, row, other_value, other_row):
                value, row = other_value, other_row
        return value, row

    @jit
    def choose(candidates, chosen_rows, count, otherwise):
        """Return the best of all blocks; every warp looks for itself."""
        value, row = f32(-np.inf), _NEVER
        for i in range(who() & 31, count, 32):
            other_value = load_float(generic_address(candidates, i))
            other_row = load_int(generic_address(chosen_rows, i))
            if better(value, row, other_value, other_row):
                value, row = other_value, other_row
        value, row = best_of_warp(value, row)
        return row if value > f32(-np.inf) else otherwise

    @jit
    def part_of(base, matrix):
        """Return where this block's part of a matrix begins and ends."""
        return (recall(i32(base + _PLAN + 8 * matrix)),
                recall(i32(base + _PLAN + 8 * matrix + 4)))  # fmt: skip

    @jit
    def attend_split(split, kv, seen, queries, rotated, pairs, query_rows, ranks, partials,
                     extremes, kv_heads, base):  # fmt: skip
        """Attend with one token's queries of a KV head to one split of its keys."""
        thread = who()
        warp, row, quad = thread >> 5, (thread & 31) >> 2, thread & 3
        size = split_size(seen, WARPS)
        begin, end = split * size, min(split * size + size, seen)
        head = i64(kv) * ranks * head_dim * 2
        attend(
            queries + ((kv * query_rows + row) * head_dim * 2 + quad * 16),
            rotated + (head + row * head_dim * 2 + quad * 16),
            pairs + (head + quad * head_dim * 4 + row * 16),
            i32(begin + warp * 16), i32(end), i32(WARPS * 16), i32(seen - 1), i32(seen - 1),
            i32(base + ((warp * DECODE_ROWS + row) * head_dim + quad * 8) * 4),
            i32(base + _ATTENTION_SUMS + (warp * 32 + row * 2) * 4),
        )  # fmt: skip
        meet()
        line = (split * kv_heads + kv) * query_rows
        element = 4 * thread
        if element < DECODE_ROWS * head_dim:
            row = quotient(i32(element), i32(head_dim))
            at_extremes = i64(0)
            if element == row * head_dim:
                at_extremes = generic_address(extremes, i64(line + row) * 2)
            combine(i32(base + element * 4), i32(base + _ATTENTION_SUMS + row * 8),
                    generic_address(partials, i64(line) * head_dim + element),
                    at_extremes)  # fmt: skip

    def decode_stream(qkv, output, gate_up, down, head, bias, attention_norm, mlp_norm, final_norm,
                      keys, values, rotated, pairs, queries, partials, extremes, cosine, sine,
                      state, order, embedding, residual, inner, logits, candidates, chosen_rows,
                      tokens, shares, layers, hidden, inner_size, heads, kv_heads, layer_slots,
                      layer_ranks, ranks, query_rows, depth, wide, tiles, qkv_tiles, gate_tiles, eps, share,
                      num_tokens, stages, ahead, fetch):  # fmt: skip
        x = cuda.shared.array(0, U16)
        floats = cuda.shared.array(0, F32)
        ints = cuda.shared.array(0, I32)
        fixed = cuda.shared.array(0, I64)
        base = shared_address(x, i32(0))
        ring = i32(base + _RING)
        thread, block, blocks = who(), i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
        if thread < 8:
            # Where this block's part of each matrix begins and ends.
            keep(i32(base + _PLAN + 4 * thread),
                 shares[(thread >> 1) * (blocks + 1) + block + (thread & 1)])  # fmt: skip
        if thread == 8:
            first_row, stop_row = state[FIRST_ROW], state[FIRST_ROW] + state[NUM_ROWS]
            origin = first_row >> 4
            head_tiles = ((stop_row + 15) >> 4) - origin
            keep(i32(base + _PLAN + 32), i32(origin + quotient(i32(head_tiles * block), blocks)))
            keep(i32(base + _PLAN + 36),
                 i32(origin + quotient(i32(head_tiles * (block + 1)), blocks)))  # fmt: skip
        if thread == 0:
            for stage in range(stages):
                make_barrier(i32(ring - BARRIER_BYTES + stage * 16), i32(1))
                make_barrier(i32(ring - BARRIER_BYTES + stage * 16 + 8), i32(WARPS))
            publish_barriers()
        cuda.syncthreads()
        if thread >= THREADS:
            if thread > THREADS:
                return
            at = (i32(0), i32(0), i32(0), i32(0), i32(0))
            for _ in range(num_tokens):
                for layer in range(layers):
                    qkv_first, qkv_stop = part_of(base, 0)
                    output_first, output_stop = part_of(base, 1)
                    gate_first, gate_stop = part_of(base, 2)
                    down_first, down_stop = part_of(base, 3)
                    source = qkv + (i64(layer) * qkv_tiles + qkv_first) * depth * TILE_BYTES
                    at = feed(at, ring, stages, ahead, fetch, source,
                                (qkv_stop - qkv_first) * depth, i32(0), i64(0))  # fmt: skip
                    for one in range(quotient(output_first, tiles),
                                     quotient(i32(output_stop + tiles - 1), tiles)):
                        low = max(output_first, one * tiles)
                        high = min(output_stop, one * tiles + tiles)
                        across = i32(heads * head_steps)
                        source = output + ((i64(layer) * tiles + low - one * tiles) * across
                                           + one * head_steps) * TILE_BYTES  # fmt: skip
                        at = feed(at, ring, stages, ahead, fetch, source,
                                    (high - low) * head_steps, i32(head_steps),
                                    i64(across) * TILE_BYTES)  # fmt: skip
                    source = gate_up + (i64(layer) * gate_tiles + gate_first) * depth * TILE_BYTES
                    at = feed(at, ring, stages, ahead, fetch, source,
                                (gate_stop - gate_first) * depth, i32(0), i64(0))  # fmt: skip
                    source = down + (i64(layer) * tiles * wide + down_first) * TILE_BYTES
                    at = feed(at, ring, stages, ahead, fetch, source, down_stop - down_first,
                                i32(0), i64(0))  # fmt: skip
                head_first, head_stop = part_of(base, 4)
                source = head + i64(head_first) * depth * TILE_BYTES
                at = feed(at, ring, stages, ahead, fetch, source,
                            (head_stop - head_first) * depth, i32(0), i64(0))  # fmt: skip
            return

        counter = generic_address(state, i64(ARRIVED))
        goal, turn, token = i32(0), i32(0), state[FIRST_TOKEN]
        for step in range(num_tokens):
            if who() == 0:
                rank = i32(state[CONTEXT] + step)
                keep(i32(base + _RANK), rank)
                keep(i32(base + _SLOT), order[rank])
                keep(i32(base + _PART), i32(split_size(rank + 1, WARPS)))
            for layer in range(layers):
                # Queries, keys and values.
                ask_for_gain(attention_norm, layer, hidden, base)
                if layer > 0 or step > 0:
                    await_all(counter, goal)
                if layer > 0:
                    ask_for_residual(residual, hidden, base)
                    arrived()
                else:
                    if step > 0:
                        token = choose(candidates, chosen_rows, blocks, state[FIRST_ROW])
                        if block == 0 and who() == 0:
                            tokens[step - 1] = token
                    for i in range(2 * who(), hidden, 2 * THREADS):
                        for j in (i, i + 1):
                            value = to_fixed(to_float(embedding[embedding_index(token, j, depth)]))
                            fixed[hidden // 4 + j] = value
                            if block == 0:
                                store_long(residual + i64(j) * 8, value)
                    arrived()
                normalise(base, hidden, eps, share, i32(base + _SMALL))
                rank, slot = recall(i32(base + _RANK)), recall(i32(base + _SLOT))
                bias_row = layer * qkv_tiles * 16
                cache = i64(layer) * layer_slots
                ordered = i64(layer) * layer_ranks
                thread = who()
                qkv_first, qkv_stop = part_of(base, 0)
                tile = qkv_first
                while tile < qkv_stop:
                    count = min(i32(qkv_stop - tile), i32(BATCH))
                    item = thread
                    place = bias_row + tile * 16 + (item >> 3) * 16 + (item & 7)
                    i, row = item >> 3, item & 7
                    bias_low, bias_high, c, s = ZERO, ZERO, ZERO, ZERO
                    if item < count * 8:
                        angle = rank * half_dim + rotary(tile + i, row)
                        bias_low, bias_high = bias[place], bias[place + 8]
                        c, s = cosine[angle], sine[angle]
                    turn = multiply(
                        turn, ring, stages, count * depth, 0, depth, base, base, count)
                    if item < count * 8:
                        store_qkv(tile + i, row, 0, sum_of(base, i, row) + bias_low,
                                  sum_of(base, i, row + 8) + bias_high, rank, c, s, slot,
                                  moved(keys, cache), moved(values, cache),
                                  moved(rotated, ordered), moved(pairs, ordered), queries, heads,
                                  kv_heads, ranks, query_rows)  # fmt: skip
                    tile = i32(tile + count)
                    meet()
                finish(counter)
                goal += blocks
                # Attention.
                thread = who()
                rank, part = recall(i32(base + _RANK)), recall(i32(base + _PART))
                seen = rank + 1
                splits = quotient(i32(rank + part), part)
                ordered = i64(layer) * layer_ranks
                at_keys, at_pairs = (
                    generic_address(rotated, ordered), generic_address(pairs, ordered))
                if block < kv_heads * MAX_SPLITS:
                    split, kv = remainder(block, i32(MAX_SPLITS)), quotient(block, i32(MAX_SPLITS))
                    begin = split * part
                    size = (min(begin + part, seen) - begin) * head_dim * 2
                    if size > 0:
                        place = (i64(kv) * ranks + begin) * head_dim * 2
                        prefetch(i32(thread * 128), i32(THREADS * 128), i32(size), at_keys + place)
                        prefetch(i32(thread * 128), i32(THREADS * 128), i32(size),
                                 at_pairs + place)  # fmt: skip
                await_all(counter, goal)
                item = block
                while item < kv_heads * MAX_SPLITS:
                    split, kv = remainder(item, i32(MAX_SPLITS)), quotient(item, i32(MAX_SPLITS))
                    item = i32(item + blocks)
                    if split < splits:
                        attend_split(split, kv, seen, generic_address(queries, i64(0)), at_keys, at_pairs, query_rows,
                                     ranks, partials, extremes, kv_heads, base)
                        meet()
                finish(counter)
                goal += blocks
                # Back from the heads.
                await_all(counter, goal)
                thread = who()
                rank, part = recall(i32(base + _RANK)), recall(i32(base + _PART))
                splits = quotient(i32(rank + part), part)
                output_first, output_stop = part_of(base, 1)
                first_head = quotient(output_first, tiles)
                stop_head = quotient(i32(output_stop + tiles - 1), tiles)
                k = i32(first_head * head_dim + 4 * thread)
                while k < stop_head * head_dim:
                    one = quotient(k, i32(head_dim))
                    line = query_row(one, 0, heads, kv_heads, query_rows)
                    gather_parts(
                        generic_address(partials, i64(line * head_dim + k - one * head_dim)),
                        i64(2 * head_dim * kv_heads * query_rows),
                        generic_address(extremes, i64(line * 2)), i64(8 * kv_heads * query_rows),
                        splits, i32(base + 2 * (k - first_head * head_dim)))  # fmt: skip
                    k = i32(k + 4 * THREADS)
                meet()
                one = first_head
                while one < stop_head:
                    low = max(output_first, i32(one * tiles))
                    high = min(output_stop, i32(one * tiles + tiles))
                    tile = low
                    while tile < high:
                        count = min(i32(high - tile), i32(BATCH))
                        turn = multiply(
                            turn, ring, stages, count * head_steps, 0, head_steps,
                            base + (one - first_head) * head_dim * 2, base, count)
                        add_rows(base, count, tile - one * tiles, ONE, residual)
                        tile = i32(tile + count)
                        meet()
                    one = i32(one + 1)
                finish(counter)
                goal += blocks
                # Gate and expand.
                ask_for_gain(mlp_norm, layer, hidden, base)
                await_all(counter, goal)
                ask_for_residual(residual, hidden, base)
                arrived()
                normalise(base, hidden, eps, share, i32(base + _SMALL))
                thread = who()
                gate_first, gate_stop = part_of(base, 2)
                tile = gate_first
                while tile < gate_stop:
                    count = min(i32(gate_stop - tile), i32(BATCH))
                    turn = multiply(
                        turn, ring, stages, count * depth, 0, depth, base, base, count)
                    if thread < count * 8:
                        i, row = thread >> 3, thread & 7
                        value = swiglu(sum_of(base, i, row), sum_of(base, i, row + 8))
                        inner[tile * 8 + thread] = to_half(value * _INNER)
                    tile = i32(tile + count)
                    meet()
                finish(counter)
                goal += blocks
                # Contract.
                await_all(counter, goal)
                thread = who()
                down_first, down_stop = part_of(base, 3)
                copy(i32(thread * 16), i32(THREADS * 16), i32(2 * again(inner_size)),
                     generic_address(inner, i64(0)), base)  # fmt: skip
                arrived()
                meet()
                if down_stop > down_first:
                    tile = quotient(down_first, wide)
                    count = i32(quotient(i32(down_stop - 1), wide) - tile + 1)
                    turn = multiply(turn, ring, stages, down_stop - down_first,
                                    down_first - tile * wide, wide, base, base,
                                    count)  # fmt: skip
                    add_rows(base, count, tile, _OUTER, residual)
                finish(counter)
                goal += blocks
            # The head.
            ask_for_gain(final_norm, 0, hidden, base)
            await_all(counter, goal)
            ask_for_residual(residual, hidden, base)
            arrived()
            normalise(base, hidden, eps, share, i32(base + _SMALL))
            value, chosen = f32(-np.inf), _NEVER
            thread = who()
            first_row, stop_row = state[FIRST_ROW], state[FIRST_ROW] + state[NUM_ROWS]
            head_first, head_stop = part_of(base, 4)
            tile = head_first
            while tile < head_stop:
                count = min(i32(head_stop - tile), i32(BATCH))
                turn = multiply(turn, ring, stages, count * depth, 0, depth, base, base, count)
                row = i32(tile * 16 + thread)
                if thread < count * 16 and first_row <= row < stop_row:
                    logit = sum_of(base, thread >> 4, thread & 15)
                    logits[row] = logit
                    if logit > value:
                        value, chosen = logit, row
                tile = i32(tile + count)
                meet()
            value, chosen = best_of_warp(value, chosen)
            if thread & 31 == 0:
                floats[_SMALL // 4 + (thread >> 5)] = value
                ints[_SMALL // 4 + WARPS + (thread >> 5)] = chosen
            meet()
            if thread == 0:
                for warp in range(1, WARPS):
                    other_value, other_row = (
                        floats[_SMALL // 4 + warp], ints[_SMALL // 4 + WARPS + warp])
                    if better(value, chosen, other_value, other_row):
                        value, chosen = other_value, other_row
                candidates[block], chosen_rows[block] = value, chosen
            finish(counter)
            goal += blocks
        if block == 0:
            await_all(counter, goal)
            token = choose(candidates, chosen_rows, blocks, state[FIRST_ROW])
            if who() == 0:
                tokens[num_tokens - 1] = token

    fl, ha, it, n, a, f = FLOATS, HALVES, INTS, I32, I64, types.float32
    return [(
        'decode_stream', decode_stream,
        (a, a, a, a, a, fl, a, a, a, fl, ha, ha, ha, ha, ha, fl, fl, fl, it, it, ha, a, ha, fl, fl,
         it, it, it, n, n, n, n, n, a, a, n, n, n, n, n, n, n, f, f, n, n, n, n),
    )]  # fmt: skip
