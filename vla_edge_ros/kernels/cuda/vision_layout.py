"""Every array of the CUDA vision encoder: names, shapes, and what a block of it needs."""

from collections.abc import Mapping

import numpy as np

from vla_edge_ros.kernels.cuda.driver import DEFAULT_SHARED_BYTES
from vla_edge_ros.kernels.cuda.resize import table_words
from vla_edge_ros.kernels.memory_plan import Buffer, GPU, PINNED

MAX_FRAME_BYTES = 1920 * 1080 * 3
"""Of a picture that is resized on the GPU; the processor resizes a larger one before it."""
VISION_THREADS = 512
"""Of a block that encodes."""
POOL_COLUMNS = 32
"""Columns of the pooled token that one block computes."""
_RESERVED_BYTES = 2048
"""Of shared memory, for sums and for the system."""


def encode_bytes(config) -> int:
    """Return the shared memory of a block that encodes: a row, its features, a product."""
    width, inner = config.vision_hidden_size, config.vision_intermediate_size
    products = max(VISION_THREADS, width, 2 * inner, config.transformer.hidden_size)
    return 4 * (max(patch_numbers(config), inner) + width + products)


def pool_bytes(config) -> int:
    """Return the shared memory of a block that pools."""
    return 4 * (config.vision_hidden_size + VISION_THREADS)


def fits(config) -> bool:
    """Return whether the rows of an encoder fit what a block holds."""
    return max(encode_bytes(config), pool_bytes(config)) <= DEFAULT_SHARED_BYTES - _RESERVED_BYTES


def patch_numbers(config) -> int:
    """Return how many numbers a patch has."""
    return 3 * config.patch_size**2


def memory_plan(config) -> list[Buffer]:
    """Return every buffer, on the device or pinned, that a ``Vision`` of this shape holds."""
    patches, depth = config.patch_rows * config.patch_columns, patch_numbers(config)
    width, inner = config.vision_hidden_size, config.vision_intermediate_size
    hidden = config.transformer.hidden_size
    words = table_words(config.image_height, config.image_width)
    f32, i32, u8 = 'float32', 'int32', 'uint8'
    plan = [
        Buffer('vision.patch_embed', (depth, width), f32),
        Buffer('vision.positions', (patches, width), f32),
        Buffer('vision.norm1', (2, width), f32),
        Buffer('vision.gate_up', (width, 2 * inner), f32),
        Buffer('vision.down', (inner, width), f32),
        Buffer('vision.norm2', (2, width), f32),
        Buffer('patch_projector.weight', (width, hidden), f32),
        Buffer('patch_projector.bias', (hidden,), f32),
        Buffer('pooled_projector.weight', (width, hidden), f32),
        Buffer('pooled_projector.bias', (hidden,), f32),
        Buffer('vision.levels', (2, 3), f32),
        Buffer('vision.frame', (MAX_FRAME_BYTES,), u8),
        Buffer('vision.table', (words,), i32),
        Buffer('vision.patches', (patches, depth), f32),
        Buffer('vision.features', (patches, width), f32),
        Buffer('vision.tokens', (patches + 2, hidden), f32),
        Buffer('vision.embedding', (width,), f32),
    ]
    return [
        *(buffer._replace(place=GPU) for buffer in plan),
        Buffer('vision.host_frame', (MAX_FRAME_BYTES,), u8, PINNED),
        Buffer('vision.host_table', (words,), i32, PINNED),
        Buffer('vision.host_row', (hidden,), f32, PINNED),
        Buffer('vision.host_embedding', (width,), f32, PINNED),
    ]


def arrange(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """
    Bring an encoder's weights into the order of the kernels.

    Parameters
    ----------
    weights : mapping of str to float32 ndarray
        Tensors of the checkpoint by name, with ``vision.positions`` [patches, width].

    Returns
    -------
    dict of str to ndarray
        By name of a buffer of :func:`memory_plan`; matrices are [depth, columns].

    """
    def turned(*names: str) -> np.ndarray:
        return np.concatenate([weights[f'{name}.weight'] for name in names]).T

    def norm(name: str) -> np.ndarray:
        return np.stack([weights[f'vision.{name}.{part}'] for part in ('weight', 'bias')])

    return {
        'vision.patch_embed': turned('vision.patch_embed'),
        'vision.positions': weights['vision.positions'] + weights['vision.patch_embed.bias'],
        'vision.norm1': norm('norm1'),
        'vision.gate_up': turned('vision.mlp.gate_proj', 'vision.mlp.up_proj'),
        'vision.down': turned('vision.mlp.down_proj'),
        'vision.norm2': norm('norm2'),
        **{f'{name}.weight': turned(name) for name in ('patch_projector', 'pooled_projector')},
        **{name: weights[name] for name in ('patch_projector.bias', 'pooled_projector.bias')},
    }
