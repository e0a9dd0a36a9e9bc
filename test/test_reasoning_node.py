"""The reasoning node around a fake policy: transitions, actions, and what goes wrong."""

import gc
import os
import time

from diagnostic_msgs.msg import DiagnosticStatus
from fake_policy import FakePolicy
from fake_target import Copier
from geometry_msgs.msg import TwistStamped
import numpy as np
import pytest
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, qos_profile_sensor_data, QoSProfile
from ros_testing import ros_graph
from sensor_msgs.msg import JointState, TimeReference
from std_msgs.msg import Float64MultiArray, String
from std_srvs.srv import SetBool, Trigger
from trajectory_msgs.msg import JointTrajectory

from vla_edge_ros.clock import ManualClock
from vla_edge_ros.errors import WeightsError
from vla_edge_ros.nodes.conversions import to_ns
from vla_edge_ros.nodes.diagnostics import OK, WARN
from vla_edge_ros.nodes.lifecycle import ERROR, FAILURE, SUCCESS
from vla_edge_ros.nodes.reasoning import ReasoningNode
from vla_edge_ros.runtime.frame_buffer import FrameWriter
from vla_edge_ros.telemetry.trace import read_trace

LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
BUFFER = f'reasoning_test_{os.getpid()}'


class Robot:
    """A reasoning node, and around it what it reads and where its actions go."""

    def __init__(self, graph, *overrides, policy=None, kind=JointTrajectory, load_policy=None):
        words = [word for item in overrides for word in ('-p', item)]
        self.graph = graph
        self.policy = policy or FakePolicy()
        self.actions = graph.listen(kind, 'action')
        self.references = graph.listen(TimeReference, '/reasoning_node/observation')
        self.joints = graph.peer.create_publisher(
            JointState, 'joint_states', qos_profile_sensor_data)
        self.instruction = graph.peer.create_publisher(String, 'instruction', LATCHED)
        self.writer = FrameWriter(BUFFER, 20 * 24 * 3)
        self.node = graph.add(ReasoningNode(
            context=graph.context, load_policy=load_policy or (lambda *_: self.policy),
            calibrate=lambda *_: (2.0, 3.0),
            cli_args=['--ros-args', '-p', f'frame_buffer:={BUFFER}', *words],
        ))

    def feed(self):
        """Let camera and joints send once."""
        self.writer.write(np.zeros((20, 24, 3), np.uint8), time.time_ns())
        self.joints.publish(JointState(name=['gantry_y', 'gantry_x'], position=[0.2, 0.1]))

    def run_until(self, condition, timeout_s=10.0):
        """Spin with sensors on, at 60 Hz, until ``condition()``."""
        due_s = time.monotonic()

        def fed():
            nonlocal due_s
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + 1 / 60
                self.feed()
            return condition()
        return self.graph.spin_until(fed, timeout_s)

    def start(self):
        self.instruction.publish(String(data='reach the red cube'))
        assert self.node.trigger_configure() is SUCCESS
        assert self.node.trigger_activate() is SUCCESS

    def fresh(self):
        return [ref for ref in self.references if ref.source == 'fresh']


@pytest.fixture
def make_robot(tmp_path):
    robots = []
    with ros_graph(tmp_path) as graph:
        def make(*overrides, **options):
            robots.append(Robot(graph, *overrides, **options))
            return robots[-1]
        yield make
        for robot in robots:
            robot.writer.close()


