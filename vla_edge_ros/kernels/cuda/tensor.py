"""
Products on the tensor cores, and the attention of one warp, as blocks of PTX.

A product is ``mma.sync`` with float16 operands and float32 sums. Which element of a row is
called which ``k`` by the instruction is free as long as both operands agree: lane ``t`` of a
quad holds eight neighbours, so that one 128-bit load feeds two instructions. Matrices lie in
*fragment order* (``layout.py``), in which such a load of a warp is contiguous.
"""

from collections.abc import Iterator, Sequence

from numba.core import types

from vla_edge_ros.kernels.cuda.constants import (
    FRAGMENT_BYTES,
    STEP,
    SUM_PADDING,
    SUMS,
    TENSOR_16,
    TILE_BYTES,
)
from vla_edge_ros.kernels.cuda.ptx import assembly, block_of


def _mma(total: str, a: Sequence[str], b: Sequence[str], capability) -> Iterator[str]:
    """Yield ``total += a @ b`` for 16 x 16 by 16 x 8; ``total`` names four float registers."""
    sums = '{' + ', '.join(f'{total}{i}' for i in range(4)) + '}'
    if capability >= TENSOR_16:
        yield (f'mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {sums}, '
               f'{{{", ".join(a)}}}, {{{", ".join(b)}}}, {sums};')
        return
    for half in (0, 1):
        yield (f'mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {sums}, '
               f'{{{a[2 * half]}, {a[2 * half + 1]}}}, {{{b[half]}}}, {sums};')


def _load_step(names: Sequence[str], offset: int) -> Iterator[str]:
    """Yield the loads, under predicate p, of one step of sixteen rows into eight registers."""
    for half in (0, 1):
        part = ', '.join(names[4 * half : 4 * half + 4])
        yield (f'@p ld.global.nc.L1::no_allocate.v4.b32 {{{part}}}, '
               f'[w+{offset + half * FRAGMENT_BYTES}];')


def make_product(depth: int, capability: tuple[int, int]):
    """
    Return ``product(weights, x, steps, out, tiles, jump)``: one warp's share, for one column.

    The warp goes through several tiles without a pause, ``depth`` steps of weights under way.

    Parameters
    ----------
    depth : int
        Steps loaded ahead.
    capability : (int, int)
        Compute capability compiled for.

    Returns
    -------
    intrinsic
        ``weights`` int64: address of this lane's first 16 bytes; ``x`` int32: address, in shared
        memory, of this lane's first eight float16; ``steps`` int32 >= 1 in each of ``tiles``
        int32; ``out`` int32: address, in shared memory, of float32 [tiles, SUMS] at row
        ``lane // 4``; ``jump`` int64: bytes from the end of this warp's share of a tile to that
        of the next. Every fourth lane stores two rows.

    """
    lines = [
        '.reg .pred p, first;', '.reg .s32 n, m, here, there, out;', '.reg .b64 w;',
        f'.reg .b32 x, lane, a<{8 * depth}>, b<4>;', '.reg .f32 c<4>, d<4>;',
        'mov.b64 w, $0;', 'mov.b32 x, $1;', 'mov.s32 here, $2;', 'mov.s32 there, $2;',
        'mov.s32 out, $3;', 'mul.lo.s32 n, $2, $4;', 'mov.s32 m, n;',
        'mov.u32 lane, %laneid;', 'and.b32 lane, lane, 3;', 'setp.eq.s32 first, lane, 0;',
        *(f'mov.f32 {name}{i}, 0f00000000;' for name in 'cd' for i in range(4)),
    ]  # fmt: skip

    def load(slot):
        names = [f'a{8 * slot + i}' for i in range(8)]
        yield 'setp.gt.s32 p, m, 0;'
        yield from _load_step(names, 0)
        yield f'add.s64 w, w, {TILE_BYTES};'
        yield 'sub.s32 m, m, 1;'
        yield 'sub.s32 there, there, 1;'
        yield 'setp.eq.s32 p, there, 0;'
        yield '@p add.s64 w, w, $5;'
        yield '@p mov.s32 there, $2;'

    for slot in range(depth):
        lines += load(slot)
    lines += ['NEXT:']
    for slot in range(depth):
        a = [f'a{8 * slot + i}' for i in range(8)]
        lines += [
            'ld.shared.v4.b32 {b0, b1, b2, b3}, [x];', f'add.s32 x, x, {2 * STEP};',
            *_mma('c', (a[0], a[4], a[1], a[5]), ('b0', 'b1'), capability),
            *_mma('d', (a[2], a[6], a[3], a[7]), ('b2', 'b3'), capability),
            *load(slot),
            'sub.s32 here, here, 1;', 'setp.ne.s32 p, here, 0;', f'@p bra GO{slot};',
            'add.f32 c0, c0, d0;', 'add.f32 c2, c2, d2;',
            '@first st.shared.f32 [out], c0;', '@first st.shared.f32 [out+32], c2;',
            f'add.s32 out, out, {4 * SUMS};', 'mov.b32 x, $1;', 'mov.s32 here, $2;',
            *(f'mov.f32 {name}{i}, 0f00000000;' for name in 'cd' for i in range(4)),
            f'GO{slot}:', 'sub.s32 n, n, 1;', 'setp.eq.s32 p, n, 0;', '@p bra DONE;',
        ]  # fmt: skip
    lines += ['bra NEXT;', 'DONE:']
    kinds = (types.int64, types.int32, types.int32, types.int32, types.int32, types.int64)
    return assembly(block_of(lines), kinds)


