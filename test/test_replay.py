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
from vla_edge_ros.replay.bag import BagReader, BagWriter, IMAGE, JOINT_STATE, STRING
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

    def check_instruction(self, text):
        if not text.strip() or len(text) > 100:
            raise ConfigError('instruction', 'must fit 100 characters', text)

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
    encoding, stamp = summary['input_errors']
    assert encoding.pop('first_error').startswith('encoding must be one of rgb8')
    second_ns = 2 * PERIOD_NS
    assert encoding == {
        'topic': '/camera', 'count': 2, 'first_recorded_ns': START_NS + 2 * second_ns}
    assert stamp == {
        'topic': '/camera', 'count': 1, 'first_recorded_ns': START_NS + 3 * second_ns,
        'first_error': 'header.stamp must be set by the camera driver, got 0'}
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
    errors = summary['input_errors']
    assert sum(e['count'] for e in errors) == 2
    assert {e['topic'] for e in errors} == {'/joint_states'}
    assert all('position for each of x, y' in e['first_error'] for e in errors)


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
            BagInputs(bag, parameters, FakePolicy())


def test_inputs_show_nothing_from_the_future(tmp_path):
    with BagReader(make_bag(tmp_path / 'bag', 5)) as bag:
        inputs = BagInputs(bag, ReplayParameters(), FakePolicy())
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


def refusal(*words):
    """Return the line that ends ``vla-edge replay``."""
    with pytest.raises(ConfigError) as caught:
        run(parse(*words), StopRequest())
    assert '\n' not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def fake_policy(monkeypatch):
    policy = FakePolicy()
    monkeypatch.setattr('vla_edge_ros.policy.policy.Policy.load', lambda folder, progress: policy)
    return policy


def test_command_line_writes_trace_and_summary(tmp_path, fake_policy, capsys):
    bag, out = make_bag(tmp_path / 'bag', 11), tmp_path / 'out'
    assert run(parse(bag, '--out', out, '--latency-ms', '4,6'), StopRequest()) == 0
    summary = json.loads((out / 'summary.json').read_text())
    assert summary == json.loads(capsys.readouterr().out)
    assert summary['ticks'] == 6
    assert read_trace(out / 'trace.csv')['prefill_ms'].tolist() == [4.0] * 6


def make_broken_bag(path, bad):
    """Write ten frames, those in ``bad`` cut off; a joint state and an instruction are too."""
    rubbish = b'\x00\x01\x00\x00\xff\xff'
    with BagWriter(path) as writer:
        writer.write_fields('/instruction', STRING, {'data': 'reach the red cube'}, START_NS - 2)
        writer.write('/instruction', STRING, rubbish, START_NS - 1)
        for index in range(10):
            now_ns = START_NS + index * PERIOD_NS
            if index == 3:
                writer.write('/joint_states', JOINT_STATE, rubbish, now_ns)
            else:
                write_joints(writer, '/joint_states', [0, 0], now_ns)
            if index in bad:
                writer.write('/camera', IMAGE, rubbish, now_ns)
            else:
                write_image(writer, '/camera', make_image(index), now_ns, now_ns)
    return path


def test_messages_that_cannot_be_decoded_are_counted_with_the_first_of_them(tmp_path, fake_policy):
    bag, out = make_broken_bag(tmp_path / 'bag', (0, 4)), tmp_path / 'out'
    assert run(parse(bag, '--out', out), StopRequest()) == 0
    summary = json.loads((out / 'summary.json').read_text())
    assert summary['camera'] == {'published': 10, 'received': 8, 'lost_fraction': 0.2}
    found = {e['topic']: (e['count'], e['first_recorded_ns']) for e in summary['input_errors']}
    assert found == {
        '/instruction': (1, START_NS - 1), '/camera': (2, START_NS),
        '/joint_states': (1, START_NS + 3 * PERIOD_NS)}
    assert all(e['first_error'].startswith('message must be') for e in summary['input_errors'])
    assert 'reach the red cube' in fake_policy.calls


def test_bag_without_one_good_image_is_one_line_of_topic_time_and_rule(tmp_path, fake_policy):
    bag, out = make_broken_bag(tmp_path / 'bag', range(10)), tmp_path / 'out'
    line = refusal(bag, '--out', out)
    assert line.startswith('--topic must hold an image that can be used (at 1700000000.000000000 ')
    assert 'message must be a sensor_msgs/msg/Image' in line and line.endswith("got '/camera'")
    assert not (out / 'summary.json').exists()


def test_failed_replay_leaves_nothing_of_an_earlier_one(tmp_path, fake_policy):
    out = tmp_path / 'out'
    run(parse(make_bag(tmp_path / 'good', 11), '--out', out), StopRequest())
    assert {path.name for path in out.iterdir()} == {'trace.csv', 'summary.json'}
    refusal(make_broken_bag(tmp_path / 'bad', range(10)), '--out', out)
    assert not (out / 'summary.json').exists()


def test_policy_judges_recorded_instructions_as_in_the_live_node(tmp_path):
    policy = FakePolicy()
    summary = replay_bag(make_bag(tmp_path / 'bag', 11, text='cube ' * 60), policy, tmp_path)
    assert summary['reasons']['no_instruction'] == summary['ticks']
    (errors,) = summary['input_errors']
    assert errors['topic'] == '/instruction' and 'must fit' in errors['first_error']


@pytest.mark.parametrize('words', [
    ('--latency-ms', '8'), ('--latency-ms', 'a,b'), ('--latency-ms', '1,2,3'),
    ('--latency-ms=-1,2',), ('--latency-ms', 'nan,1'), ('--latency-ms', ''),
    ('--instruction', ''), ('--instruction', ' '), ('--instruction', 'red cube ' * 60),
    ('--topic', '/none'), ('--joint-topic', '/none'), ('--instruction-topic', '/none'),
    ('--rate', 0), ('--rate', 1), ('--live', '--rate', 0), ('--live', '--rate=-1'),
    ('--live', '--rate', 'nan'), ('--live', '--rate', 'inf'), ('--live', '--out', 'out'),
    ('--live', '--policy', 'p'), ('--live', '--latency-ms', '8,8'),
    ('--live', '--instruction', ''), ('--out', '/proc/none'), ('--policy', '/nonexistent'),
])
def test_option_that_is_wrong_or_without_effect_is_refused_by_name(tmp_path, words, fake_policy):
    bag = make_bag(tmp_path / 'bag', 2)
    option = next(word for word in words if str(word) != '--live').split('=')[0]
    out = () if {'--live', '--out'} & set(words) else ('--out', tmp_path / 'out')
    assert refusal(bag, *out, *words).split()[0] == option
    assert not (tmp_path / 'out').exists()


def test_instruction_topic_beside_an_instruction_is_refused(tmp_path):
    line = refusal(tmp_path, '--instruction', 'reach', '--instruction-topic', '/ask')
    assert line.startswith('--instruction-topic must not be given with --instruction')
