"""One recording through the replay and through the live nodes: equal images, equal decisions."""

from bag_maker import PERIOD_NS, START_NS, TRANSPORT_NS, write_image, write_joints, write_png
import numpy as np
import pytest
from ros_testing import ros_graph

from vla_edge_ros.clock import ManualClock, NS_PER_MS
from vla_edge_ros.nodes.camera import CameraNode
from vla_edge_ros.nodes.lifecycle import SUCCESS
from vla_edge_ros.nodes.reasoning import ReasoningNode
from vla_edge_ros.policy.policy import Policy
from vla_edge_ros.replay.bag import BagReader, BagWriter, COMPRESSED_IMAGE, IMAGE, STRING
from vla_edge_ros.replay.inputs import ReplayParameters
from vla_edge_ros.replay.live import make_publisher
from vla_edge_ros.replay.replay import replay_bag
from vla_edge_ros.runtime.control_loop import ControlLoopParameters
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.telemetry.stages import Stage
from vla_edge_ros.telemetry.trace import read_trace

TICK_NS = ControlLoopParameters().period_ns
FRAMES = 180
CAMERA_GAP = range(70, 120)
JOINT_GAP = range(31, 65)
TEXTS = {
    0: 'reach the red cube',
    24: 'touch the blue block',
    30: ' ',
    50: 'reach the cube ' * 20,  # does not fit the prompt slots
    140: 'track the green box',
}


class Recorder:
    """A policy that notes what it is shown."""

    def __init__(self, policy):
        self._policy = policy
        self.observed = []

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def observe(self, image, proprioception, stamp_ns):
        self.observed.append((image.copy(), proprioception.copy(), stamp_ns))
        return self._policy.observe(image, proprioception, stamp_ns)


@pytest.fixture(scope='module')
def policy():
    return Policy.load()


def draw(index):
    """Return a picture of four cubes going round near the middle of a grey table."""
    image = np.full((160, 192, 3), 110, np.uint8)
    colours = ((200, 40, 40), (40, 60, 210), (50, 170, 60), (220, 200, 50))
    for cube, colour in enumerate(colours):
        angle = 0.05 * index + cube * np.pi / 2
        x, y = int(96 + 25 * np.cos(angle)), int(80 + 20 * np.sin(angle))
        image[y - 9:y + 9, x - 9:x + 9] = colour
    return image


def make_eventful_bag(path, compressed):
    """Write three seconds with all that a live system meets; return the path."""
    names = ('gantry_y', 'other', 'gantry_x')
    with BagWriter(path) as writer:
        for index in range(FRAMES):
            stamp_ns = START_NS + index * PERIOD_NS
            if index in TEXTS:
                fields = {'data': TEXTS[index]}
                writer.write_fields('/instruction', STRING, fields, stamp_ns - 1, latched=True)
            if index not in JOINT_GAP:
                positions = [0.001 * index, 9.0, -0.001 * index][:1 if index == 20 else 3]
                write_joints(writer, '/joint_states', positions, stamp_ns, names)
            if index in CAMERA_GAP:
                continue
            image = draw(index)
            stamped_ns = 0 if index == 10 else stamp_ns
            if compressed:
                topic = '/camera/image_raw/compressed'
                write_png(writer, topic, image, stamped_ns, stamp_ns + TRANSPORT_NS)
            else:
                encoding = {12: 'tiff99', 14: 'bgr8'}.get(index, 'rgb8')
                topic = '/camera/image_raw'
                write_image(writer, topic, image, stamped_ns, stamp_ns + TRANSPORT_NS, encoding)
    return path


class CountingReasoningNode(ReasoningNode):
    """Tells how many messages it has taken in."""

    taken = 0

    def _on_joint_states(self, message):
        super()._on_joint_states(message)
        self.taken += 1

    def _on_instruction(self, message):
        super()._on_instruction(message)
        self.taken += 1


