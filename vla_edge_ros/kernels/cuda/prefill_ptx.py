"""The products of a streamed prefill: weights out of a ring, what they multiply in registers."""

from collections.abc import Iterator

from numba.core import types

from vla_edge_ros.kernels.cuda.constants import (
    BARRIER_BYTES,
    FRAGMENT_BYTES,
    HELD_STEPS,
    INNER_SCALE,
    STAGE_BYTES,
    STAGE_STEPS,
    THREADS,
    TILE_BYTES,
    TOKEN_TILES,
    TOKENS,
    TOKENS_BYTES,
    WARPS,
    WIDE_SUMS,
)
from vla_edge_ros.kernels.cuda.ptx import assembly, block_of, half_lines
from vla_edge_ros.kernels.cuda.stream_ptx import single
from vla_edge_ros.kernels.cuda.tensor import mma

_LOG2_E = 1.4426950408889634
_ROW = 4 * TOKENS
_WARP_SUMS = 16 * _ROW
_MINE = STAGE_STEPS // WARPS
"""Steps of a stage that one warp multiplies."""


def _four(name: str, group: int) -> str:
    return '{' + ', '.join(f'{name}{4 * group + i}' for i in range(4)) + '}'


def _place(to: str, row: str, pair: str) -> Iterator[str]:
    """
    Yield the address in the sums of a warp of a row and a pair of tokens.

    Pairs change places with the row, so that no two lanes that read or write together meet in a
    bank: neither a lane a token, nor a lane a row, nor as the products leave them.
    """
    yield from (
        f'and.b32 {to}, {row}, 3;', f'shl.b32 {to}, {to}, 2;', f'shr.b32 i, {row}, 2;',
        f'or.b32 {to}, {to}, i;', f'xor.b32 {to}, {to}, {pair};', f'shl.b32 {to}, {to}, 3;',
        f'mad.lo.s32 {to}, {row}, {_ROW}, {to};',
    )  # fmt: skip


def _totals(*moves: str) -> Iterator[str]:
    """Yield the sums over the warps of what lies at ``rd``, and after some moves of it."""
    for name, lines in (('v', ()), ('u', moves)):
        yield from lines
        for warp in range(WARPS):
            yield f'ld.shared.f32 {name}{warp}, [rd+{warp * _WARP_SUMS}];'
    for warp in range(1, WARPS):
        yield from (f'add.f32 {name}0, {name}0, {name}{warp};' for name in 'vu')


def _expand() -> Iterator[str]:
    """Yield from the sums of gate and up, eight rows by all tokens, the activations."""
    yield from (
        *_totals(f'add.s32 rd, rd, {8 * _ROW};', 'xor.b32 rd, rd, 16;'),
        f'mul.f32 y, v0, {single(-_LOG2_E)};', 'ex2.approx.ftz.f32 y, y;',
        f'add.f32 y, y, {single(1.0)};', 'div.full.f32 y, v0, y;', 'mul.f32 y, y, u0;',
        f'mul.f32 y, y, {single(INNER_SCALE)};', *half_lines('h', 'y'),
        'shr.s32 i, tile, 2;', f'mul.wide.s32 o, i, {TOKENS_BYTES};', 'and.b32 i, tile, 3;',
        'mul.wide.s32 e, i, 16;', 'add.s64 o, o, e;', 'add.s64 o, o, $9;',
        'st.global.b16 [o], h;', f'sub.s32 rd, rd, {8 * _ROW};', 'xor.b32 rd, rd, 16;',
    )  # fmt: skip


def _contract() -> Iterator[str]:
    """Yield from the sums of sixteen rows by all tokens, two a thread, this chunk's part."""
    yield from (
        *_totals('xor.b32 rd, rd, 64;'),
        *(f'mul.f32 {name}0, {name}0, {single(1 / INNER_SCALE)};' for name in 'vu'),
        'mul.wide.s32 o, tile, 64;', 'add.s64 o, o, $9;', 'st.global.f32 [o], v0;',
        'add.s64 o, o, $10;', 'st.global.f32 [o], u0;', 'xor.b32 rd, rd, 64;',
    )  # fmt: skip


