"""
Vision encoder: an image to one token a patch, one pooled token, and an embedding for eviction.

Patch projection, fixed sine-cosine positions, LayerNorm, a SwiGLU block, LayerNorm, and two
projectors into the transformer's width. All of it runs on the chosen backend: on its operations,
or, where it has an encoder of its own, in that one. :func:`make_encoder` tells which.
"""

import cv2
import numpy as np

from vla_edge_ros.errors import ShapeError
from vla_edge_ros.kernels.device_array import DeviceArray
from vla_edge_ros.kernels.memory_plan import allocate, Buffer
from vla_edge_ros.policy.policy_config import PolicyConfig

_EPS = 1e-5  # the default of torch.nn.LayerNorm, with which the weights are trained


def sincos_positions(rows: int, columns: int, width: int) -> np.ndarray:
    """
    Return fixed 2-D position embeddings, float32 [rows * columns, width].

    The first half of ``width`` encodes the row, the second the column; sines before cosines,
    as in the fixed embeddings of MAE (He et al. 2021, arXiv:2111.06377).
    """
    quarter = width // 4
    frequencies = 1.0 / 10000 ** (np.arange(quarter) / quarter)
    row_angles = np.repeat(np.arange(rows), columns)[:, None] * frequencies
    column_angles = np.tile(np.arange(columns), rows)[:, None] * frequencies
    parts = [np.sin(row_angles), np.cos(row_angles), np.sin(column_angles), np.cos(column_angles)]
    return np.concatenate(parts, axis=1).astype(np.float32)


