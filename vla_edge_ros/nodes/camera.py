"""The camera node: image messages in, the newest RGB frame in shared memory."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
import os

import numpy as np
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image

from vla_edge_ros.errors import VlaEdgeError
from vla_edge_ros.nodes.conversions import (
    image_stamp_ns,
    MAX_SIDE,
    message_to_rgb8,
    resize_rgb8,
)
from vla_edge_ros.nodes.diagnostics import DiagnosticsTimer, ERROR, OK, Report, RosClock, WARN
from vla_edge_ros.nodes.image_backend import BACKENDS, make_decoder
from vla_edge_ros.nodes.ros_parameters import RosParameters
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.runtime.frame_buffer import FrameWriter

WARNING_PERIOD_S = 5.0
IMAGES = QoSProfile(depth=30, reliability=ReliabilityPolicy.BEST_EFFORT)
"""Sensor data QoS, but this process may stall for half a second of 60 Hz and lose nothing."""


@dataclass(frozen=True, slots=True)
class FrameBufferParameters:
    """Where camera and reasoning node meet."""

    frame_buffer: str = parameter(
        '',
        'Name of the shared memory frame buffer; empty derives it from ROS domain and namespace.',
        read_only=True,
    )

    def __post_init__(self):
        validate(self)


@dataclass(frozen=True, slots=True)
class CameraParameters:
    """Input and size of the frames."""

    input: str = parameter(
        'raw',
        'Which of camera/image_raw and camera/image_raw/compressed is subscribed.',
        choices=('raw', 'compressed', 'both'),
        read_only=True,
    )
    width: int = parameter(
        0, 'Width of the frames written, 0 for that of the camera.', unit='px',
        range=(0, MAX_SIDE),
    )
    height: int = parameter(
        0, 'Height of the frames written, 0 for that of the camera.', unit='px',
        range=(0, MAX_SIDE),
    )
    capacity_bytes: int = parameter(
        640 * 480 * 3, 'Size of a frame that fits the buffer from the start.', unit='B',
        range=(1, 2**31 - 1), read_only=True,
    )
    image_backend: str = parameter(
        'auto', 'What decodes raw images; auto takes cv_bridge where a trial proves it safe.',
        choices=BACKENDS, read_only=True,
    )

    def __post_init__(self):
        validate(self)


def frame_buffer_name(parameters: FrameBufferParameters, node: Node) -> str:
    """Return the name both nodes of one robot derive, and no other robot's nodes."""
    if parameters.frame_buffer:
        return parameters.frame_buffer
    domain_id = os.environ.get('ROS_DOMAIN_ID', '0')
    return f'vla_edge_{domain_id}{node.get_namespace().rstrip("/").replace("/", "_")}'


class CameraNode(Node):
    """
    Validate, decode and resize images; a bad one is counted and the node goes on.

    Parameters
    ----------
    interruptible : callable
        Unused; every node is built with it.
    options
        For ``rclpy.node.Node``.

    """

    def __init__(
        self, interruptible: Callable[[], AbstractContextManager] = nullcontext, **options
    ):
        super().__init__('camera_node', **options)
        self.parameters = RosParameters(self, [CameraParameters, FrameBufferParameters])
        parameters = self.parameters[CameraParameters]
        backend, self._decode = make_decoder(parameters.image_backend)
        self._clock_ros = RosClock(self)
        self.received = self.written = self.rejected = self.superseded = 0
        self._reported = (0, 0)
        self._last_error = ''
        name = frame_buffer_name(self.parameters[FrameBufferParameters], self)
        self._writer = FrameWriter(name, parameters.capacity_bytes)
        self.get_logger().info(f'writing to frame buffer {name}, decoding with {backend}')

        topic = self.resolve_topic_name('camera/image_raw')
        if parameters.input in ('raw', 'both'):
            self._raw = self.create_subscription(Image, topic, self._on_raw, IMAGES)
        if parameters.input in ('compressed', 'both'):
            self._compressed = self.create_subscription(
                CompressedImage, f'{topic}/compressed', self._on_compressed, IMAGES)
        DiagnosticsTimer(self, self._report)

    def close(self) -> None:
        """Remove the frame buffer."""
        self._writer.close()

    def _on_raw(self, message: Image) -> None:
        self._take(self._newest(message, self._raw), self._decode)

    def _on_compressed(self, message: CompressedImage) -> None:
        self._take(self._newest(message, self._compressed), message_to_rgb8)

    def _newest(self, message, subscription):
        """Return the last message waiting: after a stall, decoding the older ones is in vain."""
        # No more than were waiting: a publisher faster than this loop must not hold it.
        for _ in range(IMAGES.depth):
            taken = subscription.handle.take_message(subscription.msg_type, False)
            if taken is None:
                break
            message = taken[0]
            self.received += 1
            self.superseded += 1
        return message

    def _take(self, message, decode: Callable[[object], np.ndarray]) -> None:
        self.received += 1
        received_ns = self._clock_ros.now_ns()
        try:
            stamp_ns = image_stamp_ns(message)
            image = decode(message)
            parameters = self.parameters[CameraParameters]
            height = parameters.height or image.shape[0]
            width = parameters.width or image.shape[1]
            self._writer.write(resize_rgb8(image, width, height), stamp_ns, received_ns)
        except VlaEdgeError as error:
            self.rejected += 1
            self._last_error = str(error)
            text = f'image rejected: {error}'
            self.get_logger().warning(text, throttle_duration_sec=WARNING_PERIOD_S)
        else:
            self.written += 1

    def _report(self) -> Report:
        new, bad = self.received - self._reported[0], self.rejected - self._reported[1]
        self._reported = (self.received, self.rejected)
        values = {
            'received': self.received,
            'written': self.written,
            'rejected': self.rejected,
            'superseded': self.superseded,
            'rate_hz': new,
            'last_error': self._last_error,
        }
        if bad:
            level = ERROR if bad == new else WARN
            return level, f'{bad} of {new} images rejected: {self._last_error}', values
        if not new:
            return WARN, 'no image in the last second', values
        return OK, f'{new} images in the last second', values
