"""
Attention to the keys of one head, as blocks of PTX.

Scores are base-2 logarithms, the scale being part of the queries; a running maximum keeps the
exponentials in range. Products are those of ``tensor.py``, with keys, and pairs of values, in the
order in which a lane's 16 bytes feed two instructions.
"""

from collections.abc import Iterator, Sequence

from numba.core import types

from vla_edge_ros.kernels.cuda.constants import DECODE_ROWS, TENSOR_16, WARPS
from vla_edge_ros.kernels.cuda.ptx import assembly, block_of
from vla_edge_ros.kernels.cuda.tensor import mma, pack

ROW_WARPS = 4
"""Warps of a block of :func:`make_attend_rows`, of sixteen rows each."""
ROW_STAGES = 3
"""Steps of sixteen keys that such a block has in shared memory."""
_LANES = 512
"""Bytes of one 128-bit load of a warp."""


def stage_bytes(head_dim: int) -> int:
    """Return the bytes of sixteen keys and values of one head."""
    return 64 * head_dim


class _Warp:
    """The lines that both kinds of attention share: ``halves`` times eight rows of one warp."""

    def __init__(self, head_dim: int, capability: tuple[int, int], halves: Sequence[int],
                 limits: Sequence[str]):  # fmt: skip
        self.blocks = head_dim // 32
        self.row_bytes = 2 * head_dim
        self._capability = capability
        self._halves, self._limits = halves, limits
        self._outputs = [
            f'o{n}_{i}' for n in range(4 * self.blocks) for i in range(2 * len(halves))]

    def declare(self) -> Iterator[str]:
        """Yield registers, and the state before the first key."""
        yield '.reg .pred p;'
        yield '.reg .s32 i, c, d;'
        yield f'.reg .b32 t, none, k<8>, v<8>, q<{8 * self.blocks}>, f<4>;'
        yield f'.reg .f32 s<8>, {", ".join(self._outputs)}, m0, m1, l0, l1, x0, x1, y, u, zero;'
        yield 'mov.u32 t, %laneid;'
        yield 'and.b32 t, t, 3;'
        yield 'mov.b32 none, 0;'
        yield 'mov.f32 zero, 0f00000000;'
        for half in self._halves:
            yield f'mov.f32 m{half}, 0fF149F2CA;'
            yield f'mov.f32 l{half}, zero;'
        for name in self._outputs:
            yield f'mov.f32 {name}, zero;'

    def load_queries(self) -> Iterator[str]:
        """Yield the loads of the rows of queries at $0."""
        for block in range(self.blocks):
            for half in self._halves:
                names = ', '.join(f'q{8 * block + 4 * half + i}' for i in range(4))
                offset = 64 * block + half * 8 * self.row_bytes
                yield f'ld.global.cg.v4.b32 {{{names}}}, [$0+{offset}];'

    def clear_scores(self) -> Iterator[str]:
        """Yield what scores begin with."""
        yield from (f'mov.f32 s{n}, zero;' for n in range(8))

    def score(self, block: int, keys: Sequence[str]) -> Iterator[str]:
        """Yield the products of 32 elements of the rows and of sixteen keys."""
        q = [f'q{8 * block + n}' for n in range(8)]
        for tile in (0, 1):
            b = keys[4 * tile : 4 * tile + 4]
            names = [f's{4 * tile + n}' for n in range(4)]
            yield from self._multiply(names, (q[0], q[4], q[1], q[5]), b[:2])
            yield from self._multiply(names, (q[2], q[6], q[3], q[7]), b[2:])

    def weigh(self) -> Iterator[str]:
        """Yield from scores of keys ``i`` to ``i + 15`` their weights, and rescale what was."""
        yield 'shl.b32 c, t, 1;'
        yield 'add.s32 c, c, i;'
        for tile in (0, 1):
            for column in (0, 1):
                yield f'add.s32 d, c, {8 * tile + column};'
                for half in self._halves:
                    name = f's{4 * tile + 2 * half + column}'
                    yield f'setp.gt.s32 p, d, {self._limits[half]};'
                    yield f'@p mov.f32 {name}, 0fFF800000;'
        for half in self._halves:
            scores = [f's{4 * tile + 2 * half + column}' for tile in (0, 1) for column in (0, 1)]
            yield f'mov.f32 x{half}, m{half};'
            yield from (f'max.f32 x{half}, x{half}, {name};' for name in scores)
            for distance in (1, 2):
                yield f'shfl.sync.bfly.b32 y, x{half}, {distance}, 31, 0xffffffff;'
                yield f'max.f32 x{half}, x{half}, y;'
            yield f'sub.f32 y, m{half}, x{half};'
            yield f'mov.f32 m{half}, x{half};'
            yield 'ex2.approx.ftz.f32 y, y;'
            yield f'mul.f32 l{half}, l{half}, y;'
            for n in range(4 * self.blocks):
                yield from (f'mul.f32 o{n}_{i}, o{n}_{i}, y;' for i in (2 * half, 2 * half + 1))
            for name in scores:
                yield f'sub.f32 {name}, {name}, m{half};'
                yield f'ex2.approx.ftz.f32 {name}, {name};'
                yield f'add.f32 l{half}, l{half}, {name};'
        for tile in (0, 1):
            for half in self._halves:
                low = 4 * tile + 2 * half
                yield from pack(f'f{2 * tile + half}', f's{low}', f's{low + 1}', self._capability)

    def add_values(self, block: int, values: Sequence[str]) -> Iterator[str]:
        """Yield the products of the weights and 32 elements of sixteen values."""
        for n in range(4):
            names = [f'o{4 * block + n}_{i}' for i in range(2 * len(self._halves))]
            weights = [f'f{n}' for n in range(4)]
            yield from self._multiply(names, weights, (values[n], values[4 + n]))

    def finish_sums(self) -> Iterator[str]:
        """Yield the sums of the weights over the four lanes of a row."""
        for half in self._halves:
            for distance in (1, 2):
                yield f'shfl.sync.bfly.b32 y, l{half}, {distance}, 31, 0xffffffff;'
                yield f'add.f32 l{half}, l{half}, y;'

    def copy(self, to: str, source: str) -> Iterator[str]:
        """Yield the copy of 16 bytes to shared memory, under predicate p."""
        if self._capability >= TENSOR_16:
            yield f'@p cp.async.cg.shared.global [{to}], [{source}], 16;'
            return
        yield f'@p ld.global.cg.v4.b32 {{v0, v1, v2, v3}}, [{source}];'
        yield f'@p st.shared.v4.b32 [{to}], {{v0, v1, v2, v3}};'

    def asynchronous(self, line: str) -> Iterator[str]:
        """Yield a line about copies under way, where there are any."""
        if self._capability >= TENSOR_16:
            yield line

    def _multiply(self, names: Sequence[str], a: Sequence[str], b: Sequence[str]):
        """Yield ``names += a @ b``; of eight rows, those behind are left out."""
        if len(self._halves) == 2:
            for line in mma('#', a, b, self._capability):
                for i, name in enumerate(names):
                    line = line.replace(f'#{i}', name)
                yield line
            return
        # The instruction has to put the rows that nobody asked for somewhere.
        for line in mma('#', (a[0], 'none', a[2], 'none'), b, self._capability):
            out, _, rest = line.partition('}')
            out = out.replace('#0', names[0]).replace('#1', names[1])
            out = out.replace('#2', 'y').replace('#3', 'u')
            rest = rest.replace('#0', names[0]).replace('#1', names[1])
            yield out + '}' + rest.replace('#2', 'zero').replace('#3', 'zero')


