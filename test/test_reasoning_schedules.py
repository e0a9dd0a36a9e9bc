"""The schedules on the live node: chosen by parameter, also while it acts, and reported."""

from fake_policy import FakePolicy
from rclpy.parameter import Parameter
from test_reasoning_node import make_robot

from vla_edge_ros.nodes.diagnostics import OK
from vla_edge_ros.telemetry.trace import MISSING_INT, read_trace

__all__ = ['make_robot']


def set_schedule(robot, **values):
    return robot.node.set_parameters([Parameter(k, value=v) for k, v in values.items()])[0]


def test_latest_runs_the_policy_between_ticks_too(make_robot, tmp_path):
    path = tmp_path / 'trace.csv'
    robot = make_robot(
        'schedule:=latest', f'trace_path:={path}', policy=FakePolicy(observe_s=0.02, act_s=0.025))
    robot.start()
    assert robot.run_until(lambda: len(robot.fresh()) > 20)
    robot.node.close()
    trace = read_trace(path)
    assert set(trace['schedule']) == {'latest'}
    in_between = (trace['decision'] == 'full') & (trace['frame_sequence'] == MISSING_INT)
    assert in_between.any(), 'a run that no tick has looked at a frame for'
    assert trace['runs'].sum() >= len(robot.policy.images) - 2
    assert set(trace['contact']) == {MISSING_INT}, 'the node knows of no contact'


def test_the_schedule_is_changed_while_the_node_acts(make_robot):
    robot = make_robot('safe_action:=zeros', policy=FakePolicy(observe_s=0.02, act_s=0.03))
    robot.start()
    assert robot.run_until(lambda: robot.references)
    for schedule, source in (('sync', 'thinking'), ('overlap', 'queued'), ('latest', 'fresh')):
        assert set_schedule(robot, schedule=schedule).successful
        assert robot.run_until(lambda name=schedule: robot.node._heard.last.schedule == name)
        count = len(robot.references)
        assert robot.run_until(lambda n=count, name=source: name in [
            reference.source for reference in robot.references[n:]])
    refused = set_schedule(robot, schedule='fastest')
    assert not refused.successful
    assert refused.reason == (
        "schedule must be one of deadline, sync, overlap, latest, got 'fastest'")
    assert not set_schedule(robot, overlap_percent=100.5).successful
    refused = set_schedule(robot, chunk_steps=4)
    assert refused.reason == (
        'chunk_steps must be at most 3, the actions in a chunk of the policy, got 4')
    assert set_schedule(robot, chunk_steps=3).successful


def test_diagnostics_tell_the_age_of_every_cause_and_no_planned_pause_is_a_warning(make_robot):
    robot = make_robot(
        'schedule:=sync', 'safe_action:=hold', 'max_action_age_ms:=60000.0',
        policy=FakePolicy(observe_s=0.02, act_s=0.03))
    robot.start()
    assert robot.run_until(lambda: robot.node._loop.causes['thinking'] > 5)
    assert robot.run_until(lambda: robot.node._report()[0] == OK)
    values = robot.node._report()[2]
    assert values['schedule'] == 'sync'
    for cause in ('fresh', 'queued', 'thinking'):
        p50, p99, highest = (
            values[f'observation_age.{cause}.{key}_ms'] for key in ('p50', 'p99', 'max'))
        assert 50.0 < p50 <= p99 <= highest <= values['observation_age_max_ms']
    assert values['observation_age.thinking.p50_ms'] > values['observation_age.fresh.p50_ms']
