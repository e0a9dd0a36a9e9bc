"""bfloat16 has no NumPy type: it is kept as uint16, the upper half of a float32."""

import numpy as np


def to_float32(values: np.ndarray) -> np.ndarray:
    """Return float32 values; uint16 is read as bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, dtype=np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round finite float values to the nearest bfloat16 (ties to even), as uint16."""
    if values.dtype == np.uint16:
        return values
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def convert(values: np.ndarray, weights_dtype: str) -> np.ndarray:
    """Return values as 'float32' or 'bfloat16', whichever of the two they come in."""
    return to_bfloat16(values) if weights_dtype == 'bfloat16' else to_float32(values)
