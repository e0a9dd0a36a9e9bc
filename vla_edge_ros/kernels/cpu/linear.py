"""Linear layers on weights packed in panels."""

import numpy as np

from vla_edge_ros.kernels.bfloat16 import convert
from vla_edge_ros.kernels.checks import check_array
from vla_edge_ros.kernels.cpu.compiled import compiled
from vla_edge_ros.kernels.cpu.tile import padded, PANEL, ROWS, tile_row, tile_rows

DEPTH_BLOCK = 512  # rows of a panel that stay in the second-level cache while x passes over them


def pack_linear(weight: np.ndarray, weights_dtype: str = 'float32') -> np.ndarray:
    """
    Pack a weight matrix once, for any number of :func:`linear` calls.

    Parameters
    ----------
    weight : float32 or uint16 (bfloat16) [out, depth]
        As a checkpoint has it.
    weights_dtype : 'float32' or 'bfloat16'
        What to hold; float32 is rounded to the nearest bfloat16.

    Returns
    -------
    float32 or uint16 [panels, depth, PANEL]
        Columns beyond ``out`` are zero.

    """
    check_array('weight', weight, (None, None), np.float32, np.uint16)
    out_size, depth = weight.shape
    weight = convert(weight, weights_dtype)
    packed = np.zeros((padded(out_size) // PANEL, depth, PANEL), weight.dtype)
    for panel, rows in enumerate(range(0, out_size, PANEL)):
        block = weight[rows : rows + PANEL]
        packed[panel, :, : len(block)] = block.T
    return packed


@compiled
def multiply(x, x_stride, rows, packed, init, init_stride, out, out_stride):
    """
    Compute ``out = init + x @ packed`` for whole panels.

    ``x`` and ``out`` are read and written from their first element with the given row strides;
    ``init`` is a padded bias with stride 0, or ``out`` itself to add to what is there. ``out``
    rows are at least ``panels * PANEL`` long. A panel block is read from memory once and passes
    over all rows; one row (decode) streams the weights once: memory bound.
    """
    panels, depth, _ = packed.shape
    flat = packed.reshape(panels * depth * PANEL)
    for panel in range(panels):
        column = panel * PANEL
        for k in range(0, depth, DEPTH_BLOCK):
            block = min(DEPTH_BLOCK, depth - k)
            source = init if k == 0 else out
            stride = init_stride if k == 0 else out_stride
            w = (panel * depth + k) * PANEL
            row = 0
            while row + ROWS <= rows:
                tile_rows(
                    x, row * x_stride + k, x_stride, flat, w, PANEL, None, block,
                    source, row * stride + column, stride,
                    out, row * out_stride + column, out_stride,
                )  # fmt: skip
                row += ROWS
            while row < rows:
                tile_row(
                    x, row * x_stride + k, x_stride, flat, w, PANEL, None, block,
                    source, row * stride + column, stride,
                    out, row * out_stride + column, out_stride,
                )  # fmt: skip
                row += 1


@compiled
def _linear(x, packed, bias, out):
    rows, columns = out.shape
    width = packed.shape[0] * PANEL
    wide = out if columns == width else np.empty((rows, width), np.float32)
    for row in range(rows):
        for column in range(columns):
            wide[row, column] = bias[column] if bias is not None else np.float32(0)
        for column in range(columns, width):
            wide[row, column] = np.float32(0)
    multiply(x, x.shape[1], rows, packed, wide, width, wide, width)
    if columns != width:
        out[:] = wide[:, :columns]


def linear(
    x: np.ndarray, packed: np.ndarray, bias: np.ndarray | None, out: np.ndarray
) -> np.ndarray:
    """
    Compute ``out = x @ weight.T + bias``.

    Parameters
    ----------
    x : float32 [rows, depth]
        Input.
    packed : float32 or uint16 [panels, depth, PANEL]
        The weight as :func:`pack_linear` returns it.
    bias : float32 [columns] or None
        Added to every row.
    out : float32 [rows, columns]
        Written whole and returned; must not overlap ``x``. Where ``columns`` is no multiple of
        ``PANEL`` a padded temporary is used.

    """
    check_array('x', x, (None, None), np.float32)
    check_array('packed', packed, (None, x.shape[1], PANEL), np.float32, np.uint16)
    check_array('out', out, (x.shape[0], None), np.float32)
    columns = out.shape[1]
    check_array('packed', packed, (padded(columns) // PANEL, None, None), np.float32, np.uint16)
    if bias is not None:
        check_array('bias', bias, (columns,), np.float32)
    _linear(x, packed, bias, out)
    return out