def _make(capability: tuple[int, int], row_and_token: Iterator[str], finish: Iterator[str]):
    sums = [f'c{tile}_{i}' for tile in range(TOKEN_TILES) for i in range(4)]
    size = 4 * TOKEN_TILES
    lines = [
        '.reg .pred p, lead;', '.reg .s32 s, ph, tile, mine, half, i, row, token;',
        '.reg .b32 w, bar, lane, warp, my, rd, to, a<16>;',
        f'.reg .b32 b<{size * HELD_STEPS}>;',
        f'.reg .f32 {", ".join(sums)}, v<{WARPS}>, u<{WARPS}>, y;', '.reg .b16 h;',
        '.reg .b64 xa, o, e;',
        'and.b32 s, $1, 255;', 'shr.s32 ph, $1, 8;', 'mov.u32 lane, %laneid;',
        'mov.u32 rd, %tid.x;', 'shr.b32 warp, rd, 5;', 'setp.eq.s32 lead, lane, 0;',
        # What this thread adds up, ...
        *row_and_token, 'shr.b32 to, token, 1;', *_place('rd', 'row', 'to'),
        'and.b32 token, token, 1;', 'mad.lo.s32 rd, token, 4, rd;', 'add.s32 rd, rd, $8;',
        # ... and what of the products it has.
        'shr.b32 row, lane, 2;', 'and.b32 to, lane, 3;', *_place('my', 'row', 'to'),
        f'mad.lo.s32 my, warp, {_WARP_SUMS}, my;', 'add.s32 my, my, $8;', 'mov.s32 half, 0;',
        'shl.b32 mine, warp, 1;', 'sub.s32 mine, $6, mine;',
        f'mul.wide.s32 xa, warp, {_MINE * TOKENS_BYTES};', 'mul.wide.s32 o, lane, 16;',
        'add.s64 xa, xa, o;', 'add.s64 xa, xa, $7;',
    ]  # fmt: skip
    for n in range(HELD_STEPS):
        step = n // _MINE * STAGE_STEPS + n % _MINE
        lines += [f'setp.gt.s32 p, mine, {step};']
        for tile in range(TOKEN_TILES):
            offset = step * TOKENS_BYTES + tile * FRAGMENT_BYTES
            lines += [f'@p ld.global.cg.v4.b32 {_four("b", TOKEN_TILES * n + tile)}, '
                      f'[xa+{offset}];']  # fmt: skip
    lines += [
        'mad.lo.s32 bar, s, 16, $2;', f'sub.s32 bar, bar, {BARRIER_BYTES};',
        f'mad.lo.s32 w, s, {STAGE_BYTES}, $2;', f'mad.lo.s32 w, warp, {_MINE * TILE_BYTES}, w;',
        'mad.lo.s32 w, lane, 16, w;',
        'mov.s32 tile, $4;', 'TILE:', 'setp.ge.s32 p, tile, $5;', '@p bra DONE;',
        *(f'mov.f32 {name}, 0f00000000;' for name in sums),
    ]  # fmt: skip
    for stage in range(HELD_STEPS // _MINE):
        if stage:
            lines += [f'setp.le.s32 p, $6, {stage * STAGE_STEPS};', '@p bra SUM;']
        lines += [
            f'WAIT{stage}:', 'mbarrier.try_wait.parity.shared::cta.b64 p, [bar], ph;',
            f'@!p bra WAIT{stage};']
        lines += [
            f'ld.shared.v4.b32 {_four("a", i)}, [w+{i * FRAGMENT_BYTES}];' for i in range(4)]
        for step in range(_MINE):
            lines += [f'setp.le.s32 p, mine, {stage * STAGE_STEPS + step};',
                      f'@p bra READ{stage};']  # fmt: skip
            held = size * (stage * _MINE + step)
            for low in (0, 2):
                a = [f'a{8 * step + low + i}' for i in (0, 4, 1, 5)]
                for tile in range(TOKEN_TILES):
                    first = held + 4 * tile + low
                    lines += mma(f'c{tile}_', a, (f'b{first}', f'b{first + 1}'), capability)
        lines += [
            f'READ{stage}:', 'bar.warp.sync 0xffffffff;',
            '@lead mbarrier.arrive.shared::cta.b64 _, [bar+8];',
            'add.s32 s, s, 1;', f'add.s32 w, w, {STAGE_BYTES};', 'add.s32 bar, bar, 16;',
            'setp.lt.s32 p, s, $3;', f'@p bra ON{stage};', f'mad.lo.s32 w, s, {-STAGE_BYTES}, w;',
            'mad.lo.s32 bar, s, -16, bar;', 'mov.s32 s, 0;', 'xor.b32 ph, ph, 1;', f'ON{stage}:',
        ]  # fmt: skip
    lines += ['SUM:']
    for low in (0, 2):
        if low:
            lines += [f'add.s32 my, my, {8 * _ROW};', 'xor.b32 my, my, 16;']
        for tile in range(TOKEN_TILES):
            lines += [
                f'xor.b32 to, my, {32 * tile};',
                f'st.shared.v2.f32 [to], {{c{tile}_{low}, c{tile}_{low + 1}}};',
            ]
    lines += [
        f'sub.s32 my, my, {8 * _ROW};', 'xor.b32 my, my, 16;',
        # Tiles take turns, so that nobody has to wait until these sums are read.
        f'bar.sync 1, {THREADS};', *finish,
        'sub.s32 rd, rd, half;', 'sub.s32 my, my, half;', f'xor.b32 half, half, {WIDE_SUMS};',
        'add.s32 rd, rd, half;', 'add.s32 my, my, half;', 'add.s32 tile, tile, 1;', 'bra TILE;',
        'DONE:', 'shl.b32 ph, ph, 8;', 'or.b32 $0, ph, s;',
    ]  # fmt: skip
    i32, i64 = types.int32, types.int64
    return assembly(block_of(lines), (i32, i32, i32, i32, i32, i32, i64, i32, i64, i64), i32)


def make_expand(capability: tuple[int, int]):
    """
    Return ``expand(state, ring, stages, first, stop, steps, x, sums, out, unused)``.

    All warps together multiply tiles of gate and up, whose weights come through the ring, by all
    tokens. ``state`` int32 as of ``stream_ptx.make_consume``, and returned for the next call;
    ``ring`` int32: address of the ring, the barriers lie before it; ``stages`` int32: its length;
    ``first, stop`` int32: tiles, each of which begins a stage; ``steps`` int32: of a tile,
    HELD_STEPS * WARPS at most;
    ``x`` int64: address of float16 in fragment order, TOKENS_BYTES a step; ``sums`` int32: of two
    times WIDE_SUMS bytes of shared memory, a multiple of 128; ``out`` int64: where the float16 of
    this warp's row and this lane's token of tile 0 goes, in the order of fragments.
    """
    return _make(capability, ('mov.b32 row, warp;', 'mov.b32 token, lane;'), _expand())


def make_contract(capability: tuple[int, int]):
    """
    Return ``contract(state, ring, stages, first, stop, steps, x, sums, out, jump)``.

    As :func:`make_expand`, of the way back: ``out`` int64 is where the float32 of row
    ``thread % 16`` and token ``thread // 16`` of tile 0 goes, and ``jump`` int64 the bytes to that
    of the token TOKENS / 2 behind.
    """
    return _make(capability, ('and.b32 row, rd, 15;', 'shr.b32 token, rd, 4;'), _contract())
