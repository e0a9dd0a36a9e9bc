"""What an array must be before it reaches a kernel, which itself checks nothing."""

import numpy as np

from vla_edge_ros.errors import ShapeError


def check_array(name: str, array: np.ndarray, shape: tuple, *dtypes: type) -> None:
    """
    Check that an array is C-contiguous, of one of ``dtypes`` and of ``shape``.

    Parameters
    ----------
    name : str
        What the error calls the array.
    array : ndarray
        The candidate.
    shape : tuple of int or None
        Expected extents; None allows any.
    dtypes : type
        Allowed NumPy scalar types.

    Raises
    ------
    ShapeError
        Anything differs.

    """
    if not isinstance(array, np.ndarray):
        raise ShapeError(name, 'must be a NumPy array', type(array).__name__)
    if array.dtype.type not in dtypes:
        allowed = ' or '.join(np.dtype(dtype).name for dtype in dtypes)
        raise ShapeError(f'{name} dtype', f'must be {allowed}', array.dtype.name)
    if len(array.shape) != len(shape) or any(
        want is not None and have != want for have, want in zip(array.shape, shape)
    ):
        wanted = ', '.join('any' if size is None else str(size) for size in shape)
        raise ShapeError(f'{name} shape', f'must be ({wanted})', array.shape)
    if not array.flags.c_contiguous:
        raise ShapeError(name, 'must be C-contiguous', f'strides {array.strides}')
