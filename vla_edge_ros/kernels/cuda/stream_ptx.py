"""What a stream of weights needs of PTX: bulk copies, barriers, and a product out of a ring."""

import struct

from numba.core import types

from vla_edge_ros.kernels.cuda.constants import (
    BARRIER_BYTES,
    COUNT_BITS,
    FIXED_SCALE,
    FRAGMENT_BYTES,
    STAGE_BYTES,
    STAGE_STEPS,
    STEP,
    STREAM_SPLITS,
    SUMS,
    THREADS,
    TILE_BYTES,
    WARPS,
)
from vla_edge_ros.kernels.cuda.ptx import assembly, block_of
from vla_edge_ros.kernels.cuda.tensor import mma

_I32, _I64, _F32 = types.int32, types.int64, types.float32
UNWRITTEN = -1
"""A word that was not written yet: no number, and no two float16, are rounded to it."""


def single(value: float) -> str:
    """Return a float32 as PTX writes it."""
    return '0f' + struct.pack('>f', value).hex().upper()


make_barrier = assembly('mbarrier.init.shared::cta.b64 [$0], $1;', (_I32, _I32))
"""``make_barrier(address, arrivals)`` in shared memory."""

publish_barriers = assembly(
    'fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;', ())

issue = assembly(
    '{ mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $0; }', (_I32, _I32))
"""``issue(num_bytes, barrier)``: a stage is complete when so many bytes have arrived."""

bulk_copy = assembly(
    '{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0; '
    'cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint '
    '[$0], [$1], $2, [$3], once; }',
    (_I32, _I64, _I32, _I32))
"""``bulk_copy(to, source, num_bytes, barrier)``, of what is read once a token."""

await_parity = assembly(
    block_of([
        '.reg .pred p;', 'AGAIN:',
        'mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;', '@!p bra AGAIN;',
    ]),
    (_I32, _I32))  # fmt: skip
"""``await_parity(barrier, parity)``: until the phase of this parity is over."""

which = assembly('mov.u32 $0, %ctaid.x;', (), _I32)
"""This block's number, anew."""

again_long = assembly('mov.b64 $0, $1;', (_I64,), _I64)

recall = assembly('ld.shared.b32 $0, [$1];', (_I32,), _I32)
keep = assembly('st.shared.b32 [$0], $1;', (_I32, _I32))

announce = assembly('red.release.gpu.global.add.u32 [$0], 1;', (_I64,))
"""Count this block in, after all that it wrote."""

join = assembly('atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;', (_I64,), _I32)
"""Count this block in, after all that it wrote, and return how many were before it."""

await_count = assembly(
    block_of([
        '.reg .pred p;', '.reg .u32 v;', '.reg .s32 d;', 'AGAIN:',
        'ld.acquire.gpu.global.u32 v, [$0];', 'sub.s32 d, v, $1;', 'setp.lt.s32 p, d, 0;',
        '@p bra AGAIN;',
    ]),
    (_I64, _I32))  # fmt: skip
"""``await_count(address, count)``: until so many blocks were counted in."""

load_int = assembly('ld.global.cg.b32 $0, [$1];', (_I64,), _I32)
store_long = assembly('st.global.cg.b64 [$0], $1;', (_I64, _I64))
store_word = assembly('st.relaxed.gpu.global.b32 [$0], $1;', (_I64, _I32))
add_long = assembly('red.relaxed.gpu.global.add.u64 [$0], $1;', (_I64, _I64))
to_fixed = assembly(
    block_of([
        '.reg .f32 x;', '.reg .s64 v, c;', f'mul.f32 x, $1, {single(FIXED_SCALE)};',
        'cvt.rni.s64.f32 v, x;', f'shl.b64 v, v, {COUNT_BITS};', 'cvt.s64.s32 c, $2;',
        'add.s64 $0, v, c;',
    ]),
    (_F32, _I32), _I64)  # fmt: skip
"""``to_fixed(value, count)``: what adds a float32, and a count of steps, to the residual."""

