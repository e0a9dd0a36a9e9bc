"""The kernels around the KV cache: bring it into order of rank, and attend to it."""

from numba import cuda
import numpy as np

from vla_edge_ros.kernels.cuda import ptx
from vla_edge_ros.kernels.cuda.attend import (
    make_attend,
    make_attend_rows,
    make_combine,
    ROW_STAGES,
    ROW_WARPS,
    stage_bytes,
)
from vla_edge_ros.kernels.cuda.constants import (
    ARRANGE_FROM,
    ARRANGE_RANKS,
    CONTEXT,
    DECODE_ROWS,
    NEW_TOKENS,
    PREFILL_SPLIT_WARPS,
    THREADS,
    WARPS,
)
from vla_edge_ros.kernels.cuda.device import F32, FLOATS, HALVES, I32, I64, INTS, U16


def make_attend_split(head_dim: int, capability: tuple[int, int]):
    """Return ``attend_split``, a device function that all threads of a block call together."""
    attend, combine = make_attend(head_dim, capability), make_combine(head_dim)
    generic_address, quotient = ptx.generic_address, ptx.quotient
    meet, who = ptx.meet, ptx.who
    i32, i64 = np.int32, np.int64

    @cuda.jit(device=True)
    def attend_split(split, part, kv, seen, queries, rotated, pairs, query_rows, ranks, partials,
                     extremes, line, out, sums):  # fmt: skip
        """
        Attend with one token's queries of a KV head to one split of its keys.

        ``out`` and ``sums`` are addresses in shared memory of float32 [WARPS, DECODE_ROWS,
        head_dim] and [WARPS, 32]; ``line`` is the first of the rows to write.
        """
        thread = who()
        warp, row, quad = thread >> 5, (thread & 31) >> 2, thread & 3
        begin, end = split * part, min(split * part + part, seen)
        head = i64(kv) * ranks * head_dim * 2
        attend(
            queries + ((kv * query_rows + row) * head_dim * 2 + quad * 16),
            rotated + (head + row * head_dim * 2 + quad * 16),
            pairs + (head + quad * head_dim * 4 + row * 16),
            i32(begin + warp * 16), i32(end), i32(WARPS * 16), i32(seen - 1),
            i32(out + ((warp * DECODE_ROWS + row) * head_dim + quad * 8) * 4),
            i32(sums + (warp * 32 + row * 2) * 4),
        )  # fmt: skip
        meet()
        element = i32(4 * who())
        if element < DECODE_ROWS * head_dim:
            row = quotient(element, i32(head_dim))
            at_extremes = i64(0)
            if element == row * head_dim:
                at_extremes = generic_address(extremes, i64(line + row) * 2)
            combine(i32(out + element * 4), i32(sums + row * 8),
                    generic_address(partials, i64(line) * head_dim + element),
                    at_extremes)  # fmt: skip

    return attend_split


