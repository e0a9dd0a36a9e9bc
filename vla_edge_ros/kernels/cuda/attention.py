"""The kernels around the KV cache: bring it into order of rank, and attend to it."""

from numba import cuda
import numpy as np

from vla_edge_ros.kernels.cuda import ptx, tensor
from vla_edge_ros.kernels.cuda.constants import (
    ARRANGE_FROM,
    ARRANGE_RANKS,
    CONTEXT,
    DECODE_ROWS,
    NEW_TOKENS,
    PREFILL_WARPS,
    THREADS,
    WARPS,
)
from vla_edge_ros.kernels.cuda.device import F32, FLOATS, HALVES, HIDDEN, I32, I64, INTS, ZERO


def define_attention(capability: tuple[int, int], head_dim: int, device) -> list[tuple]:
    """Return (name, function, argument types) of every kernel."""
    half_dim = head_dim // 2
    to_half, exp2, shared_address = ptx.to_half, ptx.exp2, ptx.shared_address
    quotient, remainder, ratio = ptx.quotient, ptx.remainder, ptx.ratio
    signal, wait, bring, split_size = device.signal, device.wait, device.bring, device.split_size
    i32, i64 = np.int32, np.int64

    def make_attention(warps, rows):
        attend = tensor.make_attend(head_dim, rows > DECODE_ROWS, capability)
        out_size, sums_size, shares_size = warps * rows * head_dim, warps * 32, warps * 16

        def attention(queries, rotated, pairs, state, step, single, group, query_rows, ranks,
                      partials, extremes):  # fmt: skip
            """Attend with up to sixteen rows to one split of the keys of one head."""
            out = cuda.shared.array(out_size, F32)
            sums = cuda.shared.array(sums_size, F32)
            shares = cuda.shared.array(shares_size, F32)
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
            head = i64(kv) * ranks * head_dim * 2
            if tile == 0:
                # What was there before this token may come while the newest is still made.
                past = (end - begin) * head_dim * 2
                bring(rotated + head + begin * head_dim * 2, past)
                bring(pairs + head + begin * head_dim * 2, past)
            wait()
            signal()
            low = first + min(quotient(i32(tile * 16 + row), group), tokens - 1)
            high = first + min(quotient(i32(tile * 16 + row + 8), group), tokens - 1)
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
            if thread < rows:
                top, total = HIDDEN, ZERO
                for other in range(warps):
                    top = max(top, sums[other * 32 + thread * 2])
                for other in range(warps):
                    part = exp2(sums[other * 32 + thread * 2] - top)
                    total += part * sums[other * 32 + thread * 2 + 1]
                    shares[other * 16 + thread] = part
                extremes[(line + thread) * 2] = top
                extremes[(line + thread) * 2 + 1] = total
                for other in range(warps):
                    if total > ZERO:
                        shares[other * 16 + thread] = ratio(
                            shares[other * 16 + thread], total)
            cuda.syncthreads()
            for element in range(thread, rows * head_dim, 32 * warps):
                row, value = element // head_dim, ZERO
                for other in range(warps):
                    value += shares[other * 16 + row] * out[other * rows * head_dim + element]
                partials[line * head_dim + element] = to_half(value)

        return attention

    def arrange(state, order, keys, values, cosine, sine, rotated, pairs, layers, slots, kv_heads,
                ranks):  # fmt: skip
        """Rotate the cached keys by rank, and bring the values into pairs of ranks."""
        first, stop = state[ARRANGE_FROM], state[CONTEXT]
        chunks = (stop - first + ARRANGE_RANKS - 1) // ARRANGE_RANKS
        for unit in range(cuda.blockIdx.x, layers * kv_heads * chunks, cuda.gridDim.x):
            layer = quotient(i32(unit), i32(kv_heads * chunks))
            rest = i32(unit - layer * kv_heads * chunks)
            kv, chunk = quotient(rest, i32(chunks)), remainder(rest, i32(chunks))
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

    fl, ha, it, n, a = FLOATS, HALVES, INTS, I32, I64
    attention = (a, a, a, it, n, n, n, n, n, ha, fl)
    return [
        ('decode_attention', make_attention(WARPS, DECODE_ROWS), attention),
        ('prefill_attention', make_attention(PREFILL_WARPS, 16), attention),
        ('arrange', arrange, (it, it, fl, ha, fl, fl, ha, ha, n, n, n, n)),
    ]
