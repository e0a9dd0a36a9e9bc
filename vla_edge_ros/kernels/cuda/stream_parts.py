"""Device functions of the stream: fill the ring, wait for other blocks, multiply, attend."""

from types import SimpleNamespace

from numba import cuda
import numpy as np

from vla_edge_ros.kernels.cuda import ptx, stream_ptx
from vla_edge_ros.kernels.cuda.attention import make_attend_split
from vla_edge_ros.kernels.cuda.constants import (
    BARRIER_BYTES,
    BATCH,
    DECODE_ROWS,
    FIXED_RANGE,
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
from vla_edge_ros.kernels.cuda.device import NEVER

PROJECT, ATTEND, RETURN, EXPAND, CONTRACT, CHOOSE = range(6)
"""Phases of a layer, and of the head."""
LAYER_PHASES = 5
ATTENTION_SUMS = STREAM_SCRATCH
SMALL = ATTENTION_SUMS + WARPS * 128
PLAN = SMALL + 64
"""Where this block's part of each phase begins and ends, in steps."""
RANK, SLOT, PART, DONE, GOAL = range(PLAN + 48, PLAN + 68, 4)
"""Of the token decoded now: its rank, its slot, the keys of one split, how many
tokens are done, and how often a block has projected when all have."""
RING = STREAM_SCRATCH + STREAM_EXTRA
LARGEST = np.float32(FIXED_RANGE)


def make_begin_stage():
    """Return ``begin_stage``, which waits for room in a ring."""
    await_parity = stream_ptx.await_parity
    i32 = np.int32

    @cuda.jit(device=True)
    def next_stage(stage, parity, stages):
        stage += 1
        return (i32(0), i32(parity ^ 1)) if stage == stages else (i32(stage), i32(parity))

    @cuda.jit(device=True)
    def begin_stage(at, ring, stages, ahead):
        """
        Wait until the next stage may be filled; return where, its barrier, and the next ``at``.

        ``at``: stage and parity of the next to fill, the same of the one ``ahead`` stages before,
        and how many were filled. At most ``ahead`` stages are under way.
        """
        stage, parity, late, late_parity, done = at
        barrier = i32(ring - BARRIER_BYTES + stage * 16)
        await_parity(i32(barrier + 8), i32(parity ^ 1))
        if done >= ahead:
            await_parity(i32(ring - BARRIER_BYTES + late * 16), late_parity)
            late, late_parity = next_stage(late, late_parity, stages)
        to = i32(ring + stage * STAGE_BYTES)
        stage, parity = next_stage(stage, parity, stages)
        return to, barrier, (stage, parity, late, late_parity, i32(done + 1))

    return begin_stage


def define_parts(capability: tuple[int, int], head_dim: int, device) -> SimpleNamespace:
    """Return the device functions, compiled with the kernel that calls them."""
    load_float = ptx.load_float
    generic_address = ptx.generic_address
    total, quotient = stream_ptx.total, ptx.quotient
    copy, _ = ptx.make_copy(capability)
    issue, bulk_copy, begin_stage = (
        stream_ptx.issue, stream_ptx.bulk_copy, make_begin_stage())
    meet = ptx.meet
    announce, await_count = stream_ptx.announce, stream_ptx.await_count
    load_int, add_long, store_word, to_fixed = (
        stream_ptx.load_int, stream_ptx.add_long, stream_ptx.store_word, stream_ptx.to_fixed)
    recall, keep = stream_ptx.recall, stream_ptx.keep
    again, who = ptx.again, ptx.who
    consume = stream_ptx.make_consume(capability)
    attend_split = make_attend_split(head_dim, capability)
    prefetch, remainder = ptx.prefetch, ptx.remainder
    better, best_of_warp = device.better, device.best_of_warp
    half_dim, head_steps = head_dim // 2, np.int32(head_dim // STEP)
    f32, i32, i64 = np.float32, np.int32, np.int64
    jit = cuda.jit(device=True)

    @jit
    def feed(at, ring, stages, ahead, source, steps, unit, jump):
        """
        Put steps of weights into the ring, and return what ``at`` is behind them.

        The steps lie in units of ``unit``, ``jump`` bytes apart; 0: all in one piece.
        """
        first = i32(0)
        while first < steps:
            count = min(i32(STAGE_STEPS), i32(steps - first))
            to, barrier, at = begin_stage(at, ring, stages, ahead)
            issue(i32(count * TILE_BYTES), barrier)
            if unit == 0:
                bulk_copy(to, source + i64(first) * TILE_BYTES, i32(count * TILE_BYTES), barrier)
            else:
                for _ in range(0, count, unit):
                    bulk_copy(to, source, i32(unit * TILE_BYTES), barrier)
                    to = i32(to + unit * TILE_BYTES)
                    source += jump
            first = i32(first + count)
        return at

    @jit
    def await_all(counter, goal):
        """Wait until blocks were counted in so often."""
        if who() == 0:
            await_count(counter, goal)
        meet()

    @jit
    def await_projected(counter, base, blocks):
        """Wait until all blocks have projected once more than at the last call."""
        if who() == 0:
            goal = i32(recall(i32(base + GOAL)) + blocks)
            keep(i32(base + GOAL), goal)
            await_count(counter, goal)
        meet()

    @jit
    def finish(counter):
        """Count this block in."""
        meet()
        if who() == 0:
            announce(counter)

    @jit
    def ask_for(source, num_bytes, to):
        """Begin to copy bytes to shared memory."""
        copy(i32(who() * 16), i32(THREADS * 16), i32(num_bytes), source, i32(to))

    @jit
    def part_of(base, phase):
        """Return where this block's part of a phase begins and ends, in steps."""
        return recall(i32(base + PLAN + 8 * phase)), recall(i32(base + PLAN + 8 * phase + 4))

    @jit
    def multiply(turn, ring, stages, steps, k, depth, x, base, units):
        """Leave the warps' sums of ``units`` tiles in shared memory; return the ring's state."""
        turn = consume(turn, ring, stages, i32((steps + STAGE_STEPS - 1) >> 4), steps, k, depth,
                       x, i32(base + STREAM_SUMS), units)  # fmt: skip
        meet()
        return turn

    @jit
    def sum_of(base, item, row):
        """Return what all warps left of row ``row`` of tile ``item``."""
        return total(i32(base + STREAM_SUMS + item * (4 * SUMS) + row * 4))

    @jit
    def add_rows(base, units, tile, factor, k, steps, span, residual, spoiled):
        """Add what was multiplied, and of how many steps it is the sum, to the residual."""
        item = who()
        if item < units * 16:
            value = sum_of(base, item >> 4, item & 15) * factor
            if not abs(value) < LARGEST:  # nor is NaN
                store_word(spoiled, i32(1))
            begin = (item >> 4) * span
            count = min(i32(k + steps), i32(begin + span)) - max(k, i32(begin))
            add_long(residual + (i64(tile) * 16 + item) * 8, to_fixed(value, i32(count)))

    @jit
    def choose(candidates, chosen_rows, count, otherwise, spoiled):
        """Return the best of all blocks, if there is one; every warp looks for itself."""
        value, row = f32(-np.inf), NEVER
        i = who() & 31
        while i < count:
            other_value = load_float(generic_address(candidates, i))
            other_row = load_int(generic_address(chosen_rows, i))
            if better(value, row, other_value, other_row):
                value, row = other_value, other_row
            i = i32(i + 32)
        value, row = best_of_warp(value, row)
        return row if value > f32(-np.inf) and load_int(spoiled) == 0 else otherwise

    @jit
    def stream_weights(qkv, output, gate_up, down, head, base, layers, depth, wide, tiles,
                       qkv_tiles, gate_tiles, across, num_tokens, stages, ahead):  # fmt: skip
        """Copy this block's share of all weights, in the order of use; one thread."""
        at = (i32(0), i32(0), i32(0), i32(0), i32(0))
        for _ in range(num_tokens):
            for layer in range(layers + 1):
                for phase in range(LAYER_PHASES):
                    if layer == layers:
                        if phase > 0:
                            break
                        phase = i32(CHOOSE)
                    first, last = part_of(base, phase)
                    while first < last:
                        steps, unit, jump = i32(last - first), i32(0), i64(0)
                        if phase == PROJECT:
                            source = qkv + (i64(layer) * (qkv_tiles * depth) + first) * TILE_BYTES
                        elif phase == RETURN:
                            unit, jump = head_steps, i64(across) * TILE_BYTES
                            tile = quotient(first, head_steps)
                            one = quotient(tile, tiles)
                            steps = i32(min(last, (one + 1) * tiles * head_steps) - first)
                            source = output + ((i64(layer) * tiles + tile - one * tiles) * across
                                               + one * head_steps) * TILE_BYTES  # fmt: skip
                        elif phase == EXPAND:
                            source = gate_up + (
                                i64(layer) * (gate_tiles * depth) + first) * TILE_BYTES
                        elif phase == CONTRACT:
                            source = down + (i64(layer) * (tiles * wide) + first) * TILE_BYTES
                        else:
                            source = head + i64(first) * TILE_BYTES
                        at = feed(at, i32(base + RING), stages, ahead, source, steps,
                                  unit, jump)  # fmt: skip
                        first = i32(first + steps)

    @jit
    def forget(partials, extremes, line, unwritten):
        """Mark what a split of attention leaves as not written yet."""
        for item in range(who(), DECODE_ROWS * half_dim, THREADS):
            store_word(generic_address(partials, i64(line) * DECODE_ROWS * head_dim + 2 * item),
                       unwritten)  # fmt: skip
        item = who()
        if item < DECODE_ROWS * 2:
            store_word(generic_address(extremes, i64(line) * DECODE_ROWS * 2 + item), unwritten)

    @jit
    def bring_next(phase, layer, layers, block, base, bias, rotated, pairs, layer_ranks, ranks,
                   kv_heads, most_splits, qkv_tiles, depth):  # fmt: skip
        """Ask for what the next layer reads besides weights, long before it waits for it."""
        layer += 1
        if phase != CONTRACT or layer == layers:
            return
        first, stride = i32(who() * 128), i32(THREADS * 128)
        rank = recall(i32(base + RANK))
        low, high = part_of(base, PROJECT)
        tile = quotient(low, depth)
        prefetch(first, stride, i32((quotient(high, depth) - tile) * 64),
                 generic_address(bias, i64((layer * qkv_tiles + tile) * 16)))  # fmt: skip
        if block < again(kv_heads) * most_splits:
            split, kv = remainder(block, most_splits), quotient(block, most_splits)
            part = recall(i32(base + PART))
            begin = split * part
            size = (min(begin + part, rank + 1) - begin) * head_dim * 2
            if size > 0:
                place = i64(layer) * layer_ranks + (i64(kv) * ranks + begin) * head_dim
                prefetch(first, stride, i32(size), generic_address(rotated, place))
                prefetch(first, stride, i32(size), generic_address(pairs, place))

    @jit
    def batch_of(at, last, span, phase, tiles):
        """Return the first unit of a batch, how many they are, their head, and their steps."""
        unit = quotient(at, span)
        units = i32(min(quotient(i32(last + span - 1), span), i32(unit + BATCH)) - unit)
        one = i32(0)
        if phase == RETURN:
            one = quotient(unit, tiles)
            units = min(units, i32((one + 1) * tiles - unit))
        return unit, units, one, i32(min(last, i32((unit + units) * span)) - at)

    functions = (
        await_all, await_projected, finish, ask_for, part_of, multiply, sum_of, add_rows,
        choose, attend_split, stream_weights, forget, bring_next, batch_of,
    )  # fmt: skip
    return SimpleNamespace(**{function.__name__: function for function in functions})