def define_attention(capability: tuple[int, int], head_dim: int, device) -> list[tuple]:
    """Return (name, function, argument types) of every kernel."""
    half_dim, quads = head_dim // 2, head_dim // 8
    turn = ptx.make_turn(head_dim)
    shared_address, generic_address = ptx.shared_address, ptx.generic_address
    quotient, remainder = ptx.quotient, ptx.remainder
    attend_split = make_attend_split(head_dim, capability)
    attend_rows = make_attend_rows(head_dim, capability)
    signal, wait, bring, split_size = device.signal, device.wait, device.bring, device.split_size
    i32, i64 = np.int32, np.int64

    out_size, sums_size = WARPS * DECODE_ROWS * head_dim, WARPS * 32
    stages_size = ROW_STAGES * stage_bytes(head_dim) // 2

    def decode_attention(queries, rotated, pairs, state, step, query_rows, ranks, partials,
                         extremes):  # fmt: skip
        """Attend with one token's queries of a KV head to one split of its keys."""
        out = cuda.shared.array(out_size, F32)
        sums = cuda.shared.array(sums_size, F32)
        kv, split = cuda.blockIdx.x, cuda.blockIdx.y
        seen = state[CONTEXT] + step + 1
        size = split_size(seen, WARPS)
        begin, end = split * size, min(split * size + size, seen)
        if begin >= seen:
            return
        head = i64(kv) * ranks * head_dim * 2
        # What was there before this token may come while the newest is still made.
        bring(rotated + head + begin * head_dim * 2, (end - begin) * head_dim * 2)
        bring(pairs + head + begin * head_dim * 2, (end - begin) * head_dim * 2)
        wait()
        signal()
        attend_split(
            i32(split), i32(size), i32(kv), i32(seen), queries, rotated, pairs, query_rows, ranks,
            partials, extremes, i32((split * cuda.gridDim.x + kv) * query_rows),
            shared_address(out, i32(0)), shared_address(sums, i32(0)))

    def prefill_attention(queries, rotated, pairs, state, step, single, group, query_rows, ranks,
                          partials, extremes):  # fmt: skip
        """Attend with 64 rows of queries to one split of the keys of one head."""
        stages = cuda.shared.array(stages_size, U16)
        kv, tile, split = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        thread = cuda.threadIdx.x
        warp, row, quad = thread >> 5, (thread & 31) >> 2, thread & 3
        first = state[CONTEXT] + step
        tokens = 1 if single else state[NEW_TOKENS]
        seen = first + tokens
        size = split_size(seen, PREFILL_SPLIT_WARPS)
        begin, end = split * size, min(split * size + size, seen)
        if begin >= seen or tile * ROW_WARPS * 16 >= tokens * group:
            return
        head = i64(kv) * ranks * head_dim * 2
        if tile == 0:
            # What was there before this token may come while the newest is still made.
            bring(rotated + head + begin * head_dim * 2, (end - begin) * head_dim * 2)
            bring(pairs + head + begin * head_dim * 2, (end - begin) * head_dim * 2)
        wait()
        signal()
        place = (tile * ROW_WARPS + warp) * 16 + row
        line = (split * cuda.gridDim.x + kv) * query_rows + place
        attend_rows(
            queries + ((kv * query_rows + place) * head_dim * 2 + quad * 16),
            rotated + (head + row * head_dim * 2 + quad * 16),
            pairs + (head + quad * head_dim * 4 + row * 16),
            i32(begin), i32(end),
            i32(first + min(quotient(i32(place), group), tokens - 1)),
            i32(first + min(quotient(i32(place + 8), group), tokens - 1)),
            shared_address(stages, i32(0)),
            generic_address(partials, i64(line) * head_dim + quad * 8),
            generic_address(extremes, i64(line) * 2),
        )  # fmt: skip

    def arrange(state, order, keys, values, cosine, sine, rotated, pairs, layers, slots, kv_heads,
                ranks):  # fmt: skip
        """Rotate the cached keys by rank, and bring the values into pairs of ranks."""
        first, stop = state[ARRANGE_FROM] & ~1, state[CONTEXT]
        chunks = (stop - first + ARRANGE_RANKS - 1) >> 5
        for unit in range(cuda.blockIdx.x, layers * kv_heads * chunks, cuda.gridDim.x):
            layer = quotient(i32(unit), i32(kv_heads * chunks))
            rest = i32(unit - layer * kv_heads * chunks)
            kv, chunk = quotient(rest, i32(chunks)), remainder(rest, i32(chunks))
            for item in range(cuda.threadIdx.x, ARRANGE_RANKS // 2 * quads, THREADS):
                rank = first + chunk * ARRANGE_RANKS + item // quads * 2
                d = item % quads * 4
                if rank < stop:
                    both = i32(1 if rank + 1 < stop else 0)
                    rows = i64(layer) * slots
                    here = ((rows + order[rank]) * kv_heads + kv) * head_dim + d
                    there = ((rows + order[rank + both]) * kv_heads + kv) * head_dim + d
                    place = (i64(layer * kv_heads + kv) * ranks + rank) * head_dim
                    turn(
                        generic_address(keys, here), generic_address(keys, there),
                        generic_address(values, here), generic_address(values, there),
                        generic_address(cosine, i64(rank * half_dim + d)),
                        generic_address(sine, i64(rank * half_dim + d)),
                        generic_address(rotated, place + d),
                        generic_address(pairs, place + 2 * d), both)

    fl, ha, it, n, a = FLOATS, HALVES, INTS, I32, I64
    return [
        ('decode_attention', decode_attention, (a, a, a, it, n, n, n, ha, fl)),
        ('prefill_attention', prefill_attention, (a, a, a, it, n, n, n, n, n, ha, fl)),
        ('arrange', arrange, (it, it, fl, ha, fl, fl, ha, ha, n, n, n, n)),
    ]
