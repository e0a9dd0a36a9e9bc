"""Replay of a bag through the control loop in virtual time."""

from argparse import ArgumentParser
import json
from types import SimpleNamespace

from bag_maker import (
    make_bag,
    make_image,
    PERIOD_NS,
    START_NS,
    TRANSPORT_NS,
    write_image,
    write_joints,
)
import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError, TransportError
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.replay.bag import BagReader, BagWriter, STRING
from vla_edge_ros.replay.inputs import BagInputs, ReplayParameters
from vla_edge_ros.replay.replay import add_arguments, replay_bag, run
from vla_edge_ros.telemetry.trace import read_trace

CONFIG = SimpleNamespace(joint_names=('x', 'y'), action_dim=2)


class FakePolicy:
    """Answer with an action that depends on all it was ever shown, and note the calls."""

    config = CONFIG

    def __init__(self):
        self.calls = []
        self._sum = 0

    def reset(self):
        self.calls.append('reset')
        self._sum = 0

    def set_instruction(self, text):
        self.calls.append(text)

    def observe(self, image, proprioception, stamp_ns):
        self.calls.append((image.copy(), proprioception.copy(), stamp_ns))
        self._sum += int(image.sum())
        self._stamp_ns = stamp_ns
        return SimpleNamespace(stage_ns={}, evicted_frame_id=None, num_frames=1)

    def act(self):
        values = np.float32([[self._sum % 97, self._sum % 89]]) / 100
        tokens = np.zeros(8, np.int32)
        return ActionChunk(values, 33_333_333, np.zeros(2), tokens, self._stamp_ns)

    @property
    def observations(self):
        return [call for call in self.calls if isinstance(call, tuple)]


@pytest.mark.parametrize('storage', ['sqlite3', 'mcap'])
def test_two_replays_are_equal_to_the_byte(tmp_path, storage):
    bag = make_bag(tmp_path / 'bag', 60, storage)
    policy = FakePolicy()
    for name in ('a', 'b'):
        replay_bag(bag, policy, tmp_path / name)
    for name in ('trace.csv', 'summary.json'):
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()
    trace = read_trace(tmp_path / 'a' / 'trace.csv')
    assert len(set(trace['action_0'])) > 10


def test_raw_and_lossless_compressed_recordings_replay_alike(tmp_path):
    traces = []
    for compressed in (False, True):
        bag = make_bag(tmp_path / f'bag{compressed}', 30, compressed=compressed)
        replay_bag(bag, FakePolicy(), tmp_path / 'out')
        traces.append((tmp_path / 'out' / 'trace.csv').read_bytes())
    assert traces[0] == traces[1]


def test_policy_sees_the_newest_frame_as_it_was_recorded(tmp_path):
    policy = FakePolicy()
    replay_bag(make_bag(tmp_path / 'bag', 31), policy, tmp_path)
    assert policy.calls[:2] == ['reset', 'reach the red cube']
    assert len(policy.observations) == 16
    for tick, (image, positions, stamp_ns) in enumerate(policy.observations):
        index = 2 * tick  # 60 Hz frames, 30 Hz ticks from the first frame on
        np.testing.assert_array_equal(image, make_image(index))
        assert stamp_ns == START_NS + index * PERIOD_NS
        np.testing.assert_array_equal(positions, np.float32([0.001 * index, -0.001 * index]))


def test_observation_age_is_transport_plus_virtual_cost(tmp_path):
    parameters = ReplayParameters(prefill_ms=10.0, decode_ms=5.0)
    summary = replay_bag(make_bag(tmp_path / 'bag', 31), FakePolicy(), tmp_path, parameters)
    assert summary['ticks'] == 16
    assert summary['decisions'] == {'full': 16}
    assert summary['camera'] == {'published': 31, 'received': 31, 'lost_fraction': 0.0}
    assert summary['action_rate_hz'] == pytest.approx(30.0, abs=0.01)
    assert summary['observation_age_ms']['p50'] == pytest.approx(17.0, abs=0.01)