def make_products(columns: int, depth: int, capability: tuple[int, int]):
    """
    Return ``products(weights, x, steps, out)``: what one warp adds to 16 rows of many columns.

    ``columns`` is a multiple of 8, ``depth`` and ``capability`` are those of :func:`make_product`.

    Returns
    -------
    intrinsic
        ``weights, x`` int64: addresses of this lane's first 16 bytes, both in fragment order;
        ``steps`` int32; ``out`` int32: address of this lane's first sum in shared memory,
        float32 [16, columns + SUM_PADDING].

    """
    tiles = columns // 8
    sums = [f'c{tile}_{i}' for tile in range(tiles) for i in range(4)]
    lines = [
        '.reg .pred p;', '.reg .s32 n;', '.reg .b64 w, x;', f'.reg .b32 a<{8 * depth}>;',
        f'.reg .b32 b<{4 * tiles}>;', f'.reg .f32 {", ".join(sums)};',
        'mov.b64 w, $0;', 'mov.b64 x, $1;', 'mov.s32 n, $2;',
        *(f'mov.f32 {name}, 0f00000000;' for name in sums),
    ]  # fmt: skip

    def load(slot, ahead):
        names = [f'a{8 * slot + i}' for i in range(8)]
        yield f'setp.gt.s32 p, n, {ahead};'
        yield from _load_step(names, ahead * TILE_BYTES)

    for slot in range(depth):
        lines += load(slot, slot)
    lines += ['NEXT:']
    for slot in range(depth):
        a = [f'a{8 * slot + i}' for i in range(8)]
        lines += [f'setp.le.s32 p, n, {slot};', '@p bra DONE;']
        for tile in range(tiles):
            names = ', '.join(f'b{4 * tile + i}' for i in range(4))
            offset = (slot * tiles + tile) * FRAGMENT_BYTES
            lines += [f'ld.global.v4.b32 {{{names}}}, [x+{offset}];']
        for tile in range(tiles):
            b = [f'b{4 * tile + i}' for i in range(4)]
            lines += _mma(f'c{tile}_', (a[0], a[4], a[1], a[5]), b[:2], capability)
            lines += _mma(f'c{tile}_', (a[2], a[6], a[3], a[7]), b[2:], capability)
        lines += load(slot, slot + depth)
    lines += [
        f'add.s64 w, w, {depth * TILE_BYTES};',
        f'add.s64 x, x, {depth * tiles * FRAGMENT_BYTES};',
        f'sub.s32 n, n, {depth};', 'bra NEXT;', 'DONE:',
    ]  # fmt: skip
    for tile in range(tiles):
        for half in (0, 1):
            offset = 4 * (half * 8 * (columns + SUM_PADDING) + tile * 8)
            pair = f'{{c{tile}_{2 * half}, c{tile}_{2 * half + 1}}}'
            lines += [f'st.shared.v2.f32 [$3+{offset}], {pair};']
    return assembly(block_of(lines), (types.int64, types.int64, types.int32, types.int32))


