"""
The MLP of a prefill as one kernel that streams both of its matrices through shared memory.

One block stays on every processor. One of its threads copies the block's share of gate and up,
and behind it that of the way back, into a ring of stages, from before the kernel ahead has ended
and on while the blocks wait for each other in between. Eight warps multiply out of the ring; each
holds its part of what it multiplies by, which is that of all tiles, in registers.
"""

from numba import cuda
import numpy as np

from vla_edge_ros.kernels.cuda import prefill_ptx, ptx, stream_ptx
from vla_edge_ros.kernels.cuda.constants import (
    BARRIER_BYTES,
    BULK_COPY,
    JOINED,
    PREFILL_AHEAD,
    PREFILL_SCRATCH,
    STAGE_STEPS,
    THREADS,
    TILE_BYTES,
    TOKENS,
    TOKENS_BYTES,
    WARPS,
)
from vla_edge_ros.kernels.cuda.device import FLOATS, HALVES, I32, I64, INTS, U16
from vla_edge_ros.kernels.cuda.stream_parts import make_begin_stage


def define_prefill_stream(capability: tuple[int, int], device) -> list[tuple]:
    """Return (name, function, argument types) of the kernel; none before compute capability 9."""
    if capability < BULK_COPY:
        return []
    quotient, remainder = ptx.quotient, ptx.remainder
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    meet, who, which = ptx.meet, ptx.who, stream_ptx.which
    make_barrier, publish_barriers = stream_ptx.make_barrier, stream_ptx.publish_barriers
    join, await_count = stream_ptx.join, stream_ptx.await_count
    issue, bulk_copy, begin_stage = (
        stream_ptx.issue, stream_ptx.bulk_copy, make_begin_stage())
    expand, contract = prefill_ptx.make_expand(capability), prefill_ptx.make_contract(capability)
    signal, wait, share = device.signal, device.wait, device.share
    fragment_index = device.fragment_index
    i32, i64 = np.int32, np.int64

    @cuda.jit(device=True)
    def feed(at, ring, stages, ahead, source, steps):
        """Put a tile into the ring, and return the next ``at``."""
        first = i32(0)
        while first < steps:
            size = i32(min(i32(STAGE_STEPS), i32(steps - first)) * TILE_BYTES)
            to, barrier, at = begin_stage(at, ring, stages, ahead)
            issue(size, barrier)
            bulk_copy(to, source + i64(first) * TILE_BYTES, size, barrier)
            first = i32(first + STAGE_STEPS)
        return at

    @cuda.jit(device=True)
    def stream_weights(gate_up, down, ring, gate_tiles, depth, tiles, wide, chunks, stages):
        """Copy this block's share of both matrices; one thread."""
        at, ahead = (i32(0), i32(0), i32(0), i32(0), i32(0)), i32(PREFILL_AHEAD)
        first, stop, _, _ = share(gate_tiles, depth, 1)
        for tile in range(first, stop):
            at = feed(at, ring, stages, ahead, gate_up + i64(tile) * depth * TILE_BYTES, depth)
        first, stop, low, high = share(tiles, wide, chunks)
        for tile in range(first, stop):
            at = feed(at, ring, stages, ahead, down + (i64(tile) * wide + low) * TILE_BYTES,
                      i32(high - low))  # fmt: skip

    def prefill_stream(gate_up, down, x, inner, partials, state, gate_tiles, depth, tiles, wide,
                       chunks, stages):  # fmt: skip
        sums = shared_address(cuda.shared.array(0, U16), i32(0))
        ring = i32(sums + PREFILL_SCRATCH)
        if who() == 0:
            for stage in range(stages):
                make_barrier(i32(ring - BARRIER_BYTES + stage * 16), i32(1))
                make_barrier(i32(ring - BARRIER_BYTES + stage * 16 + 8), i32(WARPS))
            publish_barriers()
        cuda.syncthreads()
        if who() >= THREADS:
            if who() == THREADS:
                stream_weights(gate_up, down, ring, gate_tiles, depth, tiles, wide, chunks, stages)
            return
        wait()
        signal()
        out = generic_address(inner, i64(fragment_index(who() & 31, who() >> 5)))
        first, stop, _, _ = share(gate_tiles, depth, 1)
        turn = expand(i32(0), ring, stages, first, stop, depth, x, sums, out, i64(0))
        # All blocks have to be through before any goes on.
        meet()
        if who() == 0:
            counter, blocks = generic_address(state, i64(JOINED)), i32(cuda.gridDim.x)
            await_count(counter, i32((quotient(join(counter), blocks) + 1) * blocks))
        meet()
        first, stop, low, high = share(tiles, wide, chunks)
        line = remainder(which(), chunks) * TOKENS + (who() >> 4)
        contract(turn, ring, stages, first, stop, i32(high - low),
                 generic_address(inner, i64(low) * (TOKENS_BYTES // 2)), sums,
                 generic_address(partials, i64(line) * tiles * 16 + (who() & 15)),
                 i64(tiles) * (16 * 4 * TOKENS // 2))  # fmt: skip

    fl, ha, it, n, a = FLOATS, HALVES, INTS, I32, I64
    return [('prefill_stream', prefill_stream, (a, a, a, ha, fl, it, n, n, n, n, n, n))]
