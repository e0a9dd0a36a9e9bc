"""
Incoming messages to plain values, with NumPy and OpenCV alone.

The functions look at fields only, so that live messages and those of a bag are read alike. Every
encoding a camera driver commonly sends becomes ``uint8 [height, width, 3]`` in R, G, B
order. Sixteen-bit grey (``mono16``, ``16UC1``) is scaled by 255/65535, as cv_bridge does.
Floating-point images have no defined brightness and are refused like any unknown encoding. A
message that contradicts itself raises ``ImageError`` before a byte of it is used.
"""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import cv2
import numpy as np

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import ConfigError, ImageError
from vla_edge_ros.policy.vision import resize_rgb8

__all__ = [
    'compressed_to_rgb8', 'image_stamp_ns', 'image_to_rgb8', 'joint_positions', 'MAX_SIDE',
    'message_to_rgb8', 'resize_rgb8', 'to_ns',
]

MAX_SIDE = 16384
FLOAT32_MAX = float(np.finfo(np.float32).max)
_JPEG_START = b'\xff\xd8'
_JPEG_END = b'\xff\xd9'


class _Layout(NamedTuple):
    """How one encoding lies in memory and which OpenCV conversion yields RGB."""

    channels: int
    item_bytes: int
    conversion: int | None
    width_multiple: int = 1
    height_multiple: int = 1


# OpenCV names a Bayer pattern after its rows as ROS does only in the four-letter constants.
_LAYOUTS = {
    'rgb8': _Layout(3, 1, None),
    'bgr8': _Layout(3, 1, cv2.COLOR_BGR2RGB),
    'rgba8': _Layout(4, 1, cv2.COLOR_RGBA2RGB),
    'bgra8': _Layout(4, 1, cv2.COLOR_BGRA2RGB),
    'mono8': _Layout(1, 1, cv2.COLOR_GRAY2RGB),
    '8UC1': _Layout(1, 1, cv2.COLOR_GRAY2RGB),
    'mono16': _Layout(1, 2, cv2.COLOR_GRAY2RGB),
    '16UC1': _Layout(1, 2, cv2.COLOR_GRAY2RGB),
    'yuv422': _Layout(2, 1, cv2.COLOR_YUV2RGB_UYVY, 2),
    'uyvy': _Layout(2, 1, cv2.COLOR_YUV2RGB_UYVY, 2),
    'yuv422_yuy2': _Layout(2, 1, cv2.COLOR_YUV2RGB_YUY2, 2),
    'yuyv': _Layout(2, 1, cv2.COLOR_YUV2RGB_YUY2, 2),
    'bayer_rggb8': _Layout(1, 1, cv2.COLOR_BayerRGGB2RGB, 2, 2),
    'bayer_bggr8': _Layout(1, 1, cv2.COLOR_BayerBGGR2RGB, 2, 2),
    'bayer_gbrg8': _Layout(1, 1, cv2.COLOR_BayerGBRG2RGB, 2, 2),
    'bayer_grbg8': _Layout(1, 1, cv2.COLOR_BayerGRBG2RGB, 2, 2),
}
ENCODINGS = tuple(_LAYOUTS)


def to_ns(stamp: Any) -> int:
    """Return a ``builtin_interfaces`` time or duration in ns."""
    return stamp.sec * NS_PER_S + stamp.nanosec


def image_stamp_ns(message: Any) -> int:
    """Return the header stamp of an image, ns; raises ``ImageError`` when nobody set it."""
    stamp_ns = to_ns(message.header.stamp)
    if stamp_ns <= 0:
        raise ImageError('header.stamp', 'must be set by the camera driver', stamp_ns)
    return stamp_ns


def joint_positions(message: Any, joint_names: Sequence[str]) -> np.ndarray:
    """
    Return the positions of ``joint_names`` in a ``JointState``, float32 in that order.

    Raises
    ------
    ConfigError
        A joint is missing, or its position is not finite or too large for float32.

    """
    rule = f'must give a finite position for each of {", ".join(joint_names)}'
    if not set(joint_names) <= set(message.name):
        raise ConfigError('joint_states.name', rule, list(message.name))
    by_name = dict(zip(message.name, message.position))
    # Compared before the conversion to float32, which would warn; NaN compares as False.
    bad = {
        name: by_name.get(name) for name in joint_names
        if not abs(by_name.get(name, math.nan)) <= FLOAT32_MAX
    }
    if bad:
        raise ConfigError('joint_states.position', rule, bad)
    return np.array([by_name[name] for name in joint_names], np.float32)


