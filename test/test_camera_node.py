"""The camera node: good images reach shared memory with their stamps, bad ones are counted."""

import os

from diagnostic_msgs.msg import DiagnosticArray
import numpy as np
import pytest
from rclpy.qos import qos_profile_sensor_data
from ros_testing import diagnostic_values, ros_graph
from sensor_msgs.msg import CompressedImage, Image

from vla_edge_ros.errors import BackendUnavailable, ConfigError, TransportError
from vla_edge_ros.nodes import image_backend
from vla_edge_ros.nodes.camera import CameraNode
from vla_edge_ros.runtime.frame_buffer import FrameReader

BUFFER = f'camera_test_{os.getpid()}'


@pytest.fixture
def graph(tmp_path):
    with ros_graph(tmp_path) as graph:
        yield graph


def make_node(graph, *overrides, arguments=()):
    words = [word for item in overrides for word in ('-p', item)]
    cli_args = ['--ros-args', *arguments, *words]
    return graph.add(CameraNode(context=graph.context, cli_args=cli_args))


def make_image(colour=(10, 20, 30), stamp_ns=5_000_000_007, width=8, height=6):
    pixels = np.broadcast_to(np.uint8(colour), (height, width, 3))
    image = Image(height=height, width=width, step=width * 3, encoding='rgb8')
    image.data = pixels.tobytes()
    image.header.stamp.sec, image.header.stamp.nanosec = divmod(stamp_ns, 10**9)
    return image


def send(graph, node, publisher, message):
    """Send until the node has taken one more message."""
    assert graph.spin_until(lambda: publisher.get_subscription_count() > 0)
    received = node.received
    publisher.publish(message)
    assert graph.spin_until(lambda: node.received > received)


def test_a_raw_image_reaches_the_buffer_with_its_stamp_and_size(graph):
    node = make_node(graph, f'frame_buffer:={BUFFER}', 'width:=4', 'height:=2')
    publisher = graph.peer.create_publisher(Image, 'camera/image_raw', qos_profile_sensor_data)
    send(graph, node, publisher, make_image())
    with FrameReader(BUFFER) as reader:
        frame = reader.read()
    assert frame.stamp_ns == 5_000_000_007 and frame.sequence == 1
    np.testing.assert_array_equal(frame.image, np.broadcast_to((10, 20, 30), (2, 4, 3)))


def test_compressed_images_namespace_and_remap_are_followed(graph):
    import cv2
    node = make_node(
        graph, 'input:=compressed',
        arguments=['-r', '__ns:=/left', '-r', 'camera/image_raw:=eye'],
    )
    publisher = graph.peer.create_publisher(
        CompressedImage, '/left/eye/compressed', qos_profile_sensor_data)
    message = CompressedImage(format='png')
    message.header.stamp.sec = 1
    message.data = cv2.imencode('.png', np.full((6, 8, 3), 77, np.uint8))[1].tobytes()
    send(graph, node, publisher, message)
    with FrameReader(f'vla_edge_{graph.domain_id}_left') as reader:
        assert reader.read().image.shape == (6, 8, 3)


def test_bad_images_are_counted_and_reported_and_the_next_good_one_is_written(graph):
    node = make_node(graph)
    reports = graph.listen(DiagnosticArray, '/diagnostics')
    publisher = graph.peer.create_publisher(Image, 'camera/image_raw', qos_profile_sensor_data)
    unknown, short, unstamped = make_image(), make_image(), make_image(stamp_ns=0)
    unknown.encoding = '32FC1'
    short.data = short.data[:10]
    for message in (unknown, short, unstamped, make_image()):
        send(graph, node, publisher, message)
    assert (node.received, node.rejected, node.written) == (4, 3, 1)
    assert graph.spin_until(
        lambda: diagnostic_values(reports, 'camera_node').get('rejected') == '3')
    values = diagnostic_values(reports, 'camera_node')
    assert values['received'] == '4' and values['written'] == '1'
    assert 'header.stamp' in values['last_error'] and values['level'] == 1
    assert float(values['cpu_percent']) >= 0.0


