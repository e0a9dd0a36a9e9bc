"""
What the CUDA kernels say in PTX: tensor-core products, attention of one warp, small conversions.

Every function here is one block of inline assembly, generated for its constants, and is called
from Numba kernels like any device function. Addresses are int64 (uint64 would become float64 in
Numba's arithmetic), shared memory addresses int32.

A product is ``mma.sync`` with float16 operands and float32 sums. Which element of a row is
called which ``k`` by the instruction is free as long as both operands agree: lane ``t`` of a
quad holds eight neighbours, so that one 128-bit load feeds two instructions. Matrices lie in
*fragment order* (``layout.py``), in which such a load of a warp is contiguous.
"""

from collections.abc import Iterator, Sequence

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from vla_edge_ros.kernels.cuda.constants import FRAGMENT_BYTES, STEP, TILE_BYTES

TENSOR_16 = (8, 0)
"""Compute capability from which one instruction takes 16 elements of k; before, 8."""
DEPENDENT_LAUNCH = (9, 0)
"""Compute capability from which a kernel can start before the one ahead of it has ended."""

_KINDS = {
    types.int32: ('r', ir.IntType(32)),
    types.uint16: ('h', ir.IntType(16)),
    types.int64: ('l', ir.IntType(64)),
    types.float32: ('f', ir.FloatType()),
}


def assembly(text: str, arguments: Sequence, result=None):
    """
    Return an intrinsic that is one block of inline PTX with a memory clobber.

    Parameters
    ----------
    text : str
        ``$0`` is the result if there is one; the arguments follow.
    arguments : sequence of Numba types
        At most ten of int32, uint16, int64 and float32.
    result : Numba type, optional
        What is returned.

    """
    outputs = [f'={_KINDS[result][0]}'] if result else []
    constraints = ','.join([*outputs, *(_KINDS[item][0] for item in arguments), '~{memory}'])
    returned = _KINDS[result][1] if result else ir.VoidType()
    kind = ir.FunctionType(returned, [_KINDS[item][1] for item in arguments])
    signature = (result or types.void)(*arguments)

    def codegen(context, builder, _signature, values):
        value = builder.call(
            ir.InlineAsm(kind, text, constraints, side_effect=True),
            [builder.bitcast(value, want) if value.type != want else value
             for value, want in zip(values, kind.args, strict=True)],
        )  # fmt: skip
        return value if result else context.get_dummy_value()

    return intrinsic(_with_arity(len(arguments), (signature, codegen)))


def _with_arity(count: int, answer):
    """Return a function of the typing context and ``count`` arguments; Numba counts them."""
    makers = (
        lambda t: answer,
        lambda t, a: answer,
        lambda t, a, b: answer,
        lambda t, a, b, c: answer,
        lambda t, a, b, c, d: answer,
        lambda t, a, b, c, d, e: answer,
        lambda t, a, b, c, d, e, f: answer,
        lambda t, a, b, c, d, e, f, g: answer,
        lambda t, a, b, c, d, e, f, g, h: answer,
        lambda t, a, b, c, d, e, f, g, h, i: answer,
        lambda t, a, b, c, d, e, f, g, h, i, j: answer,
    )
    return makers[count]