clear = assembly(
    block_of([
        '.reg .pred p;', '.reg .s32 i, j, a, b, c, zero;', 'mov.u32 a, %tid.x;',
        'and.b32 i, a, 31;', 'shr.b32 a, a, 5;', 'mad.lo.s32 a, a, 64, $0;', 'shl.b32 j, $1, 4;',
        'mov.s32 zero, 0;',
        'ZERO:', 'setp.ge.s32 p, i, j;', '@p bra DONE;', 'and.b32 b, i, 15;',
        'mad.lo.s32 b, b, 4, a;', 'shr.s32 c, i, 4;', f'mad.lo.s32 b, c, {4 * SUMS}, b;',
        'st.shared.b32 [b], zero;', 'add.s32 i, i, 32;', 'bra ZERO;', 'DONE:',
    ]),
    (_I32, _I32))  # fmt: skip
"""``clear(sums, units)``: this warp's sums of so many units."""


def make_consume(capability: tuple[int, int]):
    """
    Return ``consume(state, ring, stages, count, steps, k, depth, x, sums, units)``.

    One warp's share of a product whose weights come through the ring: of every stage the steps
    ``2 * warp`` and ``2 * warp + 1``. ``state`` int32 is the stage and, from bit 8 on, the parity,
    and returned for the next call; ``ring`` int32: address of the ring, the barriers lie before
    it; ``stages`` int32: its length; ``count`` int32: stages of this call; ``steps`` int32: steps
    of this call; ``k`` int32: which of a unit's ``depth`` steps is the first; ``x`` int32:
    address of float16 [depth * 32]; ``sums`` int32: address of float32 [units, SUMS], cleared
    before: a warp need not have a step of every unit.
    """
    sums = 'cdef'
    zero = [f'mov.f32 {name}{i}, 0f00000000;' for name in sums for i in range(4)]
    flush = [
        *(f'add.f32 c{i}, c{i}, {name}{i};' for name in sums[1:] for i in (0, 2)),
        '@row st.shared.f32 [out], c0;', '@row st.shared.f32 [out+32], c2;', *zero,
    ]

    def multiply(step):
        a, x = [f'a{8 * step + i}' for i in range(8)], [f'b{4 * step + i}' for i in range(4)]
        yield from mma(sums[2 * step], (a[0], a[4], a[1], a[5]), x[:2], capability)
        yield from mma(sums[2 * step + 1], (a[2], a[6], a[3], a[7]), x[2:], capability)

    lines = [
        '.reg .pred p, row, lead;', '.reg .s32 s, ph, n, left, k, out, end, i;',
        '.reg .b32 w, bar, xa, lane, warp, quad, a<16>, b<8>;',
        f'.reg .f32 {", ".join(f"{name}<4>" for name in sums)};',
        'and.b32 s, $1, 255;', 'shr.s32 ph, $1, 8;', 'mov.s32 n, $4;',
        'mov.u32 lane, %laneid;', 'mov.u32 warp, %tid.x;', 'shr.b32 warp, warp, 5;',
        'and.b32 quad, lane, 3;', 'setp.eq.s32 row, quad, 0;', 'setp.eq.s32 lead, lane, 0;',
        'mad.lo.s32 quad, quad, 16, $8;',
        'shl.b32 k, warp, 1;', 'sub.s32 left, $5, k;', 'add.s32 k, k, $6;',
        'mad.lo.s32 out, warp, 64, $9;', f'mad.lo.s32 end, $10, {4 * SUMS}, out;',
        'shr.b32 xa, lane, 2;', 'mad.lo.s32 out, xa, 4, out;', *zero,
        'setp.le.s32 p, n, 0;', '@p bra DONE;',
        'mad.lo.s32 bar, s, 16, $2;', f'sub.s32 bar, bar, {BARRIER_BYTES};',
        f'mad.lo.s32 w, s, {STAGE_BYTES}, $2;', f'mad.lo.s32 w, warp, {2 * TILE_BYTES}, w;',
        'mad.lo.s32 w, lane, 16, w;',
        'NEXT:', 'setp.lt.s32 p, k, $7;', '@p bra INSIDE;', *flush,
        'SKIP:', 'sub.s32 k, k, $7;', f'add.s32 out, out, {4 * SUMS};',
        'setp.ge.s32 p, k, $7;', '@p bra SKIP;',
        'INSIDE:', f'mad.lo.s32 xa, k, {2 * STEP}, quad;',
        'AGAIN:', 'mbarrier.try_wait.parity.shared::cta.b64 p, [bar], ph;', '@!p bra AGAIN;',
        *(f'ld.shared.v4.b32 {{a{4 * i}, a{4 * i + 1}, a{4 * i + 2}, a{4 * i + 3}}}, '
          f'[w+{FRAGMENT_BYTES * i}];' for i in range(4)),
        'ld.shared.v4.b32 {b0, b1, b2, b3}, [xa];',
        f'ld.shared.v4.b32 {{b4, b5, b6, b7}}, [xa+{2 * STEP}];',
        'setp.le.s32 p, left, 0;', '@p bra READ;', *multiply(0),
        'setp.le.s32 p, left, 1;', '@p bra READ;',
        'add.s32 i, k, 1;', 'setp.lt.s32 p, i, $7;', '@p bra SAME;',
        *flush, 'sub.s32 k, k, $7;', f'add.s32 out, out, {4 * SUMS};',
        'ld.shared.v4.b32 {b4, b5, b6, b7}, [quad];',
        'SAME:', *multiply(1),
        'READ:', 'bar.warp.sync 0xffffffff;', '@lead mbarrier.arrive.shared::cta.b64 _, [bar+8];',
        f'add.s32 k, k, {STAGE_STEPS};', f'sub.s32 left, left, {STAGE_STEPS};',
        'add.s32 s, s, 1;', f'add.s32 w, w, {STAGE_BYTES};', 'add.s32 bar, bar, 16;',
        'setp.lt.s32 p, s, $3;', '@p bra ON;', 'mov.s32 s, 0;', 'xor.b32 ph, ph, 1;',
        f'mul.lo.s32 i, $3, {STAGE_BYTES};', 'sub.s32 w, w, i;', 'shl.b32 i, $3, 4;',
        'sub.s32 bar, bar, i;',
        'ON:', 'sub.s32 n, n, 1;', 'setp.gt.s32 p, n, 0;', '@p bra NEXT;',
        'setp.lt.s32 p, out, end;', '@!p bra DONE;', *flush,
        'DONE:', 'shl.b32 ph, ph, 8;', 'or.b32 $0, ph, s;',
    ]  # fmt: skip
    return assembly(block_of(lines), (_I32,) * 10, _I32)


