"""The simulator node around a world without GL: what it sends, obeys, and counts."""

import numpy as np
import pytest
from rclpy.qos import DurabilityPolicy, qos_profile_sensor_data, QoSProfile
from ros_testing import ros_graph
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from std_srvs.srv import Trigger
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from vla_edge_ros.clock import ManualClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.nodes.conversions import image_to_rgb8
from vla_edge_ros.nodes.simulator import JOINT_NAMES, SimulatorNode
from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator

LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class FakeWorld:
    """All cubes lie under the tip unless ``far``; remembers its commands."""

    def __init__(self):
        self.commands = []
        self.far = False
        self.closed = False
        self.resets = 0
        self.joint_positions = np.array([0.1, -0.2])
        self.joint_velocities = np.zeros(2)
        self.tip = self.joint_positions

    @property
    def object_positions(self):
        return np.tile(self.tip + (1.0 if self.far else 0.0), (4, 1))

    def reset(self, rng):
        self.resets += 1

    def step(self, command, duration_ns):
        self.commands.append((tuple(command), duration_ns))

    def render(self):
        return np.full((20, 24, 3), (200, 100, 50), np.uint8)

    def get_state(self):
        return np.zeros(20)

    def close(self):
        self.closed = True


class Simulation:
    def __init__(self, graph, *overrides):
        self.graph, self.world, self.steady = graph, FakeWorld(), ManualClock(10**9)
        words = [word for item in overrides for word in ('-p', item)]
        self.node = graph.add(SimulatorNode(
            context=graph.context, world=self.world, steady=self.steady,
            cli_args=['--ros-args', *words]))
        # Time is the test's: the 60 Hz timer must not add frames of its own.
        self.node._timer.cancel()
        self.action = graph.peer.create_publisher(JointTrajectory, 'action', 1)

    def advance(self, frames=1):
        for _ in range(frames):
            self.steady.advance_ns(NS_PER_S // 60)
            self.node.advance()

    def command(self, *rows, names=JOINT_NAMES):
        message = JointTrajectory(joint_names=list(names))
        for step, row in enumerate(rows):
            point = JointTrajectoryPoint(velocities=list(row))
            point.time_from_start.nanosec = step * 33 * NS_PER_MS
            message.points.append(point)
        before = self.node._command
        assert self.graph.spin_until(lambda: self.action.get_subscription_count() > 0)
        self.action.publish(message)
        self.graph.spin_until(lambda: self.node._command is not before, 0.5)


@pytest.fixture
def make_simulation(tmp_path):
    with ros_graph(tmp_path) as graph:
        yield lambda *overrides: Simulation(graph, *overrides)


def test_camera_joints_and_a_latched_instruction_are_published(make_simulation):
    simulation = make_simulation('seed:=3')
    graph = simulation.graph
    images = graph.listen(Image, 'camera/image_raw', qos_profile_sensor_data)
    joints = graph.listen(JointState, 'joint_states', qos_profile_sensor_data)
    instructions = graph.listen(String, 'instruction', LATCHED)
    assert graph.spin_until(lambda: instructions)
    assert graph.spin_until(lambda: simulation.advance() or (images and joints))
    image = images[-1]
    rgb = image_to_rgb8(
        image.encoding, image.height, image.width, image.step, False, image.data)
    assert rgb.shape == (20, 24, 3) and rgb[0, 0].tolist() == [200, 100, 50]
    assert joints[-1].name == list(JOINT_NAMES)
    np.testing.assert_allclose(joints[-1].position, [0.1, -0.2])
    assert image.header.stamp.sec > 0


def test_the_camera_compresses_on_demand_and_waits_for_a_listener(make_simulation):
    simulation = make_simulation('camera:=compressed', 'wait_for_subscribers:=1')
    simulation.advance(5)
    assert simulation.node.published == 0 and len(simulation.world.commands) == 5
    images = simulation.graph.listen(
        CompressedImage, 'camera/image_raw/compressed', qos_profile_sensor_data)
    assert simulation.graph.spin_until(lambda: simulation.advance() or images)
    assert bytes(images[0].data[:2]) == b'\xff\xd8'


def test_a_trajectory_is_obeyed_point_by_point_and_times_out(make_simulation):
    simulation = make_simulation()
    simulation.command((0.1, 0.2), (0.3, 0.4))
    simulation.advance(1)
    assert simulation.world.commands[-1][0] == (0.1, 0.2)
    simulation.advance(2)
    assert simulation.world.commands[-1][0] == (0.3, 0.4)
    simulation.advance(12)
    assert simulation.world.commands[-1][0] == (0.0, 0.0)


@pytest.mark.parametrize('rows, names', [
    (((float('nan'), 0.0),), JOINT_NAMES), ((), JOINT_NAMES), (((1.0, 1.0),), ('a', 'b'))])
def test_a_command_that_makes_no_sense_is_not_obeyed(make_simulation, rows, names):
    simulation = make_simulation()
    simulation.command((0.1, 0.2))
    good = simulation.node._command
    simulation.command(*rows, names=names)
    assert simulation.node._command is good


def test_episodes_begin_with_the_first_action_and_end_in_success_or_after_three_seconds(
        make_simulation):
    simulation = make_simulation()
    simulation.advance(120)
    assert simulation.node.episodes == 0
    simulation.command((0.0, 0.0))
    simulation.advance(30)
    assert (simulation.node.episodes, simulation.node.successes) == (1, 1)
    simulation.world.far = True
    simulation.advance(179)
    assert simulation.node.episodes == 1
    simulation.advance(1)
    assert (simulation.node.episodes, simulation.node.successes) == (2, 1)
    assert simulation.world.resets == 1


def test_a_command_holds_from_the_moment_it_came(make_simulation):
    simulation = make_simulation()
    simulation.command((0.1, 0.2))
    simulation.advance(1)
    simulation.steady.advance_ns(10 * NS_PER_MS)
    simulation.command((0.3, 0.4))
    assert simulation.world.commands[-1] == ((0.1, 0.2), 10 * NS_PER_MS)
    simulation.steady.advance_ns(5 * NS_PER_MS)
    simulation.node.advance()
    assert simulation.world.commands[-1] == ((0.3, 0.4), 5 * NS_PER_MS)


def test_a_fresh_episode_stands_still_until_it_was_shown_and_the_policy_has_forgotten(
        make_simulation):
    simulation = make_simulation('fresh_episodes:=true', 'episodes:=2', 'seed:=7')
    node, world = simulation.node, simulation.world
    forgotten = []

    def forget(_request, response):
        forgotten.append(node.published)
        return response

    service = simulation.graph.peer.create_service(Trigger, 'reasoning_node/reset', forget)
    assert simulation.graph.spin_until(node._reset.service_is_ready)
    simulation.command((0.1, 0.2))
    assert world.resets == 2 and node._command is None
    simulation.advance()  # shown
    shown, stepped = node.published, len(world.commands)
    simulation.command((0.5, 0.5))
    assert node._command is None or forgotten
    assert simulation.graph.spin_until(lambda: forgotten and node._resetting.done())
    assert forgotten == [shown] and len(world.commands) == stepped
    simulation.advance(31)
    assert (node.episodes, world.resets) == (1, 3) and node.running
    assert simulation.graph.spin_until(lambda: simulation.advance() or node.episodes == 2)
    assert not node.running and world.resets == 3
    simulation.graph.peer.destroy_service(service)


def test_without_a_reasoning_node_a_fresh_episode_begins_once_it_was_shown(make_simulation):
    simulation = make_simulation('fresh_episodes:=true')
    simulation.command((0.1, 0.2))
    simulation.advance()
    before = len(simulation.world.commands)
    simulation.advance()
    assert len(simulation.world.commands) == before + 1


def test_fresh_episodes_are_those_of_virtual_time(make_simulation):
    node = make_simulation('fresh_episodes:=true', 'seed:=5').node
    worlds = []
    node._world.reset = lambda rng: worlds.append(rng.random(40))  # as much as a world draws
    virtual = Simulator(EpisodeParameters(control='oracle'))
    for index in range(4):
        node.episodes = index
        node._next_episode(fresh=True)
        rng = np.random.default_rng([5, index])
        assert worlds[-1].tolist() == rng.random(40).tolist()
        task = virtual._make_task(rng)
        assert (node._task.instruction, node._task.target) == (task.instruction, task.target)


def test_the_camera_stops_after_the_run_and_the_counts_stay_readable(make_simulation):
    simulation = make_simulation('run_seconds:=1.0')
    simulation.advance(90)
    assert simulation.node.running
    simulation.command((0.0, 0.0))
    simulation.advance(90)
    published = simulation.node.published
    assert not simulation.node.running and 145 <= published <= 155
    _, message, values = simulation.node._report()
    assert message == 'run ended' and values['published'] == published


def test_states_are_logged_for_a_film(make_simulation, tmp_path):
    path = tmp_path / 'states.npz'
    simulation = make_simulation(f'state_log_path:={path}', 'instruction:="touch the red cube"')
    simulation.advance(20)
    simulation.node.close()
    log = np.load(path)
    assert log['states'].shape == (10, 20) and list(log['instructions']) == ['touch the red cube']
    assert simulation.world.closed


def test_an_instruction_without_a_colour_and_an_unwritable_log_are_refused(make_simulation):
    with pytest.raises(ConfigError, match='must name exactly one of'):
        make_simulation('instruction:="touch the cube"')
    with pytest.raises(ConfigError, match='state_log_path must be a writable file'):
        make_simulation('state_log_path:=/nowhere/states.npz')