def test_costs_over_the_deadline_are_refused_by_name(tmp_path):
    parameters = ReplayParameters(prefill_ms=10.0, decode_ms=30.0)
    summary = replay_bag(make_bag(tmp_path / 'bag', 31), FakePolicy(), tmp_path, parameters)
    assert summary['reasons']['decode_over_budget'] > 5
    trace = read_trace(tmp_path / 'trace.csv')
    assert set(trace['decision']) == {'full', 'prefill_only', 'refuse'}
    assert sum(summary['reasons'].values()) == summary['ticks'] == len(trace['tick'])


def test_recorded_instruction_changes_when_it_was_recorded(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        for index in range(20):
            now_ns = START_NS + index * PERIOD_NS
            write_joints(writer, '/joint_states', [0, 0], now_ns)
            write_image(writer, '/camera', make_image(index), now_ns, now_ns)
            if index in (1, 4, 10):
                text = {1: 'touch the red cube', 4: '  ', 10: 'touch the blue cube'}[index]
                writer.write_fields('/instruction', STRING, {'data': text}, now_ns)
    policy = FakePolicy()
    summary = replay_bag(tmp_path / 'bag', policy, tmp_path)
    assert summary['reasons']['no_instruction'] == 1
    texts = [call for call in policy.calls if isinstance(call, str)]
    assert texts == ['reset', 'touch the red cube', 'touch the blue cube']
    stamp_ns = policy.calls[policy.calls.index('touch the blue cube') + 1][2]
    assert stamp_ns == START_NS + 10 * PERIOD_NS


def test_given_instruction_replaces_the_recorded_ones(tmp_path):
    policy = FakePolicy()
    parameters = ReplayParameters(instruction='track the green block')
    replay_bag(make_bag(tmp_path / 'bag', 4), policy, tmp_path, parameters)
    texts = [call for call in policy.calls if isinstance(call, str)]
    assert texts == ['reset', 'track the green block']


def test_undecodable_frames_are_counted_and_skipped(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        for index in range(8):
            now_ns = START_NS + 2 * index * PERIOD_NS
            write_joints(writer, '/joint_states', [0, 0], now_ns)
            encoding = 'tiff99' if index in (2, 5) else 'rgb8'
            stamp_ns = 0 if index == 3 else now_ns
            write_image(writer, '/camera', make_image(index), stamp_ns, now_ns, encoding)
    policy = FakePolicy()
    parameters = ReplayParameters(instruction='reach the red cube')
    summary = replay_bag(tmp_path / 'bag', policy, tmp_path, parameters)
    assert summary['camera'] == {'published': 8, 'received': 5, 'lost_fraction': 0.375}
    assert summary['reasons']['repeated_frame'] == 3
    errors = {text.split(' must')[0]: n for text, n in summary['input_errors'].items()}
    assert errors == {'encoding': 2, 'header.stamp': 1}
    stamps = [stamp_ns for _, _, stamp_ns in policy.observations]
    assert stamps == [START_NS + 2 * i * PERIOD_NS for i in (0, 1, 4, 6, 7)]


def test_joint_states_are_ordered_by_name_and_incomplete_ones_ignored(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        write_joints(writer, '/joint_states', [2, 9, 1], START_NS - 2, ('y', 'gripper', 'x'))
        write_joints(writer, '/joint_states', [7], START_NS - 1, ('x',))
        write_joints(writer, '/joint_states', [7, np.nan], START_NS - 1, ('x', 'y'))
        write_image(writer, '/camera', make_image(0), START_NS, START_NS)
    policy = FakePolicy()
    parameters = ReplayParameters(instruction='reach')
    summary = replay_bag(tmp_path / 'bag', policy, tmp_path, parameters)
    assert policy.observations[0][1].tolist() == [1.0, 2.0]
    assert len(summary['input_errors']) == 2
    assert all('position for each of x, y' in text for text in summary['input_errors'])


def test_policy_without_joints_needs_no_joint_topic(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        write_image(writer, '/camera', make_image(0), START_NS, START_NS)
    policy = FakePolicy()
    policy.config = SimpleNamespace(joint_names=(), proprioception_mean=(0.5,), action_dim=2)
    replay_bag(tmp_path / 'bag', policy, tmp_path, ReplayParameters(instruction='reach'))
    assert policy.observations[0][1].tolist() == [0.5]


def test_policy_that_raises_leaves_the_replay_running(tmp_path):
    policy = FakePolicy()
    policy.act = lambda: 1 / 0
    summary = replay_bag(make_bag(tmp_path / 'bag', 11), policy, tmp_path)
    assert summary['policy_errors'] == {'ZeroDivisionError: division by zero': 6}
    assert summary['observation_age_ms']['max'] is None


@pytest.mark.parametrize(
    'field, value, message',
    [
        ('image_topic', '/front', r'image_topic must name one topic .*/camera/image_raw'),
        ('joint_topic', '/arm', r'joint_topic must name one topic .*/joint_states'),
        ('instruction_topic', '/ask', r'or give an instruction\) must name one topic'),
    ],
)
def test_topic_that_the_bag_lacks_is_named(tmp_path, field, value, message):
    bag = make_bag(tmp_path / 'bag', 2)
    with pytest.raises(TransportError, match=message):
        replay_bag(bag, FakePolicy(), tmp_path, ReplayParameters(**{field: value}))


def test_bag_without_a_single_image_is_refused(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        write_image(writer, '/camera', make_image(0), START_NS, START_NS)
        write_joints(writer, '/joint_states', [0, 0], START_NS)
    (file,) = (tmp_path / 'bag').glob('*.db3')
    import sqlite3

    with sqlite3.connect(file) as connection:
        connection.execute('DELETE FROM messages WHERE topic_id = 1')
    parameters = ReplayParameters(instruction='reach')
    with BagReader(tmp_path / 'bag') as bag:
        with pytest.raises(TransportError, match='image_topic must hold an image'):
            BagInputs(bag, parameters, CONFIG)


def test_inputs_show_nothing_from_the_future(tmp_path):
    with BagReader(make_bag(tmp_path / 'bag', 5)) as bag:
        inputs = BagInputs(bag, ReplayParameters(), CONFIG)
        assert inputs.start_ns == START_NS + TRANSPORT_NS
        assert inputs.read() is None
        for index in range(5):
            inputs.advance_to(inputs.start_ns + index * PERIOD_NS - 1)
            assert inputs.images == index
            inputs.advance_to(inputs.start_ns + index * PERIOD_NS)
            frame = inputs.read()
            assert frame.sequence == index + 1
            assert frame.received_ns == frame.stamp_ns + TRANSPORT_NS
        assert inputs.exhausted


def parse(*words):
    """Parse the options of the subcommand."""
    parser = ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_command_line_writes_trace_and_summary(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('vla_edge_ros.policy.policy.Policy.load', lambda folder: FakePolicy())
    bag, out = make_bag(tmp_path / 'bag', 11), tmp_path / 'out'
    assert run(parse(bag, '--out', out, '--latency-ms', '4,6'), StopRequest()) == 0
    summary = json.loads((out / 'summary.json').read_text())
    assert summary == json.loads(capsys.readouterr().out)
    assert summary['ticks'] == 6
    assert read_trace(out / 'trace.csv')['prefill_ms'].tolist() == [4.0] * 6


@pytest.mark.parametrize('text', ['8', 'a,b', '1,2,3', '-1,2', 'nan,1'])
def test_latency_option_that_makes_no_sense_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match='latency-ms|prefill_ms'):
        run(parse(tmp_path, f'--latency-ms={text}'), StopRequest())


def test_live_rate_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match='rate must be > 0, got 0.0'):
        run(parse(tmp_path, '--live', '--rate', 0), StopRequest())
