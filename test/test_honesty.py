"""Virtual time against real time: what is compared, and a few episodes both ways."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from vla_edge_ros.clock import NS_PER_MS, NS_PER_S
from vla_edge_ros.demo.processes import NodeFailed
from vla_edge_ros.lab import honesty
from vla_edge_ros.lab.honesty import CAMERA_PERIOD_MS, compare, distance_ms, phases_ms, run_virtual
from vla_edge_ros.lab.live_episodes import (
    _changed_environment,
    _outcomes,
    _until_the_camera_stopped,
    LiveRun,
    TransportProbe,
)
from vla_edge_ros.runtime.frame_buffer import FrameWriter
from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator
from vla_edge_ros.telemetry.trace import read_trace, TraceWriter

EPOCH_NS = 1_700_000_000 * NS_PER_S


def live_of(tmp_path, phase_ms=6.0, delay_ms=2.0, cost_ms=8.0, episodes=3):
    """Return what a live run of known phase, transport and cost would have recorded."""
    parameters = EpisodeParameters(
        control='oracle', compute_ms=cost_ms, camera_phase_ms=phase_ms, delay_ms=delay_ms,
        safe_action='zeros')
    simulator = Simulator(parameters)
    path = tmp_path / 'trace.csv'
    with TraceWriter(path, 2, lossless=True) as writer:
        results = [simulator.run(4, index, lambda step, _: writer.record(step))
                   for index in range(episodes)]  # fmt: skip
    trace = read_trace(path)
    for name in ('action_stamp_ns', 'observation_stamp_ns'):  # ROS time is another clock
        trace[name] = np.where(trace[name] >= 0, trace[name] + EPOCH_NS, trace[name])
    outcomes = np.array([result.succeeded for result in results])
    return LiveRun(outcomes, path, trace, np.full(50, delay_ms), np.full(9, 1.0))


def test_the_phase_of_the_camera_is_told_from_every_action(tmp_path):
    live = live_of(tmp_path, phase_ms=6.0)
    phases = phases_ms(live.trace)
    assert len(phases) > 60
    # Camera periods of whole nanoseconds drift by some of them.
    np.testing.assert_allclose(phases, 6.0, atol=0.01)
    assert phases.max() < CAMERA_PERIOD_MS


def test_virtual_time_with_what_was_recorded_gives_the_run_that_was_recorded(tmp_path):
    live = live_of(tmp_path, phase_ms=6.0)
    # The trace came from the expert: what is compared here are the ages.
    virtual = run_virtual(live, 4, 3, 0.3, 'deadline')
    ages_ms = live.trace['observation_age_ms']
    assert distance_ms(ages_ms, virtual['ages_ms']) < 0.05
    assert np.median(virtual['ages_ms']) == pytest.approx(6.0 + 8.0, abs=0.05)
    assert virtual['outcomes'].shape == (3,) and virtual['causes']['fresh'] > 60


def test_virtual_episodes_that_fail_close_their_simulator(tmp_path, monkeypatch):
    live, closed = live_of(tmp_path), []
    monkeypatch.setattr(Simulator, 'close', lambda _: closed.append(True))
    monkeypatch.setattr(Simulator, 'run', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_virtual(live, 4, 3, 0.3, 'deadline')
    assert closed == [True]


def test_a_live_run_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.setenv('ROS_DOMAIN_ID', '7')
    monkeypatch.delenv('ROS_LOG_DIR', raising=False)
    before = dict(os.environ)
    with pytest.raises(NodeFailed), _changed_environment(
            {'ROS_DOMAIN_ID': '8', 'ROS_LOG_DIR': 'there'}):
        assert os.environ['ROS_DOMAIN_ID'] == '8' and os.environ['ROS_LOG_DIR'] == 'there'
        raise NodeFailed('planted')
    assert dict(os.environ) == before


def test_a_transport_longer_than_the_phase_shows_the_picture_before(tmp_path):
    live = live_of(tmp_path, phase_ms=1.0, delay_ms=5.0)
    virtual = run_virtual(live, 4, 3, 0.3, 'deadline')
    expected_ms = 1.0 + CAMERA_PERIOD_MS + 8.0
    assert np.median(virtual['ages_ms']) == pytest.approx(expected_ms, abs=0.05)


def test_the_distance_of_two_distributions_is_how_far_ages_would_have_to_move():
    ages = np.array([10.0, 20.0, np.nan, 30.0, 40.0] * 50)
    assert distance_ms(ages, ages) == 0
    assert distance_ms(ages, ages + 3.0) == pytest.approx(3.0)
    assert distance_ms(ages, ages - 3.0) == pytest.approx(3.0)
    # A median in the gap between two ages jumps, the distance does not.
    one, other = np.repeat([35.0, 69.0], (49, 51)), np.repeat([35.0, 69.0], (51, 49))
    assert abs(np.median(one) - np.median(other)) == 34
    assert distance_ms(one, other) == pytest.approx(0.02 * 34, abs=0.1)


def side(live, won, moved_ms=0.0):
    ages = live.trace['observation_age_ms'] + moved_ms
    causes = {'fresh': 9, 'late': 1}
    return {'outcomes': np.array(won), 'ages_ms': ages, 'causes': honesty.Counter(causes)}


@pytest.mark.parametrize(('won', 'moved_ms', 'agree', 'what'), [
    ([True, True, True], 0.0, True, None),
    ([True, True, True], 1.5, True, None),
    ([True, False, True], 0.0, False, 'success_rate'),
    ([True, True, True], 2.5, False, 'distance'),
    ([True, True, True], -4.5, False, 'p95'),
])
def test_sides_agree_within_the_tolerances_only(tmp_path, won, moved_ms, agree, what):
    live = live_of(tmp_path)
    assert live.outcomes.all()
    found = json.loads(json.dumps(compare([live], [side(live, won, moved_ms)])))
    assert found['agree'] is agree
    if what:
        assert abs(found['virtual_less_live'][what]) > found['tolerances'][what]
    assert found['same_outcome'] == pytest.approx(sum(won) / 3)
    assert found['live']['success_rate'] == 1 and found['live']['episodes'] == 3
    assert found['virtual']['cause_shares'] == {'fresh': 0.9, 'late': 0.1}
    inputs, = found['runs']
    assert inputs['camera_phase_ms'] == pytest.approx(6.0, abs=0.01)
    assert inputs['run_ms']['p50'] == pytest.approx(8.0) and inputs['transport_ms']['max'] == 2
    assert inputs['tick_late_ms']['p50'] == 0
    assert inputs['action_transport_ms']['p50'] == 1


def test_ticks_after_the_camera_stopped_are_left_out():
    stamps = np.array([-1, 5, 5, 6, 7, 7, 7, -1, -1])
    trace = {'tick': np.arange(9), 'observation_stamp_ns': stamps}
    assert _until_the_camera_stopped(trace)['tick'].tolist() == [0, 1, 2, 3, 4]
    still = {'tick': np.arange(3), 'observation_stamp_ns': np.array([5, 5, 5])}
    assert len(_until_the_camera_stopped(still)['tick']) == 3


def test_outcomes_are_read_from_the_log_and_none_may_be_missing(tmp_path):
    log = tmp_path / 'sim_node.log'
    log.write_text('[INFO] episode 0 succeeded after 41 ticks\nnoise\n'
                   '[INFO] episode 1 failed after 90 ticks\n')  # fmt: skip
    assert _outcomes(log, 2).tolist() == [True, False]
    with pytest.raises(NodeFailed, match='tells of 2 of 3 episodes'):
        _outcomes(log, 3)


def test_the_probe_tells_how_late_frames_come():
    name = f'vla_edge_test_probe_{os.getpid()}'
    image = np.zeros((4, 6, 3), np.uint8)
    with FrameWriter(name, 72) as writer, TransportProbe(name) as probe:
        while len(probe._seen_ms) < 5:
            now_ns = time.time_ns()
            writer.write(image, now_ns - 30 * NS_PER_MS, now_ns - 20 * NS_PER_MS)
    # Ten from stamp to reception, and 20 more until it was written.
    assert np.median(probe.transport_ms()) >= 30
    assert probe.transport_ms().shape == (len(probe._seen_ms),)
    assert TransportProbe(name).transport_ms().size == 0


@pytest.mark.parametrize('words', [['--episodes', '0'], ['--episodes', '3', '--runs', '4']])
def test_numbers_that_make_no_sense_are_refused(words, capsys):
    assert honesty.main(words) == 2
    assert '--episodes must be in 1..100000' in capsys.readouterr().err


@pytest.mark.parametrize(('schedule', 'episodes'), [('deadline', 5), ('overlap', 4)])
def test_a_few_episodes_agree_through_dds_and_in_virtual_time(tmp_path, schedule, episodes):
    # At the ordinary speed all succeed; how exactly ages agree is for a quiet machine to say.
    found = honesty.measure(schedule, 0.3, episodes, 1, tmp_path)
    assert found['live']['episodes'] == found['virtual']['episodes'] == episodes
    assert found['live']['success_rate'] == found['virtual']['success_rate'] == 1
    assert found['virtual_less_live']['distance'] < CAMERA_PERIOD_MS
    main = {cause for cause, share in found['virtual']['cause_shares'].items() if share > 0.2}
    assert main == {cause for cause, share in found['live']['cause_shares'].items() if share > 0.2}


def test_a_signal_ends_the_nodes_too(tmp_path):
    process = subprocess.Popen(
        [sys.executable, '-m', 'vla_edge_ros.lab.honesty'], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, 'TMPDIR': str(tmp_path)})
    until = time.monotonic() + 60.0
    while not list(tmp_path.glob('*/deadline_0/sim_node.log')):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30.0)
    assert process.returncode == 0 and output.endswith('honesty: stopped\n'), output
    assert len(children) >= 2 and not any(child.is_running() for child in children)
    assert not list(tmp_path.iterdir())