def make_gather_parts():
    """
    Return ``gather(parts, stride, extremes, step, num, out)``: attention from its splits.

    Four neighbours of one head by four lanes, eight lanes apart, of which each takes every fourth
    split. ``parts`` int64: address of their four float16 in the lane's first split, ``stride``
    int64: bytes to its next; ``extremes`` int64: address of that split's (maximum, sum) float32,
    ``step`` int64: bytes to the next; ``num`` int32: splits, those before this lane's first
    taken off; ``out`` int32: address in shared memory of the four float16. All loads are under
    way together, until none of the words is UNWRITTEN.
    """
    count = STREAM_SPLITS // 4
    lines = [
        '.reg .pred p, ready;', '.reg .b64 a, e;',
        f'.reg .b32 v<{2 * count}>, m<{count}>, l<{count}>, low, high;',
        '.reg .f32 w, top, other, all, x, s<4>;',
        '.reg .b16 h<4>;',
    ]  # fmt: skip
    for part in range(count):
        lines += [
            f'mov.b32 m{part}, 0fF149F2CA;', f'mov.b32 l{part}, 0;',
            f'mov.b32 v{2 * part}, 0;', f'mov.b32 v{2 * part + 1}, 0;',
        ]  # fmt: skip
    lines += ['AGAIN:', 'mov.b64 a, $0;', 'mov.b64 e, $2;', 'setp.eq.s64 ready, a, a;']
    for part in range(count):
        lines += [
            f'setp.gt.s32 p, $4, {4 * part};',
            f'@p ld.relaxed.gpu.global.v2.b32 {{m{part}, l{part}}}, [e];', 'add.s64 e, e, $3;',
            f'@p ld.relaxed.gpu.global.v2.b32 {{v{2 * part}, v{2 * part + 1}}}, [a];',
            'add.s64 a, a, $1;',
        ]  # fmt: skip
    for part in range(count):
        for name in (f'm{part}', f'l{part}', f'v{2 * part}', f'v{2 * part + 1}'):
            lines += [f'setp.ne.and.s32 ready, {name}, {UNWRITTEN}, ready;']
    lines += ['@!ready bra AGAIN;']
    lines += ['mov.f32 top, m0;', *(f'max.f32 top, top, m{i};' for i in range(1, count))]
    for distance in (8, 16):
        lines += [f'shfl.sync.bfly.b32 other, top, {distance}, 31, 0xffffffff;',
                  'max.f32 top, top, other;']  # fmt: skip
    lines += ['mov.f32 all, 0f00000000;', *(f'mov.f32 s{i}, 0f00000000;' for i in range(4))]
    for part in range(count):
        lines += [
            f'sub.f32 w, m{part}, top;', 'ex2.approx.ftz.f32 w, w;', f'mul.f32 w, w, l{part};',
            'add.f32 all, all, w;',
            f'mov.b32 {{h0, h1}}, v{2 * part};', f'mov.b32 {{h2, h3}}, v{2 * part + 1};',
        ]  # fmt: skip
        for i in range(4):
            lines += [f'cvt.f32.f16 x, h{i};', f'fma.rn.f32 s{i}, w, x, s{i};']
    for distance in (8, 16):
        for name in ('all', *(f's{i}' for i in range(4))):
            lines += [f'shfl.sync.bfly.b32 other, {name}, {distance}, 31, 0xffffffff;',
                      f'add.f32 {name}, {name}, other;']  # fmt: skip
    lines += [
        'rcp.approx.f32 all, all;', *(f'mul.f32 s{i}, s{i}, all;' for i in range(4)),
        *(f'cvt.rn.f16.f32 h{i}, s{i};' for i in range(4)),
        'mov.u32 high, %laneid;', 'setp.lt.u32 p, high, 8;',
        'mov.b32 low, {h0, h1};', 'mov.b32 high, {h2, h3};',
        '@p st.shared.v2.b32 [$5], {low, high};',
    ]  # fmt: skip
    return assembly(block_of(lines), (_I64, _I64, _I64, _I64, _I32, _I32))