def _registers(name: str, first: int) -> str:
    return '{' + ', '.join(f'{name}{first + n}' for n in range(4)) + '}'


def make_attend(head_dim: int, capability: tuple[int, int]):
    """
    Return ``attend(q, k, v, start, stop, stride, limit, out, sums)``: one warp, its own keys.

    Eight rows of queries against every ``stride``-th sixteen keys. Stores, unscaled, float32
    [8, head_dim] to ``out``, where the values wait before, and (maximum, sum) of every row to
    ``sums`` float32 [8, 2].

    Parameters
    ----------
    head_dim : int
        A multiple of 32.
    capability : (int, int)
        Compute capability compiled for.

    Returns
    -------
    intrinsic
        ``q`` int64: this lane's part of row ``lane // 4`` [head_dim] float16; ``k`` int64: the
        same of key ``lane // 4``; ``v`` int64: this lane's part of the pairs [keys / 2,
        head_dim, 2]; ``start, stop, stride`` int32: keys, multiples of 16; ``limit`` int32: the
        last key that is seen; ``out, sums`` int32: this lane's first addresses in shared memory.

    """
    warp = _Warp(head_dim, capability, (0,), ('$6',))
    blocks, row_bytes = warp.blocks, warp.row_bytes
    lines = [
        *warp.declare(), '.reg .b64 kk, vv;', '.reg .s32 mine;', *warp.load_queries(),
        f'.reg .b32 w<{8 * blocks}>;',
        # From where the warp's first lane stores its output; every lane has its own 16 bytes.
        'mov.u32 c, %laneid;', 'shl.b32 mine, c, 4;', 'add.s32 mine, mine, $7;',
        'shr.u32 c, c, 2;', f'mul.lo.s32 c, c, {4 * head_dim};', 'sub.s32 mine, mine, c;',
        'shl.b32 c, t, 5;', 'sub.s32 mine, mine, c;',
        'mov.s32 i, $3;', 'NEXT:', 'setp.ge.s32 p, i, $4;', '@p bra DONE;',
        f'mul.wide.s32 kk, i, {row_bytes};', 'add.s64 vv, kk, $2;', 'add.s64 kk, kk, $1;',
        *warp.clear_scores(), 'setp.eq.s32 p, i, i;',
    ]  # fmt: skip
    for block in range(blocks):
        for tile in (0, 1):
            offset = 64 * block + tile * 8 * row_bytes
            names = _registers('w', 8 * block + 4 * tile)
            lines += [f'ld.global.cg.v4.b32 {names}, [kk+{offset}];']
    for block in range(blocks):
        for pair in (0, 1):
            offset = 128 * block + pair * 8 * row_bytes
            lines += warp.copy(f'mine+{_LANES * (2 * block + pair)}', f'vv+{offset}')
    for block in range(blocks):
        lines += warp.score(block, [f'w{8 * block + n}' for n in range(8)])
    lines += [*warp.weigh(), *warp.asynchronous('cp.async.wait_all;')]
    for block in range(blocks):
        for pair in (0, 1):
            names = _registers('v', 4 * pair)
            lines += [f'ld.shared.v4.b32 {names}, [mine+{_LANES * (2 * block + pair)}];']
        lines += warp.add_values(block, [f'v{n}' for n in range(8)])
    lines += ['add.s32 i, i, $5;', 'bra NEXT;', 'DONE:', *warp.finish_sums(),
              'setp.eq.s32 p, t, 0;', 'bar.warp.sync 0xffffffff;']  # fmt: skip
    for block in range(blocks):
        for column in (0, 1):
            names = ', '.join(f'o{4 * block + n}_{column}' for n in range(4))
            lines += [f'st.shared.v4.f32 [$7+{128 * block + 16 * column}], {{{names}}};']
    lines += ['@p st.shared.v2.f32 [$8], {m0, l0};']
    return assembly(block_of(lines), (types.int64,) * 3 + (types.int32,) * 6)