def run_live(graph, bag, policy, latency_ms, trace, loop):
    """Publish a bag to the two nodes in virtual time, one message and one tick at a time."""
    stages = (Stage.PREFILL, Stage.DECODE)
    latency = FixedLatency(
        {stage: int(cost * NS_PER_MS) for stage, cost in zip(stages, latency_ms)})
    with BagReader(bag) as reader:
        records = list(reader.records(list(reader.topics)))
        (image_topic,) = reader.topics_of(IMAGE, COMPRESSED_IMAGE)
        publishers = {
            topic: make_publisher(graph.peer, topic, kind)
            for topic, kind in reader.topics.items()}
    start_ns = next(r.recorded_ns for r in records if r.topic == image_topic)
    clock = ManualClock(records[0].recorded_ns)
    camera = graph.add(CameraNode(
        context=graph.context, cli_args=['--ros-args', '-p', 'input:=both']))
    node = graph.add(CountingReasoningNode(
        load_policy=lambda *_: policy, calibrate=lambda *_: latency_ms, clock=clock, steady=clock,
        make_runner=lambda steady: VirtualRunner(steady, latency), context=graph.context,
        cli_args=['--ros-args', '-p', f'trace_path:={trace}', *(
            word for name, value in loop.items() for word in ('-p', f'{name}:={value}'))]))
    assert graph.spin_until(
        lambda: all(p.get_subscription_count() for p in publishers.values()))

    assert node.trigger_configure() is SUCCESS
    sent = ticks = 0
    while sent < len(records):
        now_ns = start_ns + ticks * TICK_NS
        while sent < len(records) and records[sent].recorded_ns <= now_ns:
            clock.advance_to_ns(records[sent].recorded_ns)
            publishers[records[sent].topic].publish(records[sent].data)
            sent += 1
            assert graph.spin_until(lambda sent=sent: camera.received + node.taken == sent)
        clock.advance_to_ns(now_ns)
        if ticks == 0:
            assert node.trigger_activate() is SUCCESS
        assert graph.spin_until(
            lambda ticks=ticks: node._heard.last and node._heard.last.tick == ticks)
        ticks += 1
    node.close()


@pytest.mark.parametrize('compressed, latency_ms, loop, reasons', [
    (False, (8.0, 8.0), {}, {'admitted', 'no_proprioception', 'frozen_camera'}),
    (True, (20.0, 16.0), {}, {'decode_over_budget', 'deadline_missed', 'busy', 'repeated_frame'}),
    (True, (20.0, 10.0), {'schedule': 'sync'}, {'requested', 'playing', 'frozen_camera'}),
    (True, (10.0, 20.0), {'schedule': 'overlap', 'overlap_percent': 100.0, 'seam': 'blend'},
     {'requested', 'frozen_camera'}),
])
def test_live_nodes_and_replay_agree_to_the_bit(
    tmp_path, policy, compressed, latency_ms, loop, reasons
):
    bag = make_eventful_bag(tmp_path / 'bag', compressed)
    replayed, live = Recorder(policy), Recorder(policy)
    parameters = ReplayParameters(prefill_ms=latency_ms[0], decode_ms=latency_ms[1])
    replay_bag(bag, replayed, tmp_path / 'replay', parameters, loop=ControlLoopParameters(**loop))
    with ros_graph(tmp_path) as graph:
        run_live(graph, bag, live, latency_ms, tmp_path / 'live.csv', loop)

    assert len(live.observed) == len(replayed.observed) > (15 if loop else 40)
    for ours, theirs in zip(live.observed, replayed.observed):
        for a, b in zip(ours, theirs):
            np.testing.assert_array_equal(a, b, strict=True)
    live_trace = read_trace(tmp_path / 'live.csv')
    replay_trace = read_trace(tmp_path / 'replay' / 'trace.csv')
    for name, column in replay_trace.items():
        np.testing.assert_array_equal(live_trace[name], column, name)
    assert reasons <= set(live_trace['reason']) and len(set(live_trace['action_0'])) > 10
