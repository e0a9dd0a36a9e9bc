"""
A whole greedy decode as one kernel that streams the weights through shared memory.

One block stays on every processor. One of its threads copies the block's share of every matrix,
in the order of use, into a ring of stages, and never waits for a result: while the blocks wait
for each other, the weights behind go on arriving. Eight warps multiply out of the ring.

A layer has five phases: normalise and project to queries, keys and values; attend; put the
attention together and project; normalise, gate and expand; contract. The head is one more. The
residual is a fixed-point number to which blocks add in any order, so that equal input gives equal
bits; its low bits count the steps that were added, so that a reader sees in the number itself
whether it is complete. What attention leaves and the activations of the MLP are likewise read
until every word was written. Only before attention, and behind the head, do blocks count
themselves in and wait for all.

Instructions that run once a layer come from far away, so that code is shared by the phases, and
what is needed rarely lies in shared memory rather than in registers, of which 168 are to be had.
"""

from numba import cuda
from numba.core import types
import numpy as np

from vla_edge_ros.kernels.cuda import ptx, stream_ptx
from vla_edge_ros.kernels.cuda.constants import (
    ARRIVED,
    BARRIER_BYTES,
    BULK_COPY,
    CONTEXT,
    DECODE_ROWS,
    FIRST_ROW,
    FIRST_TOKEN,
    INNER_SCALE,
    MAX_HIDDEN,
    NUM_ROWS,
    SPOILED,
    STEP,
    STREAM_SUMS,
    THREADS,
    WARPS,
)
from vla_edge_ros.kernels.cuda.device import F32, FLOATS, HALVES, I32, I64, INTS, ONE, U16, ZERO
from vla_edge_ros.kernels.cuda.stream_parts import (
    ATTEND,
    ATTENTION_SUMS,
    CHOOSE,
    CONTRACT,
    define_parts,
    DONE,
    EXPAND,
    GOAL,
    LAYER_PHASES,
    NEVER,
    PART,
    PLAN,
    PROJECT,
    RANK,
    RETURN,
    RING,
    SLOT,
    SMALL,
)

_INNER, _OUTER = np.float32(INNER_SCALE), np.float32(1 / INNER_SCALE)