@intrinsic
def shared_address(typing_context, array, index):
    """Return the address int32, in shared memory, of element ``index`` of a shared array."""

    def codegen(context, builder, signature, values):
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        start = builder.ptrtoint(shared, ir.IntType(64))
        size = ir.Constant(ir.IntType(64), signature.args[0].dtype.bitwidth // 8)
        whole = builder.add(start, builder.mul(builder.sext(values[1], ir.IntType(64)), size))
        return builder.trunc(whole, ir.IntType(32))

    return types.int32(array, types.int32), codegen


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


def _block(lines: Sequence[str]) -> str:
    return '{\n' + '\n'.join(lines) + '\n}'


def make_product(columns: int, depth: int, capability: tuple[int, int]):
    """
    Return ``product(weights, x, steps, out)``: what one warp adds to 16 rows.

    The warp keeps ``depth`` steps of weights in flight. With ``columns`` 1, ``x`` is the int32
    address of plain float16 in shared memory, and lanes 0, 4, 8 ... store the sums of rows
    ``lane // 4`` and ``lane // 4 + 8``. Otherwise ``x`` is the int64 address of this lane's part
    of fragments, and every sum is stored, ``out`` being float32 [16, columns].

    Parameters
    ----------
    columns : int
        1, or a multiple of 8.
    depth : int
        Steps loaded ahead.
    capability : (int, int)
        Compute capability compiled for.

    Returns
    -------
    intrinsic
        ``weights`` int64: address of this lane's first 16 bytes; ``steps`` int32; ``out`` int32:
        address of this lane's first sum in shared memory.

    """
    single = columns == 1
    tiles = 1 if single else columns // 8
    # Two sets of sums halve the chain of dependent instructions of a single column.
    sets = 2 if single else 1
    x_step, where = (2 * STEP, 'shared') if single else (tiles * FRAGMENT_BYTES, 'global')
    x_kind = 'b32' if single else 'b64'
    wide = 'u32' if single else 'u64'
    lines = [
        '.reg .pred p;', '.reg .s32 n;', '.reg .b64 w;', f'.reg .{x_kind} x;',
        f'.reg .b32 a<{8 * depth}>;', f'.reg .b32 b<{4 * tiles}>;',
        f'.reg .f32 {", ".join(f"c{s}_{t}_{i}" for s in range(sets) for t in range(tiles) for i in range(4))};',
        'mov.b64 w, $0;', f'mov.{x_kind} x, $1;', 'mov.s32 n, $2;',
    ]  # fmt: skip
    sums = [f'c{s}_{t}_{i}' for s in range(sets) for t in range(tiles) for i in range(4)]
    lines += [f'mov.f32 {name}, 0f00000000;' for name in sums]

    def load(slot, step, guard='p'):
        for half in (0, 1):
            names = ', '.join(f'a{8 * slot + 4 * half + i}' for i in range(4))
            offset = step * TILE_BYTES + half * FRAGMENT_BYTES
            yield f'@{guard} ld.global.nc.L1::no_allocate.v4.b32 {{{names}}}, [w+{offset}];'

    for slot in range(depth):
        lines += [f'setp.gt.s32 p, n, {slot};', *load(slot, slot)]
    lines += ['NEXT:']
    for slot in range(depth):
        lines += [f'setp.le.s32 p, n, {slot};', '@p bra DONE;']
        for tile in range(tiles):
            names = ', '.join(f'b{4 * tile + i}' for i in range(4))
            offset = slot * x_step + tile * FRAGMENT_BYTES * (not single)
            lines += [f'ld.{where}.v4.b32 {{{names}}}, [x+{offset}];']
        a = [f'a{8 * slot + i}' for i in range(8)]
        for tile in range(tiles):
            b = [f'b{4 * tile + i}' for i in range(4)]
            lines += _mma(f'c0_{tile}_', (a[0], a[4], a[1], a[5]), b[:2], capability)
            lines += _mma(f'c{sets - 1}_{tile}_', (a[2], a[6], a[3], a[7]), b[2:], capability)
        lines += [f'setp.gt.s32 p, n, {slot + depth};', *load(slot, slot + depth)]
    lines += [
        f'add.s64 w, w, {depth * TILE_BYTES};', f'add.{wide} x, x, {depth * x_step};',
        f'sub.s32 n, n, {depth};', 'bra NEXT;', 'DONE:',
    ]  # fmt: skip
    if single:
        lines += [f'add.f32 c0_0_{i}, c0_0_{i}, c1_0_{i};' for i in (0, 2)]
        lines += [
            '.reg .b32 lane;', 'mov.u32 lane, %laneid;', 'and.b32 lane, lane, 3;',
            'setp.eq.s32 p, lane, 0;',
            '@p st.shared.f32 [$3], c0_0_0;', '@p st.shared.f32 [$3+32], c0_0_2;',
        ]  # fmt: skip
    else:
        for tile in range(tiles):
            for half in (0, 1):
                offset = 4 * (half * 8 * columns + tile * 8)
                pair = f'{{c0_{tile}_{2 * half}, c0_{tile}_{2 * half + 1}}}'
                lines += [f'st.shared.v2.f32 [$3+{offset}], {pair};']
    x_type = types.int32 if single else types.int64
    return assembly(_block(lines), (types.int64, x_type, types.int32, types.int32))


def make_attend(head_dim: int, both: bool, capability: tuple[int, int]):
    """
    Return what one warp of attention does: 16 query rows against its share of the keys.

    ``attend(q, k, v, start, stop, stride, limits, out, sums)``; scores are in the base-2 logarithm,
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
    outputs = [f'o{n}_{i}' for n in range(4 * blocks) for i in range(4)]
    row_bytes = 2 * head_dim
    lines = [
        '.reg .pred p;', '.reg .b64 k, v, kk, vv;', '.reg .s32 i, c, d;', '.reg .b32 t;',
        f'.reg .b32 q<{8 * blocks}>;', '.reg .b32 b<8>, f<4>;', '.reg .f32 s<8>;',
        f'.reg .f32 {", ".join(outputs)};', '.reg .f32 m0, m1, l0, l1, x0, x1, y;',
        'mov.u32 t, %laneid;', 'and.b32 t, t, 3;',
        'mov.f32 m0, 0fF149F2CA;', 'mov.f32 m1, 0fF149F2CA;',
        'mov.f32 l0, 0f00000000;', 'mov.f32 l1, 0f00000000;',
        *(f'mov.f32 {name}, 0f00000000;' for name in outputs),
    ]  # fmt: skip
    for block in range(blocks):
        for half in (0, 1):
            names = ', '.join(f'q{8 * block + 4 * half + i}' for i in range(4))
            lines += [f'ld.global.v4.b32 {{{names}}}, [$0+{64 * block + half * 8 * row_bytes}];']
    lines += [
        'mov.s32 i, $3;', 'NEXT:', 'setp.ge.s32 p, i, $4;', '@p bra DONE;',
        f'mul.wide.s32 kk, i, {row_bytes};', 'add.s64 kk, kk, $1;',
        f'mul.wide.s32 vv, i, {row_bytes};', 'add.s64 vv, vv, $2;',
        *(f'mov.f32 s{n}, 0f00000000;' for n in range(8)),
    ]  # fmt: skip
    for block in range(blocks):
        q = [f'q{8 * block + n}' for n in range(8)]
        for tile in (0, 1):
            names = ', '.join(f'b{4 * tile + n}' for n in range(4))
            offset = 64 * block + tile * 8 * row_bytes
            lines += [f'ld.global.v4.b32 {{{names}}}, [kk+{offset}];']
        for tile in (0, 1):
            b = [f'b{4 * tile + n}' for n in range(4)]
            total = ('s', 4 * tile)
            lines += _scores(total, (q[0], q[4], q[1], q[5]), b[:2], capability)
            lines += _scores(total, (q[2], q[6], q[3], q[7]), b[2:], capability)
    # Hide the keys that a row may not see.
    lines += ['shl.b32 c, t, 1;', 'add.s32 c, c, i;']
    for tile in (0, 1):
        for column in (0, 1):
            lines += [f'add.s32 d, c, {8 * tile + column};']
            for half, limit in ((0, '$6'), (1, '$7')):
                name = f's{4 * tile + 2 * half + column}'
                lines += [f'setp.gt.s32 p, d, {limit};', f'@p mov.f32 {name}, 0fFF800000;']
    for half in (0, 1):
        mine = [f's{4 * tile + 2 * half + column}' for tile in (0, 1) for column in (0, 1)]
        lines += [f'mov.f32 x{half}, m{half};']
        lines += [f'max.f32 x{half}, x{half}, {name};' for name in mine]
        for distance in (1, 2):
            lines += [
                f'shfl.sync.bfly.b32 y, x{half}, {distance}, 31, 0xffffffff;',
                f'max.f32 x{half}, x{half}, y;',
            ]
        lines += [
            f'sub.f32 y, m{half}, x{half};', f'mov.f32 m{half}, x{half};', 'ex2.approx.ftz.f32 y, y;',
            f'mul.f32 l{half}, l{half}, y;',
            *(f'mul.f32 o{n}_{i}, o{n}_{i}, y;'
              for n in range(4 * blocks) for i in (2 * half, 2 * half + 1)),
        ]  # fmt: skip
        for name in mine:
            lines += [
                f'sub.f32 {name}, {name}, m{half};', f'ex2.approx.ftz.f32 {name}, {name};',
                f'add.f32 l{half}, l{half}, {name};',
            ]  # fmt: skip
    for tile in (0, 1):
        for half in (0, 1):
            low = 4 * tile + 2 * half
            lines += [*_pack(f'f{2 * tile + half}', f's{low}', f's{low + 1}', capability)]
    for block in range(blocks):
        for pair in (0, 1):
            names = ', '.join(f'b{4 * pair + n}' for n in range(4))
            offset = 128 * block + pair * 8 * row_bytes
            lines += [f'ld.global.v4.b32 {{{names}}}, [vv+{offset}];']
        for n in range(4):
            lines += _mma(
                f'o{4 * block + n}_', ('f0', 'f1', 'f2', 'f3'), (f'b{n}', f'b{4 + n}'), capability)
    lines += ['add.s32 i, i, $5;', 'bra NEXT;', 'DONE:']
    for half in (0, 1):
        for distance in (1, 2):
            lines += [
                f'shfl.sync.bfly.b32 y, l{half}, {distance}, 31, 0xffffffff;',
                f'add.f32 l{half}, l{half}, y;',
            ]
    lines += ['setp.eq.s32 p, t, 0;']
    for half in (0, 1) if both else (0,):
        for block in range(blocks):
            for column in (0, 1):
                names = ', '.join(f'o{4 * block + n}_{2 * half + column}' for n in range(4))
                offset = half * 32 * head_dim + 128 * block + 16 * column
                lines += [f'st.shared.v4.f32 [$8+{offset}], {{{names}}};']
        lines += [f'@p st.shared.v2.f32 [$9+{64 * half}], {{m{half}, l{half}}};']
    arguments = (types.int64,) * 3 + (types.int32,) * 7
    return assembly(_block(lines), arguments)


def _scores(total, a, b, capability) -> Iterator[str]:
    name, first = total
    for line in _mma('#', a, b, capability):
        yield line.replace('#0', f'{name}{first}').replace('#1', f'{name}{first + 1}').replace(
            '#2', f'{name}{first + 2}').replace('#3', f'{name}{first + 3}')


def _pack(out: str, low: str, high: str, capability) -> Iterator[str]:
    """Yield the rounding of two float32 to one register of two float16."""
    if capability >= TENSOR_16:
        yield f'cvt.rn.f16x2.f32 {out}, {high}, {low};'
    else:
        yield f'{{ .reg .b16 h0, h1; cvt.rn.f16.f32 h0, {low}; cvt.rn.f16.f32 h1, {high};'
        yield f'mov.b32 {out}, {{h0, h1}}; }}'


to_half = assembly(
    '{ .reg .f32 x; max.f32 x, $1, 0fC77FE000; min.f32 x, x, 0f477FE000; cvt.rn.f16.f32 $0, x; }',
    (types.float32,), types.uint16,
)  # fmt: skip
"""float32 to the bits of the nearest float16, saturating at its largest number."""

to_float = assembly('cvt.f32.f16 $0, $1;', (types.uint16,), types.float32)
"""The bits of a float16 to float32."""

exp2 = assembly('ex2.approx.ftz.f32 $0, $1;', (types.float32,), types.float32)

prefetch = assembly('prefetch.global.L2 [$0];', (types.int64,))
"""Bring the 128 bytes at an address closer; the warp does not wait."""


def make_dependent_launch(capability: tuple[int, int]):
    """
    Return what a kernel calls before it reads what the kernel ahead of it wrote.

    Lets the kernel behind it start early, too. Nothing where the processor cannot.
    """
    text = 'griddepcontrol.launch_dependents; griddepcontrol.wait;'
    return assembly(text if capability >= DEPENDENT_LAUNCH else '', ())