def resize_rgb8(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """
    Return ``image`` as C-contiguous ``uint8 [height, width, 3]``.

    Shrinking averages areas, so that small objects do not flicker; growing is bilinear.
    """
    if image.shape[:2] == (height, width):
        return np.ascontiguousarray(image)
    shrinks = width <= image.shape[1] and height <= image.shape[0]
    interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    return cv2.resize(image, (width, height), interpolation=interpolation)


def standardise(image: np.ndarray, config: PolicyConfig) -> np.ndarray:
    """Map uint8 [..., 3] to float32 with the checkpoint's mean and deviation per channel."""
    scale, shift = _levels(config)
    return image * scale - shift


def _levels(config: PolicyConfig) -> np.ndarray:
    """Return float32 [2, 3]: what each channel is multiplied by, and what is then subtracted."""
    mean, deviation = np.asarray(config.image_mean), np.asarray(config.image_std)
    return np.stack([1.0 / (255.0 * deviation), mean / deviation]).astype(np.float32)


def check_image(image: np.ndarray | DeviceArray) -> None:
    """
    Check that an image is something to look at.

    Raises
    ------
    ShapeError
        It is empty, or has another number of axes, of channels or another dtype.

    """
    shape = image.shape
    if len(shape) != 3 or shape[2] != 3 or 0 in shape or image.dtype != np.uint8:
        rule = 'must be uint8 [height, width, 3] and not empty'
        raise ShapeError('image', rule, f'{np.dtype(image.dtype)} {shape}')


def weight_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the encoder and its projectors."""
    width, inner = config.vision_hidden_size, config.vision_intermediate_size
    hidden = config.transformer.hidden_size
    return {
        'vision.patch_embed.weight': (width, 3 * config.patch_size**2),
        'vision.patch_embed.bias': (width,),
        'vision.norm1.weight': (width,), 'vision.norm1.bias': (width,),
        'vision.mlp.gate_proj.weight': (inner, width),
        'vision.mlp.up_proj.weight': (inner, width),
        'vision.mlp.down_proj.weight': (width, inner),
        'vision.norm2.weight': (width,), 'vision.norm2.bias': (width,),
        'patch_projector.weight': (hidden, width), 'patch_projector.bias': (hidden,),
        'pooled_projector.weight': (hidden, width), 'pooled_projector.bias': (hidden,),
    }


def memory_plan(config: PolicyConfig, kernels) -> list[Buffer]:
    """Return every buffer of an encoder on a backend, the weights first."""
    own = _encoder_of(kernels, config)
    if own is not None:
        return own.memory_plan(config)
    shapes = weight_shapes(config)
    return [
        *(Buffer(name, shape, 'float32') for name, shape in shapes.items()), *buffer_plan(config)]


def make_encoder(config: PolicyConfig, weights: dict, kernels, engine):
    """
    Return the encoder of one checkpoint on one backend.

    Parameters
    ----------
    config : PolicyConfig
        Of the checkpoint.
    weights : mapping of str to array
        Tensors named ``vision.*``, ``patch_projector.*`` and ``pooled_projector.*``, float32.
    kernels : module
        A backend of ``vla_edge_ros.kernels``.
    engine : Engine
        The decoder beside it.

    """
    own = _encoder_of(kernels, config)
    if own is None:
        return VisionEncoder(config, weights, kernels)
    weights = {**weights, 'vision.positions': _positions(config)}
    return DeviceVisionEncoder(config, own(config, weights, _levels(config), _EPS, engine))


def _encoder_of(kernels, config: PolicyConfig):
    """Return the backend's own encoder if it has one that this checkpoint fits, else None."""
    own = getattr(kernels, 'Vision', None)
    return own if own is not None and own.fits(config) else None


def _positions(config: PolicyConfig) -> np.ndarray:
    return sincos_positions(config.patch_rows, config.patch_columns, config.vision_hidden_size)


def buffer_plan(config: PolicyConfig) -> list[Buffer]:
    """Return every buffer an encoder on a backend's operations works in."""
    patches, width = config.patch_rows * config.patch_columns, config.vision_hidden_size
    inner, hidden = config.vision_intermediate_size, config.transformer.hidden_size
    return [
        Buffer('vision.x', (patches, width), 'float32'),
        Buffer('vision.branch', (patches, width), 'float32'),
        Buffer('vision.gate', (patches, inner), 'float32'),
        Buffer('vision.up', (patches, inner), 'float32'),
        Buffer('vision.tokens', (patches + 2, hidden), 'float32'),
    ]


class VisionEncoder:
    """
    Run the encoder of one checkpoint on the operations of one backend.

    Parameters
    ----------
    config : PolicyConfig
    weights : mapping of str to array
        Tensors named ``vision.*``, ``patch_projector.*`` and ``pooled_projector.*``.
    kernels : module
        A backend of ``vla_edge_ros.kernels``.

    """

    frame_target = None
    """What could take frames from a reader; the processor needs nothing."""

    def __init__(self, config: PolicyConfig, weights: dict, kernels):
        self._config = config
        self._kernels = kernels
        self._weights = {
            name: kernels.pack_linear(tensor) if tensor.ndim == 2 else tensor
            for name, tensor in weights.items()}
        self._positions = _positions(config)
        buffers = allocate(buffer_plan(config))
        self._x, self._branch, self._gate, self._up, self._tokens = buffers.values()

    def preprocess(self, image: np.ndarray) -> np.ndarray:
        """
        Resize an image to the checkpoint's size, standardise it and cut it into patches.

        Parameters
        ----------
        image : uint8 [height, width, 3]
            RGB; any size, stretched to the policy's where the aspect ratio differs.

        Returns
        -------
        float32 [patches, 3 * patch_size**2]

        Raises
        ------
        ShapeError
            See :func:`check_image`.

        """
        check_image(image)
        c = self._config
        image = resize_rgb8(image, c.image_width, c.image_height)
        p = c.patch_size
        x = standardise(image, c).reshape(c.patch_rows, p, c.patch_columns, p, 3)
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3, 4).reshape(-1, 3 * p * p))

    def encode(
        self, patches: np.ndarray, last_row: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Encode patches [patches, 3 * patch_size**2].

        Returns
        -------
        tokens : float32 [patches + 2, hidden]
            One token a patch, the pooled token, and ``last_row``; overwritten by the next call.
        embedding : float32 [vision_hidden_size]
            Mean feature of the frame, which eviction compares.

        """
        k, w, x = self._kernels, self._weights, self._x
        k.linear(patches, w['vision.patch_embed.weight'], w['vision.patch_embed.bias'], x)
        x += self._positions
        k.layer_norm(x, w['vision.norm1.weight'], w['vision.norm1.bias'], _EPS, x)
        k.linear(x, w['vision.mlp.gate_proj.weight'], None, self._gate)
        k.linear(x, w['vision.mlp.up_proj.weight'], None, self._up)
        k.swiglu(self._gate, self._up, self._gate)
        x += k.linear(self._gate, w['vision.mlp.down_proj.weight'], None, self._branch)
        k.layer_norm(x, w['vision.norm2.weight'], w['vision.norm2.bias'], _EPS, x)
        embedding = x.mean(axis=0)
        tokens = self._tokens
        k.linear(x, w['patch_projector.weight'], w['patch_projector.bias'], tokens[:-2])
        k.linear(
            embedding[None], w['pooled_projector.weight'], w['pooled_projector.bias'],
            tokens[-2:-1])
        tokens[-1] = last_row
        return tokens, embedding


class DeviceVisionEncoder:
    """
    Run the encoder that a backend has on its device; same methods as ``VisionEncoder``.

    Parameters
    ----------
    config : PolicyConfig
    vision
        With ``frames``, the way of pictures to the device, and ``encode``.

    Attributes
    ----------
    frame_target
        What takes frames to the device by itself, for a ``FrameReader``.

    """

    def __init__(self, config: PolicyConfig, vision):
        self._config = config
        self._vision = vision
        self.frame_target = vision.frames

    def preprocess(self, image: np.ndarray | DeviceArray) -> DeviceArray:
        """
        Bring an image to the device, where resizing and the rest are part of encoding.

        Raises
        ------
        ShapeError
            See :func:`check_image`.

        """
        check_image(image)
        if isinstance(image, DeviceArray):
            return image
        if not self.frame_target.holds(image.shape):
            image = resize_rgb8(image, self._config.image_width, self._config.image_height)
        return self.frame_target.put(image)

    def encode(
        self, picture: DeviceArray, last_row: np.ndarray,
    ) -> tuple[DeviceArray, np.ndarray]:
        """Encode what :meth:`preprocess` returned; the tokens stay on the device."""
        return self._vision.encode(picture, last_row)