def define_stream(capability: tuple[int, int], head_dim: int, device) -> list[tuple]:
    """Return (name, function, argument types) of the kernel; none before compute capability 9."""
    if capability < BULK_COPY:
        return []
    to_half, to_float, moved = ptx.to_half, ptx.to_float, ptx.moved
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    quotient, remainder = ptx.quotient, ptx.remainder
    _, arrived = ptx.make_copy(capability)
    make_barrier, publish_barriers = stream_ptx.make_barrier, stream_ptx.publish_barriers
    store_long, store_word, to_fixed = (
        stream_ptx.store_long, stream_ptx.store_word, stream_ptx.to_fixed)
    collect, clear = stream_ptx.make_collect(STREAM_SUMS), stream_ptx.clear
    keep, recall = stream_ptx.keep, stream_ptx.recall
    meet, who, which = ptx.meet, ptx.who, stream_ptx.which
    again, again_long = ptx.again, stream_ptx.again_long
    normalise, gather_parts = stream_ptx.make_normalise(MAX_HIDDEN), stream_ptx.make_gather_parts()
    parts = define_parts(capability, head_dim, device)
    part_of, multiply, sum_of = parts.part_of, parts.multiply, parts.sum_of
    await_all, finish, ask_for = parts.await_all, parts.finish, parts.ask_for
    await_projected = parts.await_projected
    add_rows, choose, best_of_block = parts.add_rows, parts.choose, device.best_of_block
    attend_split, stream_weights = parts.attend_split, parts.stream_weights
    forget, bring_next, batch_of = parts.forget, parts.bring_next, parts.batch_of
    embedding_index, rotary = device.embedding_index, device.rotary
    store_qkv, swiglu = device.store_qkv, device.swiglu
    half_dim, head_steps = head_dim // 2, np.int32(head_dim // STEP)
    f32, i32, i64 = np.float32, np.int32, np.int64

    @cuda.jit(device=True)
    def turns_of(phase, layer, unit, units, base, qkv_tiles, bias, cosine, sine):
        """Return the two biases and the angle of a thread's pair of rows."""
        item = who()
        if phase != PROJECT or item >= units * 8:
            return ZERO, ZERO, ZERO, ZERO
        tile, row = unit + (item >> 3), item & 7
        place = (layer * qkv_tiles + tile) * 16 + row
        angle = recall(i32(base + RANK)) * half_dim + rotary(tile, row)
        return bias[place], bias[place + 8], cosine[angle], sine[angle]

    @cuda.jit(device=True)
    def embed(fixed, embedding, token, size, residual, is_first):
        """Fetch a token's embedding as the residual."""
        size = again(size)
        for i in range(2 * who(), size, 2 * THREADS):
            for j in (i, i + 1):
                value = to_fixed(
                    to_float(embedding[embedding_index(token, j, size >> 5)]), i32(0))
                fixed[(size * 3 >> 2) + j] = value
                if is_first:
                    store_long(residual + i64(j) * 8, value)

    def decode_stream(qkv, output, gate_up, down, head, bias, attention_norm, mlp_norm, final_norm,
                      keys, values, rotated, pairs, queries, partials, extremes, cosine, sine,
                      state, order, embedding, residual, inner, logits, candidates, chosen_rows,
                      tokens, shares, layers, hidden, inner_size, heads, kv_heads, layer_slots,
                      layer_ranks, ranks, query_rows, most_splits, depth, wide, tiles, qkv_tiles,
                      gate_tiles, eps, share, num_tokens, stages, ahead):  # fmt: skip
        x = cuda.shared.array(0, U16)
        floats = cuda.shared.array(0, F32)
        ints = cuda.shared.array(0, I32)
        fixed = cuda.shared.array(0, I64)
        base = shared_address(x, i32(0))
        ring = i32(base + RING)
        thread, block, blocks = who(), i32(cuda.blockIdx.x), i32(cuda.gridDim.x)
        if thread < 2 * LAYER_PHASES:
            keep(i32(base + PLAN + 4 * thread),
                 shares[(thread >> 1) * (blocks + 1) + block + (thread & 1)])  # fmt: skip
        elif thread < 2 * LAYER_PHASES + 2:
            first = state[FIRST_ROW] >> 4
            count = ((state[FIRST_ROW] + state[NUM_ROWS] + 15) >> 4) - first
            index = i32(block + (thread & 1))
            keep(i32(base + PLAN + 4 * thread),
                 i32((first + quotient(i32(count * index), blocks)) * depth))  # fmt: skip
        elif thread == 32:
            keep(i32(base + DONE), i32(0))
            keep(i32(base + GOAL), i32(0))
            for stage in range(stages):
                make_barrier(i32(ring - BARRIER_BYTES + stage * 16), i32(1))
                make_barrier(i32(ring - BARRIER_BYTES + stage * 16 + 8), i32(WARPS))
            publish_barriers()
        cuda.syncthreads()
        if thread >= THREADS:
            if thread == THREADS:
                stream_weights(qkv, output, gate_up, down, head, base, layers, depth, wide, tiles,
                               qkv_tiles, gate_tiles, i32(heads * head_steps), num_tokens, stages,
                               ahead)  # fmt: skip
            return

        # Blocks that have projected and, behind it, those that have chosen.
        counter = generic_address(state, i64(ARRIVED))
        spoiled = generic_address(state, i64(SPOILED))
        unwritten = i32(stream_ptx.UNWRITTEN)
        first, last = part_of(base, EXPAND)
        first, last = quotient(first, depth) * 4, quotient(last, depth) * 4
        for i in range(first + thread, last, THREADS):
            store_word(generic_address(inner, i64(2 * i)), unwritten)
            store_word(generic_address(inner, i64(inner_size + 2 * i)), unwritten)
        item = which()
        while item < 2 * kv_heads * most_splits:
            forget(partials, extremes, item, unwritten)
            item = i32(item + blocks)
        turn, odd = i32(0), i32(0)
        while recall(i32(again(base) + DONE)) < num_tokens:
            if who() == 0:
                rank = i32(state[CONTEXT] + recall(i32(again(base) + DONE)))
                keep(i32(base + RANK), rank)
                keep(i32(base + SLOT), order[rank])
                most = i32(16 * most_splits)
                keep(i32(base + PART), i32(quotient(i32(rank + most), most) * 16))
            meet()
            layer, phase = i32(0), i32(PROJECT)
            while layer <= layers:
                value, chosen = f32(-np.inf), NEVER
                if layer == layers:
                    phase = i32(CHOOSE)
                normed = phase == PROJECT or phase == EXPAND or phase == CHOOSE
                if normed:
                    gain = attention_norm
                    if phase == EXPAND:
                        gain = mlp_norm
                    gain += i64(layer) * (4 * again(hidden))
                    if phase == CHOOSE:
                        gain = final_norm
                    ask_for(gain, 4 * again(hidden), base + 2 * again(hidden))
                else:
                    bring_next(phase, layer, layers, which(), base, bias, rotated, pairs,
                               layer_ranks, ranks, kv_heads, most_splits, qkv_tiles,
                               depth)  # fmt: skip
                # What is multiplied first is worked out before the wait.
                at, last = part_of(base, phase)
                span = depth
                if phase == RETURN:
                    span = head_steps
                if phase == CONTRACT:
                    span = wide
                unit, units, one, steps = batch_of(at, last, span, phase, tiles)
                skipped = one
                clear(i32(base + STREAM_SUMS), units)
                bias_low, bias_high, c, s = turns_of(
                    phase, layer, unit, units, base, qkv_tiles, bias, cosine, sine)
                if normed:
                    source = residual
                    count = i32(layer * (again(heads) * head_steps + again(wide)))
                    if phase == EXPAND:
                        count = i32(count + heads * head_steps)
                    if layer == 0 and phase == PROJECT:
                        source = generic_address(fixed, i64(again(hidden) * 3 >> 2))
                        token, done = state[FIRST_TOKEN], recall(i32(again(base) + DONE))
                        # The embedding reaches into the sums that every warp has cleared.
                        await_all(counter + 4, i32(done * blocks))
                        if done > 0:
                            token = choose(
                                candidates, chosen_rows, again(blocks), state[FIRST_ROW], spoiled)
                            if which() == 0 and who() == 0:
                                tokens[done - 1] = token
                        embed(fixed, embedding, token, hidden, residual, which() == 0)
                        meet()
                    arrived()
                    if at < last:
                        normalise(source, count, base, hidden, eps, share, i32(base + SMALL))
                    if layer == 0 and phase == PROJECT:
                        clear(i32(base + STREAM_SUMS), units)  # where the embedding was
                elif phase == ATTEND:
                    await_projected(counter, base, blocks)
                    rank, part = recall(i32(base + RANK)), recall(i32(base + PART))
                    ordered = i64(layer) * again_long(layer_ranks)
                    item, items = which(), i32(again(kv_heads) * most_splits)
                    while item < items:
                        line = i32(item + odd * items)
                        split, kv = remainder(item, most_splits), quotient(item, most_splits)
                        if split * part <= rank:
                            attend_split(
                                split, part, kv, rank + 1, generic_address(queries, i64(0)),
                                generic_address(rotated, ordered),
                                generic_address(pairs, ordered), query_rows, ranks,
                                partials, extremes, line * DECODE_ROWS, base,
                                i32(base + ATTENTION_SUMS))  # fmt: skip
                        items = i32(again(kv_heads) * most_splits)
                        forget(partials, extremes, i32(item + (again(odd) ^ 1) * items),
                               unwritten)  # fmt: skip
                        item = i32(item + blocks)
                        if item < items:
                            meet()
                elif phase == RETURN:
                    rank, part = recall(i32(base + RANK)), recall(i32(base + PART))
                    splits = quotient(i32(rank + part), part)
                    most = quotient(i32(quotient(last, head_steps) + tiles - 1), tiles) * head_dim
                    # A warp takes 32 elements, of one head.
                    item = (who() >> 5) * 32
                    k = i32(skipped * head_dim + item)
                    while k < most:
                        lane = who() & 31
                        element, first = i32(k + 4 * (lane & 7)), lane >> 3
                        mixed = quotient(element, i32(head_dim))
                        group = quotient(heads, kv_heads)
                        kv = quotient(mixed, group)
                        line = ((odd * again(kv_heads) + kv) * most_splits + first) * DECODE_ROWS
                        line += mixed - kv * group
                        gather_parts(
                            generic_address(
                                partials, i64(line) * head_dim + element - mixed * head_dim),
                            i64(8 * head_dim * DECODE_ROWS),
                            generic_address(extremes, i64(line) * 2),
                            i64(32 * DECODE_ROWS), i32(splits - first),
                            i32(base + 2 * item + 8 * (lane & 7)))  # fmt: skip
                        k, item = i32(k + THREADS), item + THREADS
                    meet()
                else:
                    collect(generic_address(inner, i64(odd * again(inner_size))),
                            i32(2 * again(inner_size)), base)  # fmt: skip
                    meet()
                # Up to BATCH tiles at a time.
                while at < last:
                    k = i32(at - unit * span)
                    turn = multiply(
                        turn, ring, stages, steps, k, span,
                        i32(base + (one - skipped) * head_dim * 2), base, units)
                    at = i32(at + steps)
                    item = who()
                    if phase == CHOOSE:
                        row = i32(unit * 16 + item)
                        if item < units * 16 and row < state[FIRST_ROW] + state[NUM_ROWS]:
                            logit = sum_of(base, item >> 4, item & 15)
                            if row >= state[FIRST_ROW]:
                                logits[row] = logit
                                if logit > value:
                                    value, chosen = logit, row
                    elif phase == RETURN:
                        add_rows(base, units, unit - one * tiles, ONE, k, steps, span, residual,
                                 spoiled)
                    elif phase == CONTRACT:
                        add_rows(base, units, unit, _OUTER, k, steps, span, residual,
                                 spoiled)
                    elif item < units * 8:
                        i, row = item >> 3, item & 7
                        low, high = sum_of(base, i, row), sum_of(base, i, row + 8)
                        if phase == EXPAND:
                            half = i32(to_half(swiglu(low, high) * _INNER))
                            # A warp of whole tiles, of eight lanes each, is here together.
                            next_half = cuda.shfl_down_sync(cuda.activemask(), half, 1)
                            if item & 1 == 0:
                                word = unit * 8 + item
                                size = again(inner_size)
                                store_word(generic_address(inner, i64(odd * size + word)),
                                           half | (next_half << 16))  # fmt: skip
                                store_word(
                                    generic_address(inner, i64((odd ^ 1) * size + word)),
                                    unwritten)
                        else:
                            cache, ordered = i64(layer) * layer_slots, i64(layer) * layer_ranks
                            store_qkv(
                                unit + i, row, 0, low + bias_low, high + bias_high,
                                recall(i32(base + RANK)), c, s, recall(i32(base + SLOT)),
                                moved(keys, cache), moved(values, cache), moved(rotated, ordered),
                                moved(pairs, ordered), queries, again(heads), kv_heads, ranks,
                                query_rows)  # fmt: skip
                    if at < last:
                        meet()
                        unit, units, one, steps = batch_of(at, last, span, phase, tiles)
                        clear(i32(base + STREAM_SUMS), units)
                        bias_low, bias_high, c, s = turns_of(
                            phase, layer, unit, units, base, qkv_tiles, bias, cosine, sine)
                if phase == CONTRACT:
                    odd = i32(odd ^ 1)
                if phase == CHOOSE:
                    value, chosen = best_of_block(
                        floats, SMALL // 4, ints, SMALL // 4 + WARPS, value, chosen)
                    if who() == 0:
                        place = which()
                        candidates[place], chosen_rows[place] = value, chosen
                    finish(counter + 4)
                elif phase == PROJECT:
                    finish(counter)
                else:
                    meet()
                phase = i32(phase + 1)
                if phase >= LAYER_PHASES:
                    layer, phase = i32(layer + 1), i32(PROJECT)
            if who() == 0:
                keep(i32(again(base) + DONE), i32(recall(i32(again(base) + DONE)) + 1))
            meet()
        if which() == 0:
            await_all(counter + 4, i32(num_tokens * blocks))
            token = choose(candidates, chosen_rows, again(blocks), state[FIRST_ROW], spoiled)
            if who() == 0:
                tokens[num_tokens - 1] = token

    fl, ha, it, n, a, f = FLOATS, HALVES, INTS, I32, I64, types.float32
    return [(
        'decode_stream', decode_stream,
        (a, a, a, a, a, fl, a, a, a, fl, ha, ha, ha, ha, ha, fl, fl, fl, it, it, ha, a, ha, fl, fl,
         it, it, it, n, n, n, n, n, a, a, n, n, n, n, n, n, n, n, f, f, n, n, n),
    )]  # fmt: skip