def test_every_transition_is_walked_and_the_safe_action_goes_out_last(make_robot):
    robot = make_robot('safe_action:=zeros')
    node = robot.node
    assert node.state == 'unconfigured'
    robot.start()
    assert node.state == 'active'
    # Only a fresh chunk has all its steps still to come.
    assert robot.run_until(lambda: robot.actions and len(robot.actions[-1].points) == 3)
    trajectory = robot.actions[-1]
    assert trajectory.joint_names == ['gantry_x', 'gantry_y']
    velocities = [list(point.velocities) for point in trajectory.points]
    np.testing.assert_allclose(velocities, [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    assert to_ns(trajectory.points[1].time_from_start) == 33_333_333

    count = len(robot.actions)
    assert node.trigger_deactivate() is SUCCESS and node.state == 'inactive'
    assert robot.graph.spin_until(
        lambda: len(robot.actions) > count and not any(robot.actions[-1].points[0].velocities))
    count = len(robot.actions)
    assert not robot.run_until(lambda: len(robot.actions) > count, timeout_s=0.2)
    assert node.trigger_activate() is SUCCESS
    assert robot.run_until(lambda: len(robot.actions) > count + 2)
    assert node.trigger_deactivate() is SUCCESS
    assert node.trigger_cleanup() is SUCCESS and node.state == 'unconfigured'
    assert node.trigger_configure() is SUCCESS and node.trigger_activate() is SUCCESS
    assert node.trigger_shutdown() is SUCCESS and node.state == 'finalized'
    assert gc.isenabled()


def test_each_action_names_the_image_it_was_computed_from(make_robot):
    robot = make_robot()
    robot.start()
    stamps = []
    write = robot.writer.write
    robot.writer.write = lambda image, stamp: stamps.append(stamp) or write(image, stamp)
    assert robot.run_until(lambda: len(robot.fresh()) > 5)
    for reference in robot.fresh():
        age_ns = to_ns(reference.header.stamp) - to_ns(reference.time_ref)
        assert 0 < age_ns < 500_000_000
        assert to_ns(reference.time_ref) in stamps
    action_stamps = [to_ns(action.header.stamp) for action in robot.actions]
    assert to_ns(robot.fresh()[-1].header.stamp) in action_stamps
    np.testing.assert_allclose(robot.policy.joints[-1], [0.1, 0.2])
    assert robot.policy.instructions == ['reach the red cube']


def test_status_tells_the_state_and_what_the_last_tick_decided(make_robot):
    robot = make_robot()
    heard = robot.graph.listen(DiagnosticStatus, '/reasoning_node/status')
    assert robot.graph.spin_until(lambda: heard)
    assert heard[-1].message == 'unconfigured' and not heard[-1].values
    robot.start()

    def values():
        return {item.key: item.value for item in heard[-1].values}
    assert robot.run_until(lambda: values().get('cause') == 'fresh')
    assert heard[-1].message == 'active' and heard[-1].level == OK
    assert values().keys() == {'tick', 'observation_age_ms', 'decision', 'reason', 'cause'}
    assert values()['decision'] == 'full' and int(values()['tick']) >= 0


@pytest.mark.parametrize('kind, message', [
    ('twist', TwistStamped), ('float64_multi_array', Float64MultiArray)])
def test_the_first_step_is_published_as_other_messages_on_demand(make_robot, kind, message):
    robot = make_robot(f'action_type:={kind}', kind=message)
    robot.start()

    def velocities(action):
        if kind == 'twist':
            return [action.twist.linear.x, action.twist.linear.y]
        return action.data
    assert robot.run_until(lambda: robot.actions and np.allclose(
        velocities(robot.actions[-1]), [0.1, 0.2], rtol=1e-6))


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_node_unconfigured_and_retryable(make_robot):
    attempts = []

    def load(*_):
        attempts.append(1)
        if len(attempts) == 1:
            raise WeightsError('policy', 'must be a folder', '/nowhere')
        return FakePolicy()

    robot = make_robot(load_policy=load)
    assert robot.node.trigger_configure() is FAILURE
    assert robot.node.state == 'unconfigured'
    assert "policy must be a folder, got '/nowhere'" in robot.node.last_error
    assert robot.node.trigger_configure() is SUCCESS and robot.node.last_error == ''


def test_configuring_logs_its_progress_and_the_memory_plan(make_robot, capfd):
    def load(_, progress):
        for layer in range(1, 29):
            progress('uploading layer', layer, 28)
        return FakePolicy()

    robot = make_robot(load_policy=load)
    robot.node._steady = ManualClock(1)
    assert robot.node.trigger_configure() is SUCCESS
    logged = capfd.readouterr().err
    assert 'brightness  20x24  float32  main   0.002' in logged.splitlines()
    assert logged.count('uploading layer') == 1 and 'uploading layer 1 of 28' in logged


def test_an_unforeseen_error_is_logged_with_its_traceback_and_recovered_from(make_robot, capfd):
    def load(*_):
        raise ZeroDivisionError('planted')
    robot = make_robot(load_policy=load)
    assert robot.node.trigger_configure() is ERROR
    assert robot.node.state == 'unconfigured'
    logged = capfd.readouterr().err
    assert 'planted' in logged and 'Traceback' in logged and 'in load' in logged


def test_a_dead_control_thread_makes_the_robot_safe_and_the_node_unconfigured(make_robot):
    robot = make_robot('safe_action:=zeros')
    robot.start()
    assert robot.run_until(lambda: robot.actions)

    def break_down(_result):
        raise RuntimeError('planted')
    robot.node._loop.tick = break_down
    assert robot.run_until(lambda: robot.node.state == 'unconfigured')
    assert robot.graph.spin_until(lambda: not any(robot.actions[-1].points[0].velocities))
    assert robot.node.last_error == 'cannot deactivate: RuntimeError: planted'
    assert gc.isenabled()


def test_a_policy_that_raises_is_a_counted_fallback_and_no_end(make_robot):
    robot = make_robot('safe_action:=zeros', 'max_consecutive_fallbacks:=2')
    robot.start()
    assert robot.run_until(lambda: robot.fresh())
    robot.policy.error = RuntimeError('planted')
    assert robot.run_until(lambda: robot.references[-1].source == 'safe_zeros')
    robot.policy.error = None
    count = len(robot.fresh())
    assert robot.run_until(lambda: len(robot.fresh()) > count)
    _, _, values = robot.node._report()
    assert values['policy_error'] == 'planted' and values['reason.policy_error'] > 0


def test_frames_go_to_the_device_of_a_policy_and_the_log_says_how(make_robot, capfd):
    policy = FakePolicy()
    policy.frame_target = target = Copier()
    robot = make_robot(policy=policy)
    robot.start()
    assert robot.run_until(lambda: robot.fresh())
    told = 'frames reach the GPU by planes'
    assert robot.graph.spin_until(lambda: told in capfd.readouterr().err)
    assert robot.node._report()[2]['frame_route'] == 'by planes'
    assert target.fetches >= len(policy.images) > 0 and set(policy.images) == {(20, 24, 3)}
    assert robot.node.trigger_deactivate() is SUCCESS and not target.detached
    assert robot.node.trigger_cleanup() is SUCCESS
    assert target.detached == [base for base, _ in target.attached]


def test_hold_stops_the_robot_also_across_a_restart_and_reset_forgets(make_robot):
    robot = make_robot('safe_action:=zeros')
    call = robot.graph.call
    refused = call(Trigger, '/reasoning_node/reset', Trigger.Request())
    assert not refused.success and 'unconfigured' in refused.message
    robot.start()
    assert robot.run_until(lambda: robot.fresh())
    assert call(SetBool, '/reasoning_node/hold', SetBool.Request(data=True)).success
    assert robot.run_until(lambda: robot.references[-1].source == 'operator_hold')
    robot.node.trigger_deactivate()
    robot.node.trigger_activate()
    count = len(robot.fresh())
    assert not robot.run_until(lambda: len(robot.fresh()) > count, timeout_s=0.3)
    assert call(SetBool, '/reasoning_node/hold', SetBool.Request(data=False)).success
    assert robot.run_until(lambda: len(robot.fresh()) > count)
    resets = robot.policy.resets
    assert call(Trigger, '/reasoning_node/reset', Trigger.Request()).success
    assert robot.run_until(lambda: robot.policy.resets > resets)


def test_an_operator_hold_commands_one_action_and_no_plan(make_robot):
    robot = make_robot('safe_action:=hold')
    robot.start()
    assert robot.run_until(lambda: robot.fresh())
    assert robot.graph.call(SetBool, '/reasoning_node/hold', SetBool.Request(data=True)).success
    assert robot.run_until(lambda: robot.references[-1].source == 'operator_hold')
    count = len(robot.actions)
    assert robot.run_until(lambda: len(robot.actions) > count + 2)
    assert len(robot.actions[-1].points) == 1


def test_timing_changes_live_and_memory_only_after_cleanup(make_robot):
    robot = make_robot()
    node = robot.node
    robot.start()
    assert node.set_parameters([Parameter('margin_ms', value=5)])[0].successful
    assert robot.run_until(lambda: node._loop.admission.parameters.margin_ms == 5.0)
    (refused,) = node.set_parameters([Parameter('kv_slots', value=64)])
    assert not refused.successful and 'clean it up first' in refused.reason
    node.trigger_deactivate()
    node.trigger_cleanup()
    assert node.set_parameters([Parameter('kv_slots', value=64)])[0].successful


def test_without_joint_states_nothing_moves_and_the_reason_is_named(make_robot):
    robot = make_robot()
    robot.feed = lambda: robot.writer.write(np.zeros((20, 24, 3), np.uint8), time.time_ns())
    robot.start()
    assert robot.run_until(lambda: robot.node._loop.counts['no_proprioception'] > 3)
    assert not robot.actions


def test_instructions_change_the_running_policy_and_blank_ones_are_refused(make_robot):
    robot = make_robot('instruction:=reach the blue cube')
    assert robot.node.trigger_configure() is SUCCESS
    assert robot.node.trigger_activate() is SUCCESS
    assert robot.run_until(lambda: robot.policy.instruction == 'reach the blue cube')
    for text in (' ', 'reach the green cube'):
        robot.instruction.publish(String(data=text))
    assert robot.run_until(lambda: robot.policy.instruction == 'reach the green cube')
    assert ' ' not in robot.policy.instructions


LONG = 'reach the red cube and then the blue one'


def test_an_instruction_the_policy_refuses_is_a_warning_until_the_next_good_one(make_robot, capfd):
    robot = make_robot()
    robot.start()
    assert robot.run_until(lambda: robot.fresh())
    robot.instruction.publish(String(data=LONG))
    assert robot.run_until(lambda: robot.node._inputs.rejected)
    error = f"instruction rejected: instruction must be 1..4 words, got '{LONG}'"
    assert capfd.readouterr().err.count(error) == 1
    level, text, values = robot.node._report()
    assert (level, text, values['last_error']) == (WARN, error, error)
    assert values['rejected.instruction'] == 1
    count = len(robot.fresh())
    assert robot.run_until(lambda: len(robot.fresh()) > count + 2)
    assert robot.policy.instructions == ['reach the red cube']
    assert robot.node._loop.counts['policy_error'] == 0

    robot.instruction.publish(String(data='reach the green cube'))
    assert robot.run_until(lambda: robot.policy.instruction == 'reach the green cube')
    assert robot.node._report()[2]['last_error'] == ''


def test_an_instruction_heard_before_there_is_a_policy_is_judged_when_there_is(make_robot, capfd):
    robot = make_robot('instruction:=reach the blue cube')
    robot.instruction.publish(String(data=LONG))
    assert robot.run_until(lambda: robot.node._inputs.instruction == LONG)
    assert robot.node.trigger_configure() is SUCCESS
    assert 'instruction rejected' in capfd.readouterr().err
    assert robot.node._report()[:2] == (WARN, robot.node._report()[2]['last_error'])
    assert robot.node.trigger_activate() is SUCCESS
    assert robot.run_until(lambda: robot.policy.instruction == 'reach the blue cube')


def test_the_parameter_instruction_acts_live_until_one_is_heard(make_robot):
    robot = make_robot()
    node = robot.node

    def set_instruction(text):
        return node.set_parameters([Parameter('instruction', value=text)])[0]
    assert set_instruction(LONG).successful
    assert node.trigger_configure() is FAILURE
    assert node.last_error.startswith('cannot configure: instruction must be 1..4 words')
    assert set_instruction('').successful
    assert node.trigger_configure() is SUCCESS and node.trigger_activate() is SUCCESS
    assert robot.run_until(lambda: node._loop.counts['no_instruction'] > 0)
    for text in ('reach the red cube', 'reach the blue cube'):
        assert set_instruction(text).successful
        assert robot.run_until(lambda text=text: robot.policy.instruction == text)
    for refused in (LONG, '', ' '):
        result = set_instruction(refused)
        assert not result.successful and 'instruction must be 1..4 words' in result.reason
    assert node.get_parameter('instruction').value == 'reach the blue cube'

    robot.instruction.publish(String(data='reach the green cube'))
    assert robot.run_until(lambda: robot.policy.instruction == 'reach the green cube')
    assert set_instruction('touch the red cube').successful
    count = len(robot.fresh())
    assert robot.run_until(lambda: len(robot.fresh()) > count + 2)
    assert robot.policy.instruction == 'reach the green cube'


@pytest.mark.parametrize('value, rule', [
    ([0.1], 'must have 2 values, got [0.1]'),
    ([0.1, 0.2, 0.3], 'must have 2 values, got [0.1, 0.2, 0.3]'),
    ([0.0, 0.6], "must lie in the policy's -1..1, -0.5..0.5, got [0.0, 0.6]"),
    ([-1e300, 0.0], "must lie in the policy's -1..1, -0.5..0.5, got [-1e+300, 0.0]"),
])
def test_an_initial_action_that_is_none_of_the_policy_is_refused(make_robot, value, rule):
    robot = make_robot(f'initial_action:={value}')
    node = robot.node
    assert node.trigger_configure() is FAILURE
    assert node.last_error == f'cannot configure: initial_action {rule}'
    assert node.set_parameters([Parameter('initial_action', value=[-1.0, 0.5])])[0].successful
    assert node.trigger_configure() is SUCCESS
    for transition in (node.trigger_activate, node.trigger_deactivate):
        (refused,) = node.set_parameters([Parameter('initial_action', value=value)])
        assert not refused.successful and refused.reason == f'initial_action {rule}'
        transition()
    assert list(node.get_parameter('initial_action').value) == [-1.0, 0.5]


def test_joint_states_that_cannot_be_used_are_told_in_the_diagnostics(make_robot):
    robot = make_robot()
    good = robot.feed
    robot.feed = lambda: robot.joints.publish(
        JointState(name=['gantry_y', 'gantry_x'], position=[float('nan'), 0.1]))
    robot.start()
    assert robot.run_until(lambda: robot.node._inputs.rejections['joint_states'] > 1)
    level, text, values = robot.node._report()
    assert level == WARN and text == values['last_error']
    assert text.startswith('joint states rejected: joint_states.position must give a finite')
    assert text.endswith("got {'gantry_y': nan}")
    robot.feed = good
    assert robot.run_until(lambda: robot.fresh())
    assert robot.node._report()[2]['last_error'] == ''


@pytest.mark.parametrize('error', [WeightsError('policy', 'must be a folder', '/nowhere'),
                                   ZeroDivisionError('planted')])
def test_with_autostart_a_node_that_cannot_start_ends(make_robot, error, capfd):
    def load(*_):
        raise error
    robot = make_robot('autostart:=true', load_policy=load)
    with pytest.raises(SystemExit) as ended:
        robot.run_until(lambda: False)
    assert ended.value.code == 1
    assert 'cannot configure' in capfd.readouterr().err


def test_with_autostart_a_node_whose_control_thread_died_ends(make_robot):
    robot = make_robot('autostart:=true', 'safe_action:=zeros')
    robot.instruction.publish(String(data='reach the red cube'))
    assert robot.run_until(lambda: robot.actions)

    def break_down(_result):
        raise RuntimeError('planted')
    robot.node._loop.tick = break_down
    with pytest.raises(SystemExit) as ended:
        robot.run_until(lambda: False)
    assert ended.value.code == 1 and robot.node.state == 'unconfigured'
    assert robot.graph.spin_until(lambda: not any(robot.actions[-1].points[0].velocities))


def test_autostart_needs_no_manager_and_the_trace_has_one_record_a_tick(make_robot, tmp_path):
    path = tmp_path / 'trace.csv'
    robot = make_robot('autostart:=true', f'trace_path:={path}')
    robot.instruction.publish(String(data='reach the red cube'))
    assert robot.run_until(lambda: len(robot.fresh()) > 5)
    robot.node.close()
    trace = read_trace(path)
    assert (np.diff(trace['tick']) == 1).all()
    assert (trace['cause'] == 'fresh').sum() >= 5


def test_refused_real_time_wishes_are_one_line_each_and_no_end(make_robot, monkeypatch, capfd):
    from vla_edge_ros.nodes import realtime

    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')
    monkeypatch.setattr(realtime.os, 'sched_setscheduler', refuse)
    monkeypatch.setattr(realtime.os, 'sched_setaffinity', refuse)
    robot = make_robot('rt_priority:=50', 'cpu_affinity:="0"')
    robot.start()
    assert robot.run_until(lambda: robot.fresh())
    logged = capfd.readouterr().err
    assert 'rt_priority 50 refused by the system (Operation not permitted)' in logged
    assert 'cpu_affinity 0 refused by the system' in logged
