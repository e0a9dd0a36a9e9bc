"""Image conversion: every encoding, padded and big-endian rows, and messages that lie."""

import array
from types import SimpleNamespace
import warnings

import cv2
import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError, ImageError
from vla_edge_ros.nodes.conversions import (
    compressed_to_rgb8,
    ENCODINGS,
    image_to_rgb8,
    joint_positions,
    resize_rgb8,
)

COLOUR = (200, 90, 30)
HEIGHT, WIDTH = 6, 8


def flat(colour=COLOUR):
    """Return an image of one colour, where every chroma subsampling is exact."""
    return np.broadcast_to(np.uint8(colour), (HEIGHT, WIDTH, 3)).copy()


def mosaic(rgb, pattern):
    """Sample ``rgb`` through a two by two Bayer pattern such as 'rggb'."""
    image = np.empty(rgb.shape[:2], np.uint8)
    for index, letter in enumerate(pattern):
        row, column = divmod(index, 2)
        image[row::2, column::2] = rgb[row::2, column::2, 'rgb'.index(letter)]
    return image


def yuv422(rgb, luma_first):
    """Pack ``rgb`` as YUYV or UYVY by the BT.601 studio-swing definition."""
    red, green, blue = (rgb[..., c].astype(float) for c in range(3))
    luma = 16 + 0.257 * red + 0.504 * green + 0.098 * blue
    u = 128 - 0.148 * red - 0.291 * green + 0.439 * blue
    v = 128 + 0.439 * red - 0.368 * green - 0.071 * blue
    chroma = np.empty_like(luma)
    chroma[:, 0::2], chroma[:, 1::2] = u[:, 0::2], v[:, 0::2]
    pair = (luma, chroma) if luma_first else (chroma, luma)
    return np.rint(np.stack(pair, axis=-1)).astype(np.uint8)


def encode(encoding, rgb):
    """Return ``rgb`` as the rows a driver would send, uint8 [height, row_bytes]."""
    grey = rgb[..., 0]
    alpha = np.full_like(grey, 17)[..., None]
    if encoding.startswith('bayer'):
        rows = mosaic(rgb, encoding[6:10])
    elif encoding in ('mono8', '8UC1'):
        rows = grey
    elif encoding in ('mono16', '16UC1'):
        rows = (grey.astype('<u2') * 257).view(np.uint8)
    elif encoding in ('yuv422', 'uyvy', 'yuv422_yuy2', 'yuyv'):
        rows = yuv422(rgb, luma_first='yuy' in encoding)
    else:
        rows = rgb if encoding.startswith('rgb') else rgb[..., ::-1]
        if 'a8' in encoding:
            rows = np.concatenate([rows, alpha], axis=-1)
    return np.ascontiguousarray(rows).reshape(HEIGHT, -1)


@pytest.mark.parametrize('padding', [0, 1, 13])
@pytest.mark.parametrize('encoding', ENCODINGS)
def test_every_encoding_yields_the_colour_that_was_sent(encoding, padding):
    is_grey = 'mono' in encoding or 'UC1' in encoding
    rgb = flat((COLOUR[0],) * 3 if is_grey else COLOUR)
    rows = encode(encoding, rgb)
    padded = np.pad(rows, ((0, 0), (0, padding)), constant_values=255)
    image = image_to_rgb8(encoding, HEIGHT, WIDTH, padded.shape[1], False, padded.tobytes())
    assert image.shape == (HEIGHT, WIDTH, 3) and image.dtype == np.uint8
    tolerance = 2 if 'yu' in encoding or encoding == 'uyvy' else 0
    assert np.abs(image.astype(int) - rgb).max() <= tolerance


def test_pixels_keep_their_places_in_packed_encodings():
    rgb = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    for encoding in ('rgb8', 'bgr8', 'rgba8', 'bgra8'):
        rows = encode(encoding, rgb)
        image = image_to_rgb8(encoding, HEIGHT, WIDTH, rows.shape[1], False, rows.tobytes())
        np.testing.assert_array_equal(image, rgb)


def test_big_endian_sixteen_bit_grey_equals_little_endian():
    values = np.linspace(0, 65535, HEIGHT * WIDTH).astype(np.uint16).reshape(HEIGHT, WIDTH)
    little = image_to_rgb8('mono16', HEIGHT, WIDTH, 16, False, values.astype('<u2').tobytes())
    big = image_to_rgb8('mono16', HEIGHT, WIDTH, 16, True, values.astype('>u2').tobytes())
    np.testing.assert_array_equal(big, little)
    np.testing.assert_array_equal(little[..., 0], np.rint(values * (255 / 65535)))