def make_combine(head_dim: int):
    """
    Return ``combine(out, sums, parts, extremes)``: one split's attention from all warps.

    For four neighbours of one row: ``out`` int32: address of their float32 that the first warp
    left, those of the next lie DECODE_ROWS * head_dim numbers behind; ``sums`` int32: address of
    the row's (maximum, sum) of the first warp, those of the next lie 32 numbers behind;
    ``parts`` int64: where the four float16 go; ``extremes`` int64: where (maximum, sum) goes, or
    0: not from here.
    """
    jump = 4 * DECODE_ROWS * head_dim
    lines = [
        '.reg .pred p;', f'.reg .f32 m<{WARPS}>, l<{WARPS}>, top, all, s<4>, v<4>, w;',
        '.reg .b16 h<4>;', '.reg .b32 low, high;', 'mov.f32 top, 0fF149F2CA;',
        'mov.f32 all, 0f00000000;', *(f'mov.f32 s{i}, 0f00000000;' for i in range(4)),
    ]  # fmt: skip
    for warp in range(WARPS):
        lines += [f'ld.shared.v2.f32 {{m{warp}, l{warp}}}, [$1+{128 * warp}];']
    lines += [f'max.f32 top, top, m{warp};' for warp in range(WARPS)]
    for warp in range(WARPS):
        lines += [
            f'sub.f32 w, m{warp}, top;', 'ex2.approx.ftz.f32 w, w;',
            f'fma.rn.f32 all, w, l{warp}, all;',
            f'ld.shared.v4.f32 {{v0, v1, v2, v3}}, [$0+{jump * warp}];',
            *(f'fma.rn.f32 s{i}, w, v{i}, s{i};' for i in range(4)),
        ]  # fmt: skip
    lines += [
        'rcp.approx.f32 w, all;', 'setp.gt.f32 p, all, 0f00000000;', '@!p mov.f32 w, 0f00000000;',
        *(f'mul.f32 s{i}, s{i}, w;' for i in range(4)),
        *(f'cvt.rn.f16.f32 h{i}, s{i};' for i in range(4)),
        'mov.b32 low, {h0, h1};', 'mov.b32 high, {h2, h3};',
        'st.relaxed.gpu.global.v2.b32 [$2], {low, high};', 'setp.ne.s64 p, $3, 0;',
        '@p st.relaxed.gpu.global.v2.f32 [$3], {top, all};',
    ]  # fmt: skip
    return assembly(block_of(lines), (types.int32, types.int32, types.int64, types.int64))


