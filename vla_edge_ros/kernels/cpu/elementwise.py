"""Normalisation and activation over rows; all may work in place."""

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
import numpy as np

from vla_edge_ros.kernels.checks import check_array
from vla_edge_ros.kernels.cpu.compiled import compiled

_LOG2_E = np.float32(1.4426950408889634)
# 2**f on [0, 1): least-maximum fit with the constant fixed at 1, relative error 2e-9.
_C1 = np.float32(0.693147044)
_C2 = np.float32(0.240229306)
_C3 = np.float32(0.0554852805)
_C4 = np.float32(0.00967545173)
_C5 = np.float32(0.00124678451)
_C6 = np.float32(0.00021612919)
_ONE = np.float32(1)


@intrinsic
def _float_from_bits(typing_context, bits):
    """Read an int32 as the float32 of the same bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def larger(typing_context, x, y):
    """Return the larger of two float32, neither NaN; Python's ``max`` does not vectorise."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        maxnum = cgutils.get_or_insert_function(builder.module, kind, 'llvm.maxnum.f32')
        return builder.call(maxnum, args, fastmath=('nnan', 'nsz'))

    return types.float32(types.float32, types.float32), codegen


@compiled
def exponential(x):
    """Return ``e**x`` of a float32; a plain polynomial, so that loops over it vectorise."""
    power = min(max(x * _LOG2_E, np.float32(-126)), np.float32(127))
    whole = np.floor(power)
    part = power - whole
    value = _C6
    value = value * part + _C5
    value = value * part + _C4
    value = value * part + _C3
    value = value * part + _C2
    value = value * part + _C1
    value = value * part + _ONE
    return value * _float_from_bits(np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)))


@compiled
def rms_norm_row(x, weight, eps, out):
    """Write ``weight * x / sqrt(mean(x**2) + eps)`` of one row as long as ``weight``."""
    size = weight.shape[0]
    squares = np.float32(0)
    for i in range(size):
        squares += x[i] * x[i]
    scale = _ONE / np.float32(math.sqrt(squares / np.float32(size) + eps))
    for i in range(size):
        out[i] = weight[i] * (x[i] * scale)


@compiled
def swiglu_row(gate, up, out):
    """Write ``silu(gate) * up`` of one row."""
    for i in range(out.shape[0]):
        out[i] = gate[i] / (_ONE + exponential(-gate[i])) * up[i]


@compiled
def _layer_norm(x, weight, bias, eps, out):
    size = np.float32(x.shape[1])
    for row in range(x.shape[0]):
        total = np.float32(0)
        for i in range(x.shape[1]):
            total += x[row, i]
        mean = total / size
        squares = np.float32(0)
        for i in range(x.shape[1]):
            squares += (x[row, i] - mean) * (x[row, i] - mean)
        scale = _ONE / np.float32(math.sqrt(squares / size + eps))
        for i in range(x.shape[1]):
            out[row, i] = (x[row, i] - mean) * scale * weight[i] + bias[i]


@compiled
def _swiglu(gate, up, out):
    for row in range(out.shape[0]):
        swiglu_row(gate[row], up[row], out[row])


def layer_norm(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, out: np.ndarray
) -> np.ndarray:
    """
    Normalise each row of ``x`` to mean 0 and variance 1, then scale and shift.

    Parameters
    ----------
    x, out : float32 [rows, size]
        Input and output; may be the same array.
    weight, bias : float32 [size]
        Gain and shift.
    eps : float
        Added to the variance.

    """
    _check_rows(x, out)
    check_array('weight', weight, (x.shape[1],), np.float32)
    check_array('bias', bias, (x.shape[1],), np.float32)
    _layer_norm(x, weight, bias, np.float32(eps), out)
    return out


def swiglu(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Compute ``out = silu(gate) * up``; all float32 [rows, size], ``out`` may be an input."""
    _check_rows(gate, out)
    check_array('up', up, gate.shape, np.float32)
    _swiglu(gate, up, out)
    return out


def _check_rows(x, out):
    check_array('x', x, (None, None), np.float32)
    check_array('out', out, x.shape, np.float32)