def test_ros_array_buffers_are_read_without_a_copy():
    data = array.array('B', encode('rgb8', flat()).tobytes())
    image = image_to_rgb8('rgb8', HEIGHT, WIDTH, WIDTH * 3, False, data)
    data[0] = 7
    assert image[0, 0, 0] == 7


@pytest.mark.parametrize(
    'change, field',
    [
        ({'encoding': 'nv21'}, 'encoding'),
        ({'encoding': '32FC1'}, 'encoding'),
        ({'encoding': ''}, 'encoding'),
        ({'height': 0}, 'height'),
        ({'width': 0}, 'width'),
        ({'width': 2**31}, 'width'),
        ({'step': WIDTH * 3 - 1}, 'step'),
        ({'step': 0}, 'step'),
        ({'data': b'\0' * (HEIGHT * WIDTH * 3 - 1)}, 'data'),
        ({'data': b''}, 'data'),
        ({'encoding': 'yuv422', 'width': 7}, 'width'),
        ({'encoding': 'bayer_rggb8', 'height': 5}, 'height'),
    ],
)
def test_a_message_that_lies_is_refused_by_field(change, field):
    message = {
        'encoding': 'rgb8',
        'height': HEIGHT,
        'width': WIDTH,
        'step': WIDTH * 3,
        'is_bigendian': False,
        'data': bytes(HEIGHT * WIDTH * 3),
    }
    with pytest.raises(ImageError) as caught:
        image_to_rgb8(**(message | change))
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize('extension', ['.jpg', '.png'])
def test_compressed_images_decode_to_rgb(extension):
    ok, data = cv2.imencode(extension, flat()[..., ::-1])
    assert ok
    image = compressed_to_rgb8(array.array('B', data.tobytes()))
    assert np.abs(image.astype(int) - flat()).max() <= 3


def test_a_cut_off_jpeg_is_refused_instead_of_painted_grey():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = cv2.imencode('.jpg', noise)[1].tobytes()
    for broken in (b'', data[: len(data) // 2], b'not an image', bytes(100)):
        with pytest.raises(ImageError, match='data'):
            compressed_to_rgb8(broken)


def test_resize_averages_down_interpolates_up_and_returns_contiguous_rows():
    checker = np.kron(np.indices((4, 4)).sum(0) % 2, np.ones((1, 1)))[..., None] * 200
    checker = np.repeat(checker, 3, axis=-1).astype(np.uint8)
    np.testing.assert_array_equal(resize_rgb8(checker, 2, 2), np.full((2, 2, 3), 100))
    assert resize_rgb8(checker, 8, 6).shape == (6, 8, 3)
    strided = np.zeros((4, 6, 3), np.uint8)[:, :4]
    assert resize_rgb8(strided, 4, 4).flags.c_contiguous


def test_joints_are_taken_by_name_in_the_order_asked_for():
    message = SimpleNamespace(name=['c', 'b', 'a'], position=[3.0, 2.0, 1.0])
    positions = joint_positions(message, ('a', 'b'))
    assert positions.dtype == np.float32 and positions.tolist() == [1.0, 2.0]


@pytest.mark.parametrize('names, positions, error', [
    (['a', 'b'], [0.5, np.nan], "position must .* of a, b, got {'b': nan}"),
    (['a', 'b'], [-np.inf, 0.5], "position must .* got {'a': -inf}"),
    (['a', 'b'], [1e300, 0.5], r"position must .* got {'a': 1e\+300}"),
    (['a', 'b'], [-1e300, -3.5e38], r"position must .* got {'a': -1e\+300, 'b': -3.5e\+38}"),
    (['a', 'b'], [0.5], "position must .* got {'b': None}"),
    (['a', 'c'], [0.5, 0.5], r"name must .* of a, b, got \['a', 'c'\]"),
    ([], [], r'name must .* got \[\]'),
])
def test_joints_that_cannot_be_used_are_told_with_their_values(names, positions, error):
    message = SimpleNamespace(name=names, position=array.array('d', positions))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(ConfigError, match=f'^joint_states.{error}$'):
            joint_positions(message, ('a', 'b'))
