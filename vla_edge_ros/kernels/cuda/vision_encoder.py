"""
The vision encoder on a GPU: a picture in, the tokens of its frame where a prefill takes them.

Three kernels (``vision.py``) recorded as one graph. The tokens stay on the device; what comes back
is the embedding that eviction compares, a few hundred bytes, because only then the slots of the
frame are known.
"""

from collections.abc import Mapping

import numpy as np

from vla_edge_ros.kernels.cuda import vision_layout
from vla_edge_ros.kernels.cuda.constants import DEPENDENT_LAUNCH, THREADS
from vla_edge_ros.kernels.cuda.frames import FrameUpload
from vla_edge_ros.kernels.cuda.resize import Resize
from vla_edge_ros.kernels.cuda.vision_layout import POOL_COLUMNS, VISION_THREADS
from vla_edge_ros.kernels.device_array import DeviceArray
from vla_edge_ros.kernels.memory_plan import Buffer, GPU, PINNED


class Vision:
    """
    One encoder beside the decoder of one engine.

    Parameters
    ----------
    config : PolicyConfig
        Shape of the encoder, which ``fits``.
    weights : mapping of str to float32 ndarray
        Tensors of the checkpoint by name, and ``vision.positions`` [patches, vision_hidden_size].
    levels : float32 [2, 3]
        Scale and shift that standardise each channel.
    eps : float
        Added to variances.
    engine : Engine
        Whose device and kernels are used; it stays as long as this.

    Attributes
    ----------
    frames : FrameUpload
        How pictures reach the device.

    Raises
    ------
    MemoryError
        The device has no more memory.

    """

    fits = staticmethod(vision_layout.fits)

    def __init__(
        self, config, weights: Mapping[str, np.ndarray], levels: np.ndarray, eps: float, engine,
    ):
        self._config, self._eps, self._engine = config, eps, engine
        self._device = device = engine.device
        device.use()
        plan = self.memory_plan(config)
        self._plan = {buffer.name: buffer for buffer in plan}
        self._at = {b.name: device.allocate(b.bytes) for b in plan if b.place == GPU}
        self._pinned = {
            b.name: device.allocate_pinned(b.shape, b.dtype) for b in plan if b.place == PINNED}
        for name, array in {**vision_layout.arrange(weights), 'vision.levels': levels}.items():
            array = np.ascontiguousarray(array, np.float32)
            device.copy_in(self._at[name], array)
            device.wait()
        self.frames = FrameUpload(
            device, self._at['vision.frame'], self._pinned['vision.host_frame'])
        self._size: tuple[int, ...] = ()
        self._graph = device.record(self._queue)

    @staticmethod
    def memory_plan(config) -> list[Buffer]:
        """Return every buffer of an encoder."""
        return vision_layout.memory_plan(config)

    def encode(self, picture: DeviceArray, last_row: np.ndarray) -> tuple[DeviceArray, np.ndarray]:
        """
        Resize, standardise and encode a picture.

        Parameters
        ----------
        picture : DeviceArray, uint8 [height, width, 3]
            Of ``frames``.
        last_row : [hidden]
            What follows behind the tokens of the picture.

        Returns
        -------
        tokens : DeviceArray, float32 [patches + 2, hidden]
            A token a patch, the pooled one and ``last_row``; overwritten by the next call.
        embedding : float32 [vision_hidden_size]
            Mean feature of the frame.

        """
        device, pinned = self._device, self._pinned
        device.use()
        if picture.shape != self._size:
            c = self._config
            pinned['vision.host_table'][:] = Resize(
                *picture.shape[:2], c.image_height, c.image_width).table()
            device.copy_in(self._at['vision.table'], pinned['vision.host_table'])
            self._size = picture.shape
        pinned['vision.host_row'][:] = last_row
        device.run(self._graph)
        device.wait()
        tokens = self._plan['vision.tokens']
        return (DeviceArray(self._at['vision.tokens'], tokens.shape, np.float32),
                pinned['vision.host_embedding'].copy())  # fmt: skip

    def _queue(self) -> None:
        device, at = self._device, self._at
        dependent = device.capability >= DEPENDENT_LAUNCH
        row_bytes = self._pinned['vision.host_row'].nbytes
        tokens = self._plan['vision.tokens']
        device.copy_in(
            at['vision.tokens'] + tokens.bytes - row_bytes, self._pinned['vision.host_row'])
        for index, launch in enumerate(self._launches(row_bytes)):
            device.launch(launch, dependent and index > 0)
        device.copy_out(self._pinned['vision.host_embedding'], at['vision.embedding'])

    def _launches(self, row_bytes: int) -> list:
        at, c, prepare = self._at, self._config, self._device.prepare
        patches, depth = c.patch_rows * c.patch_columns, vision_layout.patch_numbers(c)
        width, inner = c.vision_hidden_size, c.vision_intermediate_size
        hidden = c.transformer.hidden_size
        return [
            prepare(
                'vision_resize', (-(-patches * depth // THREADS),), THREADS, 'pppp' + 'iiii' + 'p',
                at['vision.frame'], at['vision.table'], at['vision.table'], at['vision.levels'],
                c.image_height, c.patch_columns, c.patch_size, patches * depth,
                at['vision.patches']),
            prepare(
                'vision_encode', (patches,), VISION_THREADS, 'p' * 9 + 'iiiif' + 'pp',
                at['vision.patches'], at['vision.patch_embed'], at['vision.positions'],
                at['vision.norm1'], at['vision.gate_up'], at['vision.down'], at['vision.norm2'],
                at['patch_projector.weight'], at['patch_projector.bias'], depth, width, inner,
                hidden, self._eps, at['vision.features'], at['vision.tokens'],
                shared=vision_layout.encode_bytes(c)),
            prepare(
                'vision_pool', (-(-hidden // POOL_COLUMNS),), VISION_THREADS, 'ppp' + 'iii' + 'pp',
                at['vision.features'], at['pooled_projector.weight'],
                at['pooled_projector.bias'], patches, width, hidden, at['vision.embedding'],
                at['vision.tokens'] + patches * row_bytes,
                shared=vision_layout.pool_bytes(c)),
        ]  # fmt: skip