def make_attend(head_dim: int, both: bool, capability: tuple[int, int], staged: bool = False):
    """
    Return what one warp of attention does: 16 query rows against its share of the keys.

    ``attend(q, k, v, start, stop, stride, limits, out, sums)``; scores are base-2 logarithms,
    the scale being part of the queries. A running maximum keeps the exponentials in range.
    Stores, unscaled, float32 [16, head_dim] to ``out``, and (maximum, sum) of every row to
    ``sums`` float32 [16, 2].

    Parameters
    ----------
    head_dim : int
        A multiple of 32.
    both : bool
        Store rows 8 to 15 too.
    capability : (int, int)
        Compute capability compiled for.
    staged : bool
        Let values wait in shared memory, where the warp puts its output in the end, rather than
        in registers.

    Returns
    -------
    intrinsic
        ``q`` int64: this lane's part of row ``lane // 4`` [head_dim] float16; ``k`` int64: the
        same of key ``lane // 4``; ``v`` int64: this lane's part of the pairs [keys / 2,
        head_dim, 2]; ``start, stop, stride`` int32: keys, multiples of 16; ``limit_low``,
        ``limit_high`` int32: the last key that rows ``lane // 4`` and ``lane // 4 + 8`` see;
        ``out, sums`` int32: this lane's first addresses in shared memory.

    """
    blocks = head_dim // 32
    halves = (0, 1) if both else (0,)
    outputs = [f'o{n}_{i}' for n in range(4 * blocks) for i in range(2 * len(halves))]
    row_bytes = 2 * head_dim
    lines = [
        '.reg .pred p;', '.reg .b64 kk, vv;', '.reg .s32 i, c, d, mine;', '.reg .b32 t, none;',
        f'.reg .b32 q<{8 * blocks}>, k<{8 * blocks}>, v<{8 * blocks}>, f<4>;', '.reg .f32 s<8>;',
        f'.reg .f32 {", ".join(outputs)};', '.reg .f32 m0, m1, l0, l1, x0, x1, y, u, zero;',
        'mov.u32 t, %laneid;', 'and.b32 t, t, 3;', 'mov.b32 none, 0;', 'mov.f32 zero, 0f00000000;',
        *(f'mov.f32 m{half}, 0fF149F2CA;' for half in halves),
        *(f'mov.f32 l{half}, zero;' for half in halves),
        *(f'mov.f32 {name}, zero;' for name in outputs),
    ]  # fmt: skip

    def multiply(total, names, a, b):
        """Yield a product whose rows 8 to 15 are left out where they are not kept."""
        if both:
            for line in _mma('#', a, b, capability):
                for i, name in enumerate(names):
                    line = line.replace(f'#{i}', name)
                yield line
            return
        # The instruction has to put the rows that nobody asked for somewhere.
        for line in _mma('#', (a[0], 'none', a[2], 'none'), b, capability):
            out, _, rest = line.partition('}')
            out = out.replace('#0', names[0]).replace('#1', names[1])
            out = out.replace('#2', 'y').replace('#3', 'u')
            rest = rest.replace('#0', names[0]).replace('#1', names[1])
            yield out + '}' + rest.replace('#2', 'zero').replace('#3', 'zero')

    for block in range(blocks):
        for half in halves:
            names = ', '.join(f'q{8 * block + 4 * half + i}' for i in range(4))
            offset = 64 * block + half * 8 * row_bytes
            lines += [f'ld.global.cg.v4.b32 {{{names}}}, [$0+{offset}];']
    lines += [
        'mov.s32 i, $3;', 'NEXT:', 'setp.ge.s32 p, i, $4;', '@p bra DONE;',
        f'mul.wide.s32 kk, i, {row_bytes};', 'add.s64 kk, kk, $1;',
        f'mul.wide.s32 vv, i, {row_bytes};', 'add.s64 vv, vv, $2;',
        *(f'mov.f32 s{n}, zero;' for n in range(8)),
    ]  # fmt: skip
    for block in range(blocks):
        for tile in (0, 1):
            names = ', '.join(f'k{8 * block + 4 * tile + n}' for n in range(4))
            offset = 64 * block + tile * 8 * row_bytes
            lines += [f'ld.global.cg.v4.b32 {{{names}}}, [kk+{offset}];']
    if staged:
        # From where the warp's first lane stores its output; every lane has its own 16 bytes.
        lines += [
            'mov.u32 c, %laneid;', 'shl.b32 mine, c, 4;', 'add.s32 mine, mine, $8;',
            'shr.u32 c, c, 2;', f'mul.lo.s32 c, c, {4 * head_dim};', 'sub.s32 mine, mine, c;',
            'shl.b32 c, t, 5;', 'sub.s32 mine, mine, c;',
        ]  # fmt: skip
    chunks = [(block, pair) for block in range(blocks) for pair in (0, 1)]
    values = []
    for index, (block, pair) in enumerate(chunks):
        names = ', '.join(f'v{8 * block + 4 * pair + n}' for n in range(4))
        offset = 128 * block + pair * 8 * row_bytes
        if staged:
            lines += [f'cp.async.cg.shared.global [mine+{512 * index}], [vv+{offset}], 16;']
            values += [f'ld.shared.v4.b32 {{{names}}}, [mine+{512 * index}];']
        else:
            lines += [f'ld.global.cg.v4.b32 {{{names}}}, [vv+{offset}];']
    if staged:
        values = ['cp.async.wait_all;', *values]
    for block in range(blocks):
        q = [f'q{8 * block + n}' for n in range(8)]
        for tile in (0, 1):
            b = [f'k{8 * block + 4 * tile + n}' for n in range(4)]
            names = [f's{4 * tile + n}' for n in range(4)]
            lines += multiply('s', names, (q[0], q[4], q[1], q[5]), b[:2])
            lines += multiply('s', names, (q[2], q[6], q[3], q[7]), b[2:])
    lines += values
    # Hide the keys that a row may not see.
    lines += ['shl.b32 c, t, 1;', 'add.s32 c, c, i;']
    for tile in (0, 1):
        for column in (0, 1):
            lines += [f'add.s32 d, c, {8 * tile + column};']
            for half in halves:
                name = f's{4 * tile + 2 * half + column}'
                lines += [f'setp.gt.s32 p, d, ${6 + half};', f'@p mov.f32 {name}, 0fFF800000;']
    for half in halves:
        mine = [f's{4 * tile + 2 * half + column}' for tile in (0, 1) for column in (0, 1)]
        lines += [f'mov.f32 x{half}, m{half};']
        lines += [f'max.f32 x{half}, x{half}, {name};' for name in mine]
        for distance in (1, 2):
            lines += [
                f'shfl.sync.bfly.b32 y, x{half}, {distance}, 31, 0xffffffff;',
                f'max.f32 x{half}, x{half}, y;',
            ]
        lines += [
            f'sub.f32 y, m{half}, x{half};', f'mov.f32 m{half}, x{half};',
            'ex2.approx.ftz.f32 y, y;', f'mul.f32 l{half}, l{half}, y;',
            *(f'mul.f32 o{n}_{i}, o{n}_{i}, y;'
              for n in range(4 * blocks) for i in (2 * half, 2 * half + 1)),
        ]  # fmt: skip
        for name in mine:
            lines += [
                f'sub.f32 {name}, {name}, m{half};', f'ex2.approx.ftz.f32 {name}, {name};',
                f'add.f32 l{half}, l{half}, {name};',
            ]  # fmt: skip
    for tile in (0, 1):
        for half in halves:
            low = 4 * tile + 2 * half
            lines += [*_pack(f'f{2 * tile + half}', f's{low}', f's{low + 1}', capability)]
    for block in range(blocks):
        for n in range(4):
            v = (f'v{8 * block + n}', f'v{8 * block + 4 + n}')
            names = [f'o{4 * block + n}_{i}' for i in range(4)]
            lines += multiply('o', names, ('f0', 'f1', 'f2', 'f3'), v)
    lines += ['add.s32 i, i, $5;', 'bra NEXT;', 'DONE:']
    for half in halves:
        for distance in (1, 2):
            lines += [
                f'shfl.sync.bfly.b32 y, l{half}, {distance}, 31, 0xffffffff;',
                f'add.f32 l{half}, l{half}, y;',
            ]
    lines += ['setp.eq.s32 p, t, 0;', *(['bar.warp.sync 0xffffffff;'] if staged else [])]
    for half in halves:
        for block in range(blocks):
            for column in (0, 1):
                names = ', '.join(f'o{4 * block + n}_{2 * half + column}' for n in range(4))
                offset = half * 32 * head_dim + 128 * block + 16 * column
                lines += [f'st.shared.v4.f32 [$8+{offset}], {{{names}}};']
        lines += [f'@p st.shared.v2.f32 [$9+{64 * half}], {{m{half}, l{half}}};']
    arguments = (types.int64,) * 3 + (types.int32,) * 7
    return assembly(block_of(lines), arguments)


def _pack(out: str, low: str, high: str, capability) -> Iterator[str]:
    """Yield the rounding of two float32 to one register of two float16."""
    if capability >= TENSOR_16:
        yield f'cvt.rn.f16x2.f32 {out}, {high}, {low};'
    else:
        yield f'{{ .reg .b16 h0, h1; cvt.rn.f16.f32 h0, {low}; cvt.rn.f16.f32 h1, {high};'
        yield f'mov.b32 {out}, {{h0, h1}}; }}'