def make_attend_rows(head_dim: int, capability: tuple[int, int]):
    """
    Return ``attend(q, k, v, start, stop, low, high, stages, parts, extremes)``: a block's keys.

    All ROW_WARPS warps of a block together, each with its own sixteen rows of queries, against
    the same keys, which go through shared memory, ROW_STAGES steps of sixteen under way.

    Parameters
    ----------
    head_dim : int
        A multiple of 32.
    capability : (int, int)
        Compute capability compiled for.

    Returns
    -------
    intrinsic
        ``q, k, v`` int64 as :func:`make_attend` takes them; ``start, stop`` int32: keys, multiples
        of 16; ``low, high`` int32: the last key that rows ``lane // 4`` and ``lane // 4 + 8``
        see; ``stages`` int32: address of ROW_STAGES * :func:`stage_bytes` of shared memory;
        ``parts`` int64: where this lane's first eight float16 of row ``lane // 4`` go, divided by
        the row's sum; ``extremes`` int64: where (maximum, sum) float32 of that row goes.

    """
    warp = _Warp(head_dim, capability, (0, 1), ('$5', '$6'))
    blocks, row_bytes, size = warp.blocks, warp.row_bytes, stage_bytes(head_dim)

    def bring():
        """Yield the copies of sixteen keys from ``next``: two warps keys, two warps values."""
        yield 'setp.lt.s32 p, next, $4;'
        yield f'mul.wide.s32 a, next, {row_bytes};'
        yield 'add.s64 a, a, from;'
        yield 'add.s32 c, to, put;'
        for block in range(blocks):
            yield from warp.copy(f'c+{_LANES * block}', 'a')
            yield 'add.s64 a, a, jump;'
        yield from warp.asynchronous('cp.async.commit_group;')
        yield 'add.s32 next, next, 16;'
        yield f'add.s32 put, put, {size};'
        yield f'setp.eq.s32 p, put, {ROW_STAGES * size};'
        yield '@p mov.s32 put, 0;'

    lines = [
        *warp.declare(), '.reg .pred values;', '.reg .s32 next, to, put, get, lane;',
        '.reg .b64 a, from, jump;', *warp.load_queries(),
        'mov.u32 c, %tid.x;', 'shr.u32 c, c, 5;', 'mov.u32 lane, %laneid;',
        f'mul.lo.s32 to, c, {_LANES * blocks};', 'add.s32 to, to, $7;',
        'mad.lo.s32 to, lane, 16, to;',
        # Which half of the sixteen, of keys or of values.
        'setp.ge.s32 values, c, 2;', 'mov.b64 from, $1;', '@values mov.b64 from, $2;',
        'mov.b64 jump, 64;', '@values mov.b64 jump, 128;', 'and.b32 c, c, 1;',
        f'mul.wide.s32 a, c, {8 * row_bytes};', 'add.s64 from, from, a;',
        'mov.s32 put, 0;', 'mov.s32 get, $7;', 'mad.lo.s32 get, lane, 16, get;',
        'mov.s32 lane, 0;', 'mov.s32 i, $3;', 'mov.s32 next, i;',
    ]  # fmt: skip
    for _ in range(ROW_STAGES - 1):
        lines += bring()
    lines += [
        'NEXT:', 'setp.ge.s32 p, i, $4;', '@p bra DONE;',
        *warp.asynchronous(f'cp.async.wait_group {ROW_STAGES - 2};'), 'bar.sync 0;', *bring(),
        *warp.clear_scores(),
    ]  # fmt: skip
    for block in range(blocks):
        for tile in (0, 1):
            names = _registers('k', 4 * tile)
            lines += [f'ld.shared.v4.b32 {names}, [get+{_LANES * (tile * blocks + block)}];']
        lines += warp.score(block, [f'k{n}' for n in range(8)])
    lines += warp.weigh()
    for block in range(blocks):
        for pair in (0, 1):
            names = _registers('v', 4 * pair)
            place = _LANES * ((2 + pair) * blocks + block)
            lines += [f'ld.shared.v4.b32 {names}, [get+{place}];']
        lines += warp.add_values(block, [f'v{n}' for n in range(8)])
    lines += [
        'add.s32 i, i, 16;', f'add.s32 get, get, {size};', f'add.s32 lane, lane, {size};',
        f'setp.eq.s32 p, lane, {ROW_STAGES * size};',
        f'@p sub.s32 get, get, {ROW_STAGES * size};', '@p mov.s32 lane, 0;', 'bra NEXT;', 'DONE:',
        *warp.asynchronous('cp.async.wait_all;'), *warp.finish_sums(),
    ]  # fmt: skip
    for half in (0, 1):
        lines += [f'setp.gt.f32 p, l{half}, zero;', f'rcp.approx.f32 y, l{half};',
                  '@!p mov.f32 y, zero;']  # fmt: skip
        for block in range(blocks):
            names = [f'o{4 * block + n}_{i}' for i in (2 * half, 2 * half + 1) for n in range(4)]
            lines += [f'mul.f32 {name}, {name}, y;' for name in names]
            for word in range(4):
                lines += pack(f'f{word}', names[2 * word], names[2 * word + 1], capability)
            offset = half * 8 * row_bytes + 64 * block
            lines += [f'st.global.v4.b32 [$8+{offset}], {{f0, f1, f2, f3}};']
        lines += ['setp.eq.s32 p, t, 0;',
                  f'@p st.global.v2.f32 [$9+{64 * half}], {{m{half}, l{half}}};']  # fmt: skip
    kinds = (types.int64,) * 3 + (types.int32,) * 5 + (types.int64,) * 2
    return assembly(block_of(lines), kinds)