def test_after_a_stall_only_the_newest_image_is_written_and_all_are_counted(graph):
    node = make_node(graph, f'frame_buffer:={BUFFER}')
    publisher = graph.peer.create_publisher(Image, 'camera/image_raw', qos_profile_sensor_data)
    send(graph, node, publisher, make_image(stamp_ns=1))
    for stamp_ns in range(2, 22):  # nobody spins meanwhile
        publisher.publish(make_image(stamp_ns=stamp_ns))
    assert graph.spin_until(lambda: node.received == 21)
    assert node.written + node.superseded == 21 and node.superseded > 0
    with FrameReader(BUFFER) as reader:
        assert reader.read().stamp_ns == 21


def test_a_frame_larger_than_the_buffer_and_a_changed_size_are_no_crash(graph):
    node = make_node(graph, 'capacity_bytes:=10', f'frame_buffer:={BUFFER}')
    publisher = graph.peer.create_publisher(Image, 'camera/image_raw', qos_profile_sensor_data)
    with FrameReader(BUFFER) as reader:
        for width, height in ((8, 6), (64, 48), (8, 6)):
            send(graph, node, publisher, make_image(width=width, height=height))
            assert reader.read().image.shape == (height, width, 3)


@pytest.mark.parametrize('name, rule', [
    (BUFFER, 'must not be in use by another writer .process'), ('left/eye', 'must be 1..128')])
def test_a_frame_buffer_that_cannot_be_had_is_refused_by_the_name_of_the_parameter(
        graph, name, rule):
    make_node(graph, f'frame_buffer:={BUFFER}')
    with pytest.raises(TransportError, match=f"^frame_buffer {rule}.*, got '{name}'$"):
        CameraNode(context=graph.context,
                   cli_args=['--ros-args', '-p', f'frame_buffer:={name}'])


def test_unknown_parameters_are_refused(graph):
    with pytest.raises(ConfigError, match='widht is not a parameter of camera_node'):
        CameraNode(context=graph.context, cli_args=['--ros-args', '-p', 'widht:=3'])


def test_cv_bridge_is_refused_where_it_would_crash_and_auto_goes_without(monkeypatch):
    monkeypatch.setattr(image_backend.np, '__version__', '2.4.0')
    with pytest.raises(BackendUnavailable, match='numpy >= 2'):
        image_backend.make_decoder('cv_bridge')
    assert image_backend.make_decoder('auto')[0] == 'numpy'


def test_a_cv_bridge_that_dies_in_the_trial_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(image_backend.np, '__version__', '1.26.4')
    (tmp_path / 'cv_bridge.py').write_text('import os\nos.abort()\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    with pytest.raises(BackendUnavailable, match='trial conversion ended with -6'):
        image_backend.make_decoder('cv_bridge')


def test_a_cv_bridge_that_works_is_taken_by_auto(monkeypatch, tmp_path):
    monkeypatch.setattr(image_backend.np, '__version__', '1.26.4')
    (tmp_path / 'cv_bridge.py').write_text(
        'import numpy as np\n'
        'class CvBridgeError(TypeError): pass\n'
        'class CvBridge:\n'
        '    def imgmsg_to_cv2(self, m, encoding):\n'
        '        assert encoding == "rgb8"\n'
        '        return np.frombuffer(m.data, np.uint8).reshape(m.height, m.width, 3)[..., ::-1]\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    name, decode = image_backend.make_decoder('auto')
    image = make_image()
    image.encoding = 'bgr8'
    assert name == 'cv_bridge' and decode(image)[0, 0].tolist() == [30, 20, 10]
    image.encoding, image.step = 'mono16', 16
    assert decode(image).shape == (6, 8, 3)
