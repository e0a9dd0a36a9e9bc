"""
Blocks of PTX as functions for Numba kernels: conversions, copies, sums, launch control.

Every function here is one block of inline assembly, generated for its constants, and is called
from Numba kernels like any device function. Addresses are int64 (uint64 would become float64 in
Numba's arithmetic), shared memory addresses int32.
"""

from collections.abc import Sequence

from llvmlite import ir
from numba.core import types
from numba.cuda.extending import intrinsic

from vla_edge_ros.kernels.cuda.constants import DEPENDENT_LAUNCH, TENSOR_16, THREADS

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


@intrinsic
def generic_address(typing_context, array, index):
    """Return the address int64 of element ``index`` of a shared array or of a pointer."""

    def codegen(context, builder, signature, values):
        kind = signature.args[0]
        if isinstance(kind, types.CPointer):
            data, width = values[0], kind.dtype.bitwidth
        else:
            data = context.make_array(kind)(context, builder, values[0]).data
            width = kind.dtype.bitwidth
        start = builder.ptrtoint(data, ir.IntType(64))
        return builder.add(start, builder.mul(values[1], ir.Constant(ir.IntType(64), width // 8)))

    return types.int64(array, types.int64), codegen


@intrinsic
def moved(typing_context, pointer, count):
    """Return a pointer int64 ``count`` elements further."""

    def codegen(context, builder, signature, values):
        return builder.gep(values[0], [values[1]])

    return pointer(pointer, types.int64), codegen


def block_of(lines: Sequence[str]) -> str:
    """Return lines of PTX as one block with registers and labels of its own."""
    return '{\n' + '\n'.join(lines) + '\n}'


def half_lines(to: str, value: str) -> list[str]:
    """Return PTX that rounds a float32 register to a float16."""
    # The clamp loses a NaN, so it is put back.
    return [
        '.reg .f32 x;', '.reg .pred bad;', f'setp.nan.f32 bad, {value}, {value};',
        f'max.f32 x, {value}, 0fC77FE000;', 'min.f32 x, x, 0f477FE000;',
        '@bad mov.f32 x, 0f7FFFFFFF;', f'cvt.rn.f16.f32 {to}, x;',
    ]  # fmt: skip


to_half = assembly(block_of(half_lines('$0', '$1')), (types.float32,), types.uint16)
"""float32 to the bits of the nearest float16, saturating at its largest number."""

to_float = assembly('cvt.f32.f16 $0, $1;', (types.uint16,), types.float32)
"""The bits of a float16 to float32."""

quotient = assembly('div.u32 $0, $1, $2;', (types.int32, types.int32), types.int32)
"""Of two numbers that are not negative; Numba's own takes 64 bits and hundreds of cycles."""

remainder = assembly('rem.u32 $0, $1, $2;', (types.int32, types.int32), types.int32)

again = assembly('mov.b32 $0, $1;', (types.int32,), types.int32)
"""A number as if it were a new one: what depends on it is not worked out, or unrolled, ahead."""

who = assembly('mov.u32 $0, %tid.x;', (), types.int32)
"""This thread's number, anew: what depends on it is then not kept in registers for ever."""

meet = assembly(f'bar.sync 1, {THREADS};', ())
"""Wait for all warps that multiply."""

ratio = assembly('div.full.f32 $0, $1, $2;', (types.float32, types.float32), types.float32)
"""Of float32 numbers, at most two units in the last place off."""

fraction = assembly('div.rn.f32 $0, $1, $2;', (types.float32, types.float32), types.float32)
"""Of float32 numbers, rounded as IEEE 754 has it."""

times = assembly('mul.rn.f32 $0, $1, $2;', (types.float32, types.float32), types.float32)
"""A product of float32 numbers that is rounded before anything is added to it."""

nearest = assembly('cvt.rni.s32.f32 $0, $1;', (types.float32,), types.int32)
"""float32 to the nearest integer, a half to the even one."""

inverse_root = assembly('rsqrt.approx.f32 $0, $1;', (types.float32,), types.float32)

exp2 = assembly('ex2.approx.ftz.f32 $0, $1;', (types.float32,), types.float32)

def _over_bytes(line: str) -> str:
    """Return PTX that runs ``line`` with ``o`` from $0 in steps of $1 while below $2."""
    return block_of([
        '.reg .pred p;', '.reg .s32 o;', '.reg .b32 s;', '.reg .b64 a;', 'mov.s32 o, $0;',
        'NEXT:', 'setp.ge.s32 p, o, $2;', '@p bra DONE;', 'cvt.s64.s32 a, o;', 'add.s64 a, a, $3;',
        line, 'add.s32 o, o, $1;', 'bra NEXT;', 'DONE:',
    ])  # fmt: skip


prefetch = assembly(
    _over_bytes('prefetch.global.L2 [a];'), (types.int32, types.int32, types.int32, types.int64))
"""``prefetch(first, stride, size, address)``: bring bytes closer; the warp does not wait."""


def make_launch_control(capability: tuple[int, int]):
    """
    Return ``signal()`` and ``wait()``, which do nothing where the processor cannot.

    After ``signal`` of all its blocks the kernel behind may start; it must ``wait`` before it
    reads what this one, or any before it, wrote.
    """
    able = capability >= DEPENDENT_LAUNCH
    return tuple(
        assembly(f'griddepcontrol.{what};' if able else '', ())
        for what in ('launch_dependents', 'wait'))


def make_copy(capability: tuple[int, int]):
    """
    Return ``copy(first, stride, size, address, shared)`` and ``arrived()``.

    The first copies this thread's 16 bytes of every ``stride``, global int64 to shared int32; the
    second waits for all of them, which are under way together except on older processors.
    """
    kinds = (types.int32, types.int32, types.int32, types.int64, types.int32)
    if capability >= TENSOR_16:
        line = 'add.s32 s, $4, o; cp.async.cg.shared.global [s], [a], 16;'
        return assembly(_over_bytes(line), kinds), assembly('cp.async.wait_all;', ())
    line = ('add.s32 s, $4, o; { .reg .b32 b<4>; ld.global.v4.b32 {b0, b1, b2, b3}, [a]; '
            'st.shared.v4.b32 [s], {b0, b1, b2, b3}; }')  # fmt: skip
    return assembly(_over_bytes(line), kinds), assembly('', ())


load_float = assembly('ld.global.cg.f32 $0, [$1];', (types.int64,), types.float32)
"""The float32 at an address, as another block may just have written it."""

def make_dot(count: int):
    """
    Return ``dot(x, weights, stride, size)``: a row in shared memory by a column of a matrix.

    ``count`` loads of a thread are under way together; the sum is float32, in order. ``x`` int32:
    address of float32 [size] in shared memory; ``weights`` int64: address of the column's first
    float32; ``stride`` int64: bytes from one to the next.
    """
    lines = [
        '.reg .pred p;', '.reg .b64 w;', '.reg .s32 n, x;', '.reg .f32 total;',
        f'.reg .f32 a<{count}>, b<{count}>;', 'mov.b32 x, $1;', 'mov.b64 w, $2;', 'mov.s32 n, $4;',
        'mov.f32 total, 0f00000000;', 'NEXT:', f'setp.lt.s32 p, n, {count};', '@p bra REST;',
    ]  # fmt: skip
    for i in range(count):
        lines += [f'ld.global.nc.f32 b{i}, [w];', 'add.s64 w, w, $3;']
    lines += [f'ld.shared.f32 a{i}, [x+{4 * i}];' for i in range(count)]
    lines += [f'fma.rn.f32 total, a{i}, b{i}, total;' for i in range(count)]
    lines += [f'add.s32 x, x, {4 * count};', f'sub.s32 n, n, {count};', 'bra NEXT;', 'REST:']
    for i in range(count - 1):
        lines += [
            f'mov.f32 a{i}, 0f00000000;', f'mov.f32 b{i}, 0f00000000;', f'setp.gt.s32 p, n, {i};',
            f'@p ld.global.nc.f32 b{i}, [w];', f'@p ld.shared.f32 a{i}, [x+{4 * i}];',
            'add.s64 w, w, $3;',
        ]  # fmt: skip
    lines += [f'fma.rn.f32 total, a{i}, b{i}, total;' for i in range(count - 1)]
    lines += ['mov.f32 $0, total;']
    kinds = (types.int32, types.int64, types.int64, types.int32)
    return assembly(block_of(lines), kinds, types.float32)


def make_mix(count: int):
    """
    Return ``mix(parts, stride, shares, num, out)``: a weighted sum of four neighbours of parts.

    All loads of a thread are under way together. ``parts`` int64: address of the first part's
    four float16; ``stride`` int64: bytes from part to part; ``shares`` int32: address of float32
    [num] in shared memory; ``num`` int32 <= ``count``; ``out`` int64: generic address of the four
    float16 results.
    """
    lines = [
        '.reg .pred p;', '.reg .b64 a;', f'.reg .b32 v<{2 * count}>, low, high;',
        '.reg .b16 h0, h1, h2, h3;', '.reg .f32 w, x, s0, s1, s2, s3;', 'mov.b64 a, $0;',
        *(f'mov.f32 s{i}, 0f00000000;' for i in range(4)),
    ]  # fmt: skip
    for part in range(count):
        lines += [
            f'setp.gt.s32 p, $3, {part};',
            f'@p ld.global.cg.v2.b32 {{v{2 * part}, v{2 * part + 1}}}, [a];', 'add.s64 a, a, $1;',
        ]  # fmt: skip
    for part in range(count):
        lines += [
            f'setp.le.s32 p, $3, {part};', '@p bra DONE;', f'ld.shared.f32 w, [$2+{4 * part}];',
            f'mov.b32 {{h0, h1}}, v{2 * part};', f'mov.b32 {{h2, h3}}, v{2 * part + 1};',
        ]  # fmt: skip
        for i in range(4):
            lines += [f'cvt.f32.f16 x, h{i};', f'fma.rn.f32 s{i}, w, x, s{i};']
    lines += [
        'DONE:', *(f'cvt.rn.f16.f32 h{i}, s{i};' for i in range(4)),
        'mov.b32 low, {h0, h1};', 'mov.b32 high, {h2, h3};', 'st.v2.b32 [$4], {low, high};',
    ]  # fmt: skip
    kinds = (types.int64, types.int64, types.int32, types.int32, types.int64)
    return assembly(block_of(lines), kinds)


def make_sum(count: int):
    """
    Return ``add(parts, stride, num, out)``: four neighbours of float32 parts onto ``out``.

    As :func:`make_mix`, with weights of one; ``out`` int32 is the address of four float32 in
    shared memory, to which the parts are added in order.
    """
    lines = [
        '.reg .pred p;', '.reg .b64 a;', f'.reg .f32 v<{4 * count}>, s<4>;', 'mov.b64 a, $0;',
    ]  # fmt: skip
    for part in range(count):
        names = ', '.join(f'v{4 * part + i}' for i in range(4))
        lines += [
            f'setp.gt.s32 p, $2, {part};', f'@p ld.global.cg.v4.f32 {{{names}}}, [a];',
            'add.s64 a, a, $1;',
        ]  # fmt: skip
    lines += ['ld.shared.v4.f32 {s0, s1, s2, s3}, [$3];']
    for part in range(count):
        lines += [f'setp.le.s32 p, $2, {part};', '@p bra DONE;']
        lines += [f'add.f32 s{i}, s{i}, v{4 * part + i};' for i in range(4)]
    lines += ['DONE:', 'st.shared.v4.f32 [$3], {s0, s1, s2, s3};']
    return assembly(block_of(lines), (types.int64, types.int64, types.int32, types.int32))


def make_turn(head_dim: int):
    """
    Return ``turn(keys, next_keys, values, next_values, cosine, sine, rotated, pairs, both)``.

    Four neighbours of both halves of an even rank and of the next one, all loads under way
    together. ``keys``, ``next_keys`` int64: addresses of float32; ``values``, ``next_values``
    int64: of float16; ``cosine``, ``sine`` int64: of the rank's float32, the next rank's behind
    them; ``rotated``, ``pairs`` int64: where the float16 of both ranks go; ``both`` int32: 0
    leaves the next rank out.
    """
    half = head_dim // 2
    lines = [
        '.reg .pred p;', '.reg .f32 k<16>, c<8>, s<8>, x, y;', '.reg .b32 v<8>, w<4>;',
        '.reg .b16 h<4>;', 'setp.ne.s32 p, $8, 0;',
    ]  # fmt: skip

    def four(name, first):
        return '{' + ', '.join(f'{name}{first + i}' for i in range(4)) + '}'

    for rank in (0, 1):
        for part in (0, 1):
            lines += [f'ld.global.v4.f32 {four("k", 8 * rank + 4 * part)}, '
                      f'[${rank}+{4 * half * part}];']  # fmt: skip
            v = 4 * rank + 2 * part
            lines += [f'ld.global.v2.b32 {{v{v}, v{v + 1}}}, [${2 + rank}+{2 * half * part}];']
        lines += [f'ld.global.v4.f32 {four("c", 4 * rank)}, [$4+{4 * half * rank}];',
                  f'ld.global.v4.f32 {four("s", 4 * rank)}, [$5+{4 * half * rank}];']  # fmt: skip
    for rank in (0, 1):
        for part in (0, 1):
            for i in range(4):
                low, high = f'k{8 * rank + i}', f'k{8 * rank + 4 + i}'
                mine, other = (low, high) if part == 0 else (high, low)
                c, s = f'c{4 * rank + i}', f's{4 * rank + i}'
                lines += [
                    f'mul.f32 x, {other}, {s};', *([] if part else ['neg.f32 x, x;']),
                    f'fma.rn.f32 x, {mine}, {c}, x;',
                    'max.f32 y, x, 0fC77FE000;', 'min.f32 y, y, 0f477FE000;',
                    f'cvt.rn.f16.f32 h{i}, y;',
                ]  # fmt: skip
            lines += [
                'mov.b32 w0, {h0, h1};', 'mov.b32 w1, {h2, h3};',
                f'{"@p " if rank else ""}st.global.v2.b32 '
                f'[$6+{2 * head_dim * rank + 2 * half * part}], {{w0, w1}};',
            ]  # fmt: skip
    for part in (0, 1):
        for word in (0, 1):
            lines += [
                f'mov.b32 {{h0, h1}}, v{2 * part + word};',
                f'mov.b32 {{h2, h3}}, v{4 + 2 * part + word};',
                f'mov.b32 w{2 * word}, {{h0, h2}};', f'mov.b32 w{2 * word + 1}, {{h1, h3}};',
            ]  # fmt: skip
        lines += [f'st.global.v4.b32 [$7+{2 * head_dim * part}], {four("w", 0)};']
    return assembly(block_of(lines), (types.int64,) * 8 + (types.int32,))