def make_normalise(most: int):
    """
    Return ``normalise(source, count, base, size, eps, share, small)``: an RMS-normalised row.

    All warps together, up to ``most`` elements. ``source`` int64: generic address of the residual
    int64 [size], each as :func:`to_fixed` gives it, which is read until every element has
    ``count`` int32; ``base`` int32: address in shared memory of the float16 [size] to write, with
    the gain float32 [size] 2 * size bytes behind; ``share`` float32: one by ``size``; ``small``
    int32: address of float32 [WARPS].
    """
    pairs = -(-most // (2 * THREADS))
    mask = (1 << COUNT_BITS) - 1
    lines = [
        '.reg .pred p, q, ready, has<8>;', '.reg .s32 i, a, g, x, t, c;', '.reg .b32 h;',
        f'.reg .s64 r<{2 * pairs}>, at, from;', f'.reg .f32 v<{2 * pairs}>, g0, g1, s, y;',
        '.reg .b16 h0, h1;', 'mov.u32 t, %tid.x;', 'shl.b32 i, t, 1;',
        f'and.b32 c, $1, {mask};',
        'mul.wide.s32 at, i, 8;', 'add.s64 from, at, $0;',
    ]  # fmt: skip
    for pair in range(pairs):
        lines += [
            f'add.s32 a, i, {pair * 2 * THREADS};', f'setp.lt.s32 has{pair}, a, $3;',
            f'cvt.s64.s32 r{2 * pair}, c;', f'mov.s64 r{2 * pair + 1}, r{2 * pair};',
        ]
    lines += ['READ:', 'setp.eq.s32 ready, c, c;']
    for pair in range(pairs):
        names = f'{{r{2 * pair}, r{2 * pair + 1}}}'
        lines += [f'@has{pair} ld.relaxed.gpu.v2.b64 {names}, [from+{pair * 16 * THREADS}];']
    for word in range(2 * pairs):
        lines += [
            f'cvt.u32.u64 a, r{word};', f'and.b32 a, a, {mask};',
            'setp.eq.and.s32 ready, a, c, ready;',
        ]
    lines += ['@!ready bra READ;', 'mov.f32 s, 0f00000000;']
    for word in range(2 * pairs):
        lines += [
            f'shr.s64 r{word}, r{word}, {COUNT_BITS};', f'cvt.rn.f32.s64 v{word}, r{word};',
            f'mul.f32 v{word}, v{word}, {single(1 / FIXED_SCALE)};',
            f'fma.rn.f32 s, v{word}, v{word}, s;',
        ]
    for distance in (16, 8, 4, 2, 1):
        lines += [f'shfl.sync.bfly.b32 y, s, {distance}, 31, 0xffffffff;', 'add.f32 s, s, y;']
    lines += [
        'and.b32 a, t, 31;', 'setp.eq.s32 q, a, 0;', 'shr.u32 a, t, 5;',
        'mad.lo.s32 a, a, 4, $6;', '@q st.shared.f32 [a], s;', f'bar.sync 1, {THREADS};',
        'mov.f32 s, 0f00000000;',
    ]  # fmt: skip
    for warp in range(WARPS):
        lines += [f'ld.shared.f32 y, [$6+{4 * warp}];', 'add.f32 s, s, y;']
    lines += [
        'fma.rn.f32 s, s, $5, $4;', 'rsqrt.approx.f32 s, s;',
        'mad.lo.s32 g, $3, 2, $2;', 'mad.lo.s32 g, i, 4, g;', 'mad.lo.s32 x, i, 2, $2;',
    ]  # fmt: skip
    for pair in range(pairs):
        lines += [f'@has{pair} ld.shared.v2.f32 {{g0, g1}}, [g+{pair * 8 * THREADS}];']
        for n in (0, 1):
            v = f'v{2 * pair + n}'
            lines += [
                f'mul.f32 {v}, {v}, s;', f'mul.f32 {v}, {v}, g{n};',
                f'max.NaN.f32 {v}, {v}, 0fC77FE000;', f'min.NaN.f32 {v}, {v}, 0f477FE000;',
                f'cvt.rn.f16.f32 h{n}, {v};',
            ]  # fmt: skip
        lines += ['mov.b32 h, {h0, h1};', f'@has{pair} st.shared.b32 [x+{pair * 4 * THREADS}], h;']
    lines += [f'bar.sync 1, {THREADS};']
    kinds = (_I64, _I32, _I32, _I32, _F32, _F32, _I32)
    return assembly(block_of(lines), kinds)


def make_collect(most: int):
    """
    Return ``collect(source, num_bytes, to)``: this thread's 16 bytes of every THREADS * 16.

    From ``source`` int64, up to ``most`` bytes, to shared memory ``to`` int32, each read until
    none of its words is UNWRITTEN.
    """
    parts = -(-most // (16 * THREADS))
    lines = [
        f'.reg .pred ready, has<{parts}>;', f'.reg .b32 w<{4 * parts}>;', '.reg .s32 i, a, to;',
        '.reg .s64 from;', 'mov.u32 i, %tid.x;', 'shl.b32 i, i, 4;', 'cvt.s64.s32 from, i;',
        'add.s64 from, from, $0;', 'add.s32 to, i, $2;',
        *(f'mov.b32 w{n}, 0;' for n in range(4 * parts)),
    ]  # fmt: skip
    for part in range(parts):
        lines += [f'add.s32 a, i, {part * 16 * THREADS};', f'setp.lt.s32 has{part}, a, $1;']
    lines += ['READ:', 'setp.eq.s32 ready, i, i;']
    for part in range(parts):
        names = ', '.join(f'w{4 * part + n}' for n in range(4))
        lines += [f'@has{part} ld.relaxed.gpu.global.v4.b32 {{{names}}}, '
                  f'[from+{part * 16 * THREADS}];']  # fmt: skip
    lines += [f'setp.ne.and.s32 ready, w{n}, {UNWRITTEN}, ready;' for n in range(4 * parts)]
    lines += ['@!ready bra READ;']
    for part in range(parts):
        names = ', '.join(f'w{4 * part + n}' for n in range(4))
        lines += [f'@has{part} st.shared.v4.b32 [to+{part * 16 * THREADS}], {{{names}}};']
    return assembly(block_of(lines), (_I64, _I32, _I32))


def _make_total():
    lines = [f'.reg .f32 v<{WARPS}>;']
    lines += [f'ld.shared.f32 v{warp}, [$1+{64 * warp}];' for warp in range(WARPS)]
    lines += ['add.f32 $0, v0, v1;', *(f'add.f32 $0, $0, v{warp};' for warp in range(2, WARPS))]
    return assembly(block_of(lines), (_I32,), _F32)


total = _make_total()
"""The sum, over the warps, of a row of a tile: address int32 of the first warp's."""
