"""The choice between cv_bridge and our own image conversion."""

from collections.abc import Callable
import importlib.util
import subprocess
import sys

import numpy as np
from sensor_msgs.msg import Image

from vla_edge_ros.errors import BackendUnavailable, ImageError
from vla_edge_ros.nodes.conversions import message_to_rgb8

BACKENDS = ('auto', 'cv_bridge', 'numpy')
# What cv_bridge converts exactly as we do; the rest it refuses or leaves undefined.
_BRIDGED = ('rgb8', 'bgr8', 'rgba8', 'bgra8', 'mono8')
_PROBE = """
from cv_bridge import CvBridge
from sensor_msgs.msg import Image
image = Image(encoding='bgr8', height=2, width=2, step=6, data=bytes(range(12)))
assert CvBridge().imgmsg_to_cv2(image, 'rgb8')[1, 1].tolist() == [11, 10, 9]
"""
_PROBE_TIMEOUT_S = 20.0

Decoder = Callable[[Image], np.ndarray]


def cv_bridge_problem() -> str:
    """Return why cv_bridge cannot be used here, '' if it can; a crash stays in a subprocess."""
    if int(np.__version__.split('.')[0]) >= 2:
        return f'it crashes with numpy >= 2 and this is {np.__version__}'
    if importlib.util.find_spec('cv_bridge') is None:
        return 'it is not installed'
    try:
        probe = subprocess.run(
            [sys.executable, '-c', _PROBE], capture_output=True, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return 'a trial conversion did not end'
    return '' if probe.returncode == 0 else f'a trial conversion ended with {probe.returncode}'


def make_decoder(backend: str) -> tuple[str, Decoder]:
    """
    Return the backend really used and its decoder.

    Raises
    ------
    BackendUnavailable
        ``cv_bridge`` was asked for and is not safe on this machine.

    """
    problem = cv_bridge_problem() if backend != 'numpy' else 'not asked for'
    if not problem:
        return 'cv_bridge', _bridge_decoder()
    if backend == 'cv_bridge':
        raise BackendUnavailable('image_backend', f'cannot be cv_bridge: {problem}', backend)
    return 'numpy', message_to_rgb8


def _bridge_decoder() -> Decoder:
    from cv_bridge import CvBridge, CvBridgeError
    bridge = CvBridge()

    def decode_bridged(message: Image) -> np.ndarray:
        if message.encoding not in _BRIDGED:
            return message_to_rgb8(message)
        try:
            return bridge.imgmsg_to_cv2(message, 'rgb8')
        except (CvBridgeError, TypeError, ValueError) as error:
            rule = f'must be readable by cv_bridge ({error})'
            raise ImageError('image', rule, message.encoding) from None

    return decode_bridged
