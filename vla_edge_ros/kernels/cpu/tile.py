"""
The one matrix kernel: a register tile of ``rows`` x ``vectors`` outputs, as LLVM vectors.

Numba keeps no small array in registers, so the tile is emitted as an intrinsic: accumulators,
one broadcast of ``x`` per row, one streaming load of the weights per vector, one fused
multiply-add per accumulator. Weights are packed in panels ``[depth, PANEL]`` so that the load
is contiguous; bfloat16 weights become float32 by a shift and a bitcast on the way in.
LLVM splits the vectors on machines whose registers are narrower than ``LANES``.
"""

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FEATURES = binding.get_host_cpu_features()
_WIDE = bool(_FEATURES.get('avx512f'))
_X86 = 'avx' in _FEATURES

LANES = 16 if _WIDE else 8 if _X86 else 4  # float32 values in one register
# x86 before AVX-512 has 16 vector registers, all others 32: the tile fills about half of them.
VECTORS = 4 if _WIDE or not _X86 else 2
ROWS = 4
PANEL = VECTORS * LANES  # columns of a weight panel
VALUE_VECTORS = 2
VALUE_PANEL = VALUE_VECTORS * LANES  # head_dim of the value cache is padded to a multiple
_ACCUMULATORS = 16  # enough independent chains to hide the latency of a multiply-add


def padded(size: int, multiple: int = PANEL) -> int:
    """Round ``size`` up to a multiple."""
    return -(-size // multiple) * multiple


@intrinsic
def widen(typing_context, weight):
    """Return one stored weight as float32; uint16 is bfloat16."""

    def codegen(context, builder, signature, args):
        if weight == types.float32:
            return args[0]
        upper_half = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(upper_half, ir.IntType(32)(16)), ir.FloatType())

    return types.float32(weight), codegen


def _make_tile(rows: int, vectors: int):
    """
    Make ``tile(x, x0, dx, w, w0, dw, table, depth, init, i0, di, out, o0, do)``.

    ``out[r, :] = init[r, :] + sum_k x[r, k] * w[row(k), :]`` for ``rows`` rows and ``vectors *
    LANES`` columns, where ``row(k)`` is ``table[k]``, or ``k`` when ``table`` is None. Each
    array comes with the element offset of its first value and the elements between two rows.
    """

    @intrinsic
    def tile(typing_context, x, x0, dx, w, w0, dw, table, depth, init, i0, di, out, o0, do):
        size = types.intp
        signature = types.void(
            x, size, size, w, size, size, table, size, init, size, size, out, size, size
        )

        def codegen(context, builder, signature, args):
            return _emit(context, builder, signature.args, args, rows, vectors)

        return signature, codegen

    return tile


def _emit(context, builder, kinds, args, rows, vectors):
    """Emit the tile's LLVM code; the ``alloca`` accumulators are promoted to registers."""
    x, x0, dx, w, w0, dw, table, depth, init, i0, di, out, o0, do = args
    kind_x, kind_w, kind_table, kind_init, kind_out = (kinds[i] for i in (0, 3, 6, 8, 11))
    lane = ir.FloatType()
    vector = ir.VectorType(lane, LANES)
    bits = ir.VectorType(ir.IntType(32), LANES)
    word = depth.type

    def data(kind, value):
        return context.make_array(kind)(context, builder, value).data

    def at(base, start, stride, row, column):
        offset = builder.add(builder.add(start, builder.mul(stride, row)), column)
        return builder.gep(base, [offset])

    def load(pointer, element=lane, align=4):
        kind = ir.VectorType(element, LANES)
        return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)

    def splat(value):
        nothing = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(nothing, value, ir.IntType(32)(0))
        return builder.shuffle_vector(first, nothing, ir.Constant(bits, None))

    def load_weights(row, c):
        pointer = at(w_data, w0, dw, row, word(c * LANES))
        if kind_w.dtype == types.float32:
            return load(pointer)
        upper_halves = builder.zext(load(pointer, ir.IntType(16), align=2), bits)
        return builder.bitcast(builder.shl(upper_halves, ir.Constant(bits, [16] * LANES)), vector)

    x_data, w_data = data(kind_x, x), data(kind_w, w)
    init_data, out_data = data(kind_init, init), data(kind_out, out)
    table_data = None if isinstance(kind_table, types.NoneType) else data(kind_table, table)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f'llvm.fma.v{LANES}f32'
    )
    unroll = max(1, _ACCUMULATORS // (rows * vectors))
    sums = {}
    for r in range(rows):
        for c in range(vectors):
            start = load(at(init_data, i0, di, word(r), word(c * LANES)))
            for u in range(unroll):
                sums[u, r, c] = cgutils.alloca_once(builder, vector)
                builder.store(ir.Constant(vector, None) if u else start, sums[u, r, c])

    def step(k, u):
        row = k
        if table_data is not None:
            row = builder.sext(builder.load(builder.gep(table_data, [k])), word)
        columns = [load_weights(row, c) for c in range(vectors)]
        for r in range(rows):
            value = splat(builder.load(at(x_data, x0, dx, word(r), k)))
            for c in range(vectors):
                total = builder.call(fma, [value, columns[c], builder.load(sums[u, r, c])])
                builder.store(total, sums[u, r, c])

    blocks = builder.sdiv(depth, word(unroll))
    with cgutils.for_range(builder, blocks) as loop:
        first = builder.mul(loop.index, word(unroll))
        for u in range(unroll):
            step(builder.add(first, word(u)), u)
    with cgutils.for_range(builder, depth, start=builder.mul(blocks, word(unroll))) as loop:
        step(loop.index, 0)
    for r in range(rows):
        for c in range(vectors):
            total = builder.load(sums[0, r, c])
            for u in range(1, unroll):
                total = builder.fadd(total, builder.load(sums[u, r, c]))
            pointer = at(out_data, o0, do, word(r), word(c * LANES))
            builder.store(total, builder.bitcast(pointer, vector.as_pointer()), align=4)
    return context.get_dummy_value()


tile_rows = _make_tile(ROWS, VECTORS)
tile_row = _make_tile(1, VECTORS)
value_tile_rows = _make_tile(ROWS, VALUE_VECTORS)
value_tile_row = _make_tile(1, VALUE_VECTORS)