def message_to_rgb8(message: Any) -> np.ndarray:
    """
    Return the pixels of an ``Image`` or ``CompressedImage``, uint8 ``[height, width, 3]``.

    Raises
    ------
    ImageError
        The image cannot be decoded.

    """
    if hasattr(message, 'format'):
        return compressed_to_rgb8(message.data)
    return image_to_rgb8(
        message.encoding, message.height, message.width, message.step,
        bool(message.is_bigendian), message.data,
    )


def image_to_rgb8(
    encoding: str, height: int, width: int, step: int, is_bigendian: bool, data
) -> np.ndarray:
    """
    Decode the fields of a ``sensor_msgs/Image`` into RGB.

    Parameters
    ----------
    encoding : str
        One of ``ENCODINGS``.
    height, width : int
        Size in pixels.
    step : int
        Bytes from one row to the next; padding behind a row is skipped.
    is_bigendian : bool
        Byte order of sixteen-bit pixels.
    data : bytes, array.array or uint8 array
        The pixels, at least ``step * height`` bytes.

    Returns
    -------
    uint8 [height, width, 3]
        For ``rgb8`` a view of ``data`` (possibly strided), otherwise an array of its own.

    Raises
    ------
    ImageError
        Naming the field, its rule and the value that broke it.

    """
    layout = _LAYOUTS.get(encoding)
    if layout is None:
        raise ImageError('encoding', f'must be one of {", ".join(ENCODINGS)}', encoding)
    _check_side('height', height, layout.height_multiple, encoding)
    _check_side('width', width, layout.width_multiple, encoding)
    row_bytes = width * layout.channels * layout.item_bytes
    if step < row_bytes:
        rule = f'must be >= {row_bytes} bytes for {width} pixels of {encoding}'
        raise ImageError('step', rule, step)
    pixels = np.frombuffer(data, dtype=np.uint8)
    if pixels.size < step * height:
        raise ImageError('data', f'must hold step * height = {step * height} bytes', pixels.size)

    rows = pixels[: step * height].reshape(height, step)[:, :row_bytes]
    if layout.item_bytes == 2:
        wide = rows.view('>u2' if is_bigendian else '<u2').astype(np.uint16)
        rows = cv2.convertScaleAbs(wide, alpha=255.0 / 65535.0)
    if layout.channels > 1:
        rows = rows.reshape(height, width, layout.channels)
    if layout.conversion is None:
        return rows
    return cv2.cvtColor(np.ascontiguousarray(rows), layout.conversion)


def compressed_to_rgb8(data) -> np.ndarray:
    """
    Decode the data of a ``sensor_msgs/CompressedImage`` (JPEG, PNG or whatever OpenCV reads).

    Raises
    ------
    ImageError
        The data is empty, cut off or no image. OpenCV would paint a cut-off JPEG grey.

    """
    raw = bytes(data)
    if not raw:
        raise ImageError('data', 'must not be empty', 0)
    if raw.startswith(_JPEG_START) and raw.rfind(_JPEG_END) < 0:
        raise ImageError('data', 'must be a whole JPEG image (no end marker)', len(raw))
    try:
        bgr = cv2.imdecode(np.frombuffer(raw, dtype=np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:
        bgr = None
    if bgr is None:
        raise ImageError('data', 'must be a compressed image', f'{len(raw)} bytes {raw[:8]!r}')
    return cv2.cvtColor(bgr, cv2.COLOR_BGR2RGB)


def _check_side(field: str, value: int, multiple: int, encoding: str) -> None:
    if not 1 <= value <= MAX_SIDE:
        raise ImageError(field, f'must be in 1..{MAX_SIDE} pixels', value)
    if value % multiple:
        raise ImageError(field, f'must be a multiple of {multiple} for {encoding}', value)
