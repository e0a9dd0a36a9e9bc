"""
How a picture is resized on the GPU: what ``cv2.resize`` does, as a table the kernel follows.

Shrinking both ways averages areas (``INTER_AREA``), anything else is bilinear (``INTER_LINEAR``),
as ``policy.vision.resize_rgb8`` chooses. An entry for every row and every column of the result
tells which pixels of the source it is made of and how they are weighted. The weights are OpenCV's,
the kernel adds in OpenCV's order and rounds as often: equal bytes where OpenCV does not fuse
multiplications with additions (x86), else at most one level apart.
"""

import math
from typing import NamedTuple

import numpy as np

AREA, SUM, LINEAR = range(3)
"""Weighted areas; whole pixels counted; two pixels each way in fixed point."""
HEADER_WORDS = 8
MODE, ROW_BYTES, FACTOR, HALF_UP = range(4)
"""Words of the header: a mode above, bytes of a source row, what a sum is multiplied by (float32
bits), and whether a half is rounded up instead of to even."""
ENTRY_WORDS = 5
FIRST, COUNT, WEIGHT_FIRST, WEIGHT_MIDDLE, WEIGHT_LAST = range(ENTRY_WORDS)
"""Words of an entry: first pixel, how many, and the weights (float32 bits; int32 if linear) of
the first, the last and those between."""
_LEAST_SHARE = 1e-3
_LINEAR_ONE = np.float32(2048)


class Resize(NamedTuple):
    """Sizes of a picture and of what becomes of it, px."""

    height: int
    width: int
    out_height: int
    out_width: int

    def table(self) -> np.ndarray:
        """Return int32 [table_words]: the header, then the entries of all rows and columns."""
        shrinks = self.out_width <= self.width and self.out_height <= self.height
        both = ((self.height, self.out_height), (self.width, self.out_width))
        scales = [_scale(*sizes) for sizes in both]
        cells = [round(scale) for scale in scales]
        header = np.zeros(HEADER_WORDS, np.int32)
        if not shrinks:
            mode = LINEAR
            entries = [
                _linear_entries(*sizes, keeps_shares=axis == 0) for axis, sizes in enumerate(both)]
        elif np.abs(np.subtract(scales, cells)).max() < np.finfo(float).eps:
            mode, entries = SUM, [_sum_entries(*sizes) for sizes in both]
            header[FACTOR] = np.float32(1 / math.prod(cells)).view(np.int32)
            header[HALF_UP] = cells == [2, 2]
        else:
            mode, entries = AREA, [_area_entries(*sizes) for sizes in both]
        header[MODE], header[ROW_BYTES] = mode, 3 * self.width
        return np.concatenate([header, *(part.reshape(-1) for part in entries)])


def table_words(out_height: int, out_width: int) -> int:
    """Return the size of a table, which does not depend on the size of the source."""
    return HEADER_WORDS + ENTRY_WORDS * (out_height + out_width)


def _scale(size: int, out: int) -> float:
    """Return pixels of the source for one of the result, rounded as OpenCV does."""
    return 1 / (out / size)


def _sum_entries(size: int, out: int) -> np.ndarray:
    entries = np.zeros((out, ENTRY_WORDS), np.int32)
    entries[:, COUNT] = size // out
    entries[:, FIRST] = np.arange(out) * (size // out)
    return entries


def _area_entries(size: int, out: int) -> np.ndarray:
    """Share out the pixels as OpenCV's ``computeResizeAreaTab`` does, in float64."""
    scale = _scale(size, out)
    low = np.arange(out) * scale
    high = low + scale
    cell = np.minimum(scale, size - low)
    stop = np.minimum(np.floor(high), size - 1)
    start = np.minimum(np.ceil(low), stop)
    begins = start - low > _LEAST_SHARE
    ends = high - stop > _LEAST_SHARE
    whole = (1 / cell).astype(np.float32)
    before = ((start - low) / cell).astype(np.float32)
    behind = (np.minimum(np.minimum(high - stop, 1), cell) / cell).astype(np.float32)
    entries = np.zeros((out, ENTRY_WORDS), np.int32)
    entries[:, FIRST] = start - begins
    entries[:, COUNT] = stop - start + begins + ends
    # A pixel that lies alone is the last of those behind, if it is one of them.
    first = np.where(begins, before, np.where(stop > start, whole, behind))
    last = np.where(ends, behind, np.where(stop > start, whole, before))
    for word, weights in (
        (WEIGHT_FIRST, first), (WEIGHT_MIDDLE, whole), (WEIGHT_LAST, last)
    ):
        entries[:, word] = weights.astype(np.float32).view(np.int32)
    return entries


def _linear_entries(size: int, out: int, keeps_shares: bool) -> np.ndarray:
    """
    Weigh two neighbours in 2048ths, as OpenCV does for bytes.

    Beyond the outermost pixels there is only that pixel. Of a row, both shares are then taken
    of it and rounded one by one (``keeps_shares``); a column gives all to one.
    """
    scale = _scale(size, out)
    place = ((np.arange(out) + 0.5) * scale - 0.5).astype(np.float32)
    first = np.floor(place)
    share = place - first
    alone = (first < 0) | (first >= size - 1)
    if not keeps_shares:
        share[alone] = 0
    entries = np.zeros((out, ENTRY_WORDS), np.int32)
    entries[:, FIRST] = np.clip(first, 0, size - 1)
    entries[:, COUNT] = np.where(alone, 1, 2)
    entries[:, WEIGHT_FIRST] = np.rint((1 - share) * _LINEAR_ONE)
    entries[:, WEIGHT_LAST] = np.rint(share * _LINEAR_ONE)
    return entries
