"""
Products on the tensor cores, as blocks of PTX.

A product is ``mma.sync`` with float16 operands and float32 sums. Which element of a row is
called which ``k`` by the instruction is free as long as both operands agree: lane ``t`` of a
quad holds eight neighbours, so that one 128-bit load feeds two instructions. Matrices lie in
*fragment order* (``layout.py``), in which such a load of a warp is contiguous.
"""

from collections.abc import Iterator, Sequence

from numba.core import types

from vla_edge_ros.kernels.cuda.constants import (
    DEPENDENT_LAUNCH,
    FRAGMENT_BYTES,
    STEP,
    SUM_PADDING,
    SUMS,
    TENSOR_16,
    TILE_BYTES,
)
from vla_edge_ros.kernels.cuda.ptx import assembly, block_of


def mma(total: str, a: Sequence[str], b: Sequence[str], capability) -> Iterator[str]:
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
            *mma('c', (a[0], a[4], a[1], a[5]), ('b0', 'b1'), capability),
            *mma('d', (a[2], a[6], a[3], a[7]), ('b2', 'b3'), capability),
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
            lines += mma(f'c{tile}_', (a[0], a[4], a[1], a[5]), b[:2], capability)
            lines += mma(f'c{tile}_', (a[2], a[6], a[3], a[7]), b[2:], capability)
        lines += load(slot, slot + depth)
    lines += [
        f'add.s64 w, w, {depth * TILE_BYTES};',
        f'add.s64 x, x, {depth * tiles * FRAGMENT_BYTES};',
        f'sub.s32 n, n, {depth};', 'bra NEXT;', 'DONE:', *_store_sums(tiles),
    ]  # fmt: skip
    return assembly(block_of(lines), (types.int64, types.int64, types.int32, types.int32))


def make_products_at_once(columns: int, most: int, held: int, capability: tuple[int, int]):
    """
    Return ``products(weights, x, steps, out)``, as :func:`make_products` does, of a few steps.

    All weights are loaded together, before the kernel ahead has ended, and when it has, ``held``
    steps of ``x``. ``most`` is what ``steps`` is at most.
    """
    tiles = columns // 8
    sums = [f'c{tile}_{i}' for tile in range(tiles) for i in range(4)]
    lines = [
        '.reg .pred p;', '.reg .b64 w;', f'.reg .b32 a<{8 * most}>, b<{4 * tiles * held}>;',
        f'.reg .f32 {", ".join(sums)};', 'mov.b64 w, $0;',
        *(f'mov.f32 {name}, 0f00000000;' for name in sums),
        # A register that is loaded under a condition would be alive from the kernel's first line.
        *(f'mov.b32 a{n}, 0;' for n in range(8 * most)),
        *(f'mov.b32 b{n}, 0;' for n in range(4 * tiles * held)),
    ]  # fmt: skip

    def load(step):
        yield f'setp.gt.s32 p, $2, {step};'
        for tile in range(tiles):
            first = 4 * (step % held * tiles + tile)
            names = ', '.join(f'b{first + i}' for i in range(4))
            offset = (step * tiles + tile) * FRAGMENT_BYTES
            yield f'@p ld.global.v4.b32 {{{names}}}, [$1+{offset}];'

    for step in range(most):
        lines += [f'setp.gt.s32 p, $2, {step};',
                  *_load_step([f'a{8 * step + i}' for i in range(8)], step * TILE_BYTES)]
    if capability >= DEPENDENT_LAUNCH:
        lines += ['griddepcontrol.wait;']
    for step in range(held):
        lines += load(step)
    for step in range(most):
        lines += [f'setp.le.s32 p, $2, {step};', '@p bra DONE;']
        for low in (0, 2):
            a = [f'a{8 * step + low + i}' for i in (0, 4, 1, 5)]
            for tile in range(tiles):
                first = 4 * (step % held * tiles + tile) + low
                lines += mma(f'c{tile}_', a, (f'b{first}', f'b{first + 1}'), capability)
        if step + held < most:
            lines += load(step + held)
    lines += ['DONE:', *_store_sums(tiles)]
    return assembly(block_of(lines), (types.int64, types.int64, types.int32, types.int32))


def _store_sums(tiles: int) -> Iterator[str]:
    """Yield the stores of sixteen rows of sums at $3."""
    for tile in range(tiles):
        for half in (0, 1):
            offset = 4 * (half * 8 * (8 * tiles + SUM_PADDING) + tile * 8)
            pair = f'{{c{tile}_{2 * half}, c{tile}_{2 * half + 1}}}'
            yield f'st.shared.v2.f32 [$3+{offset}], {pair};'


def pack(out: str, low: str, high: str, capability) -> Iterator[str]:
    """Yield the rounding of two float32 to one register of two float16."""
    if capability >= TENSOR_16:
        yield f'cvt.rn.f16x2.f32 {out}, {high}, {low};'
    else:
        yield f'{{ .reg .b16 h0, h1; cvt.rn.f16.f32 h0, {low}; cvt.rn.f16.f32 h1, {high};'
        yield f'mov.b32 {out}, {{h0, h1}}; }}'
