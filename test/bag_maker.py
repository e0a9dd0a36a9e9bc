"""Small recordings for the tests of bags and replay."""

import cv2
import numpy as np

from vla_edge_ros.replay.bag import BagWriter, COMPRESSED_IMAGE, IMAGE, JOINT_STATE, STRING

START_NS = 1_700_000_000_000_000_000
PERIOD_NS = 16_666_666  # two periods end just before a tick of 30 Hz
TRANSPORT_NS = 2_000_000


def make_image(index, height=16, width=24):
    """Return a reproducible smooth picture that differs from its neighbours."""
    rng = np.random.default_rng(index)
    coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)


def write_image(writer, topic, image, stamp_ns, recorded_ns, encoding='rgb8'):
    """Append one raw image."""
    fields = {
        'header': writer.header(stamp_ns, 'camera'),
        'height': image.shape[0],
        'width': image.shape[1],
        'encoding': encoding,
        'is_bigendian': 0,
        'step': image.shape[1] * 3,
        'data': image.reshape(-1),
    }
    writer.write_fields(topic, IMAGE, fields, recorded_ns)


def write_png(writer, topic, image, stamp_ns, recorded_ns):
    """Append one losslessly compressed image."""
    _, data = cv2.imencode('.png', cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    fields = {'header': writer.header(stamp_ns), 'format': 'png', 'data': data.reshape(-1)}
    writer.write_fields(topic, COMPRESSED_IMAGE, fields, recorded_ns)


def write_joints(writer, topic, positions, recorded_ns, names=('x', 'y')):
    """Append one joint state."""
    fields = {
        'header': writer.header(recorded_ns),
        'name': list(names),
        'position': np.asarray(positions, np.float64),
        'velocity': np.zeros(0),
        'effort': np.zeros(0),
    }
    writer.write_fields(topic, JOINT_STATE, fields, recorded_ns)


def make_bag(
    path, frames=30, storage='sqlite3', compressed=False, text='reach the red cube',
    names=('x', 'y'),
):
    """Write a bag of a 60 Hz camera, joint states and an instruction; return its path."""
    with BagWriter(path, storage) as writer:
        if text:
            fields = {'data': text}
            writer.write_fields('/instruction', STRING, fields, START_NS - 1, latched=True)
        for index in range(frames):
            stamp_ns = START_NS + index * PERIOD_NS
            positions = [0.001 * index, -0.001 * index]
            write_joints(writer, '/joint_states', positions, stamp_ns, names)
            write = write_png if compressed else write_image
            topic = '/camera/image_raw/compressed' if compressed else '/camera/image_raw'
            write(writer, topic, make_image(index), stamp_ns, stamp_ns + TRANSPORT_NS)
    return path
