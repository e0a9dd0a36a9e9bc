"""The schedules in replay and in the simulator: chosen by the same names, with the same ages."""

import json

from bag_maker import make_bag, PERIOD_NS, START_NS
import numpy as np
import pytest
from test_episode import blind_simulator, ConstantPolicy
from test_replay import fake_policy, FakePolicy, parse, refusal
from test_replay import run as run_replay

from vla_edge_ros import cli
from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.replay.inputs import ReplayParameters
from vla_edge_ros.replay.replay import replay_bag
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters
from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator
from vla_edge_ros.telemetry.age import ages_at_contact
from vla_edge_ros.telemetry.trace import read_trace

__all__ = ['fake_policy']

SCHEDULES = ['deadline', 'sync', 'overlap', 'latest']


def test_replay_starts_a_run_of_latest_with_the_frame_of_that_moment(tmp_path):
    policy = FakePolicy()
    parameters = ReplayParameters(prefill_ms=20.0, decode_ms=30.0)
    loop = ControlLoopParameters(schedule='latest')
    replay_bag(make_bag(tmp_path / 'bag', 120), policy, tmp_path / 'a', parameters, loop=loop)
    frames = [(stamp_ns - START_NS) // PERIOD_NS for _, _, stamp_ns in policy.observations]
    newest = [run * 50 * NS_PER_MS // PERIOD_NS for run in range(len(frames))]
    assert frames == newest and len(frames) >= 38
    trace = read_trace(tmp_path / 'a' / 'trace.csv')
    assert set(trace['schedule']) == {'latest'} and trace['runs'].max() == 1
    replay_bag(tmp_path / 'bag', policy, tmp_path / 'b', parameters, loop=loop)
    for name in ('trace.csv', 'summary.json'):
        assert (tmp_path / 'a' / name).read_bytes() == (tmp_path / 'b' / name).read_bytes()


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_replay_takes_the_schedule_as_an_option(tmp_path, fake_policy, schedule):
    bag, words = make_bag(tmp_path / 'bag', 60), []
    if schedule == 'overlap':
        words = ['--overlap-percent', '100', '--seam', 'blend']
    arguments = parse(
        bag, '--out', tmp_path / 'out', '--latency-ms', '20,25', '--schedule', schedule, *words)
    assert run_replay(arguments, StopRequest()) == 0
    trace = read_trace(tmp_path / 'out' / 'trace.csv')
    assert set(trace['schedule']) == {schedule}
    summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())
    ages = summary['observation_age_by_cause']
    assert {name: ages[name]['count'] for name in ages} == {
        name: 0 if name == 'waiting' else n for name, n in summary['causes'].items() if n}
    assert summary['observation_age_at_contact_ms'] is None
    assert summary['unexplained_ticks'] == 0


@pytest.mark.parametrize(('words', 'start'), [
    (('--seam', 'blend'), '--seam must be given with --schedule overlap only'),
    (('--schedule', 'sync', '--overlap-percent', '5'), '--overlap-percent must be given with'),
    (('--schedule', 'overlap', '--overlap-percent', '500'), '--overlap-percent must be in 0.0..1'),
    (('--chunk-steps', '17'), '--chunk-steps must be in 0..16'),
    (('--chunk-steps', '4'), '--chunk-steps must be at most 3, the actions in a chunk of the pol'),
])
def test_an_option_that_is_wrong_or_without_effect_is_refused(words, start, tmp_path, capsys):
    assert refusal(make_bag(tmp_path / 'bag', 2), *words).startswith(start)
    assert cli.run(['sim', *words], StopRequest()) == 2
    assert capsys.readouterr().err.startswith(f'vla-edge: {start}')


def test_live_replay_takes_no_schedule_for_the_nodes_have_their_own(tmp_path):
    assert refusal(tmp_path, '--live', '--schedule', 'sync').startswith('--schedule must not be')


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_simulated_ages_are_those_the_schedule_promises(schedule):
    simulator = blind_simulator(
        ConstantPolicy(), compute_ms=50.0, camera_phase_ms=5.0, safe_action='zeros')
    simulator._loop_parameters = ControlLoopParameters(schedule=schedule)
    result = simulator.run(0, 0)
    assert sum(result.causes.values()) == 90
    ages_ms = {cause: result.ages_ms[result.age_causes == cause] for cause in result.causes}
    first = ages_ms['late'] if schedule == 'deadline' else ages_ms['fresh']
    assert first.size and first.min() >= 50.0 - 1e-3
    highest = {'deadline': 105.0, 'sync': 72.0, 'overlap': 72.0, 'latest': 90.0}[schedule]
    assert first.max() <= highest
    if schedule == 'sync':
        assert np.isnan(ages_ms['thinking']).all(), 'zeros go back to no picture'
        assert ages_ms['thinking'].size == result.causes['thinking'] > 10


def test_the_simulator_shows_a_run_between_ticks_the_world_of_that_moment():
    policy = ConstantPolicy()
    simulator = Simulator(
        EpisodeParameters(control='blank', compute_ms=50.0, camera_phase_ms=0.0), policy,
        ControlLoopParameters(schedule='latest'))
    simulator.run(0, 0)
    stamps_ms = np.array([stamp_ns for _, _, stamp_ns in policy.observed]) / NS_PER_MS
    starts_ms = 50.0 * np.arange(len(stamps_ms))
    waits_ms = starts_ms - stamps_ms
    assert len(stamps_ms) >= 59
    assert waits_ms.min() > -1e-3 and waits_ms.max() < 1000 / 60
    moved = np.diff([joints[0] for _, joints, _ in policy.observed])
    before_the_wall = slice(5, 20)
    np.testing.assert_allclose(
        moved[before_the_wall], 0.2 * np.diff(stamps_ms)[before_the_wall] / 1000, rtol=0.02)


@pytest.mark.parametrize('schedule', SCHEDULES)
def test_an_expert_with_long_chunks_succeeds_under_every_schedule(schedule):
    simulator = Simulator(
        EpisodeParameters(control='oracle', compute_ms=20.0, safe_action='zeros'),
        loop=ControlLoopParameters(schedule=schedule, chunk_steps=8))
    results = [simulator.run(5, index) for index in range(4)]
    assert all(result.succeeded for result in results)
    assert all(result.contact_ages_ms.size for result in results)


def test_contact_is_told_by_the_tick_after_it_with_the_age_of_the_action_in_force():
    simulator = Simulator(EpisodeParameters(control='oracle', delay_ms=33.0))
    steps = []
    result = simulator.run(3, 1, lambda step, _: steps.append(step))
    contacts = [step.tick for step in steps if step.contact]
    assert contacts and all(step.contact in (True, False) for step in steps)
    assert result.contact_ages_ms.tolist() == [
        np.float32(steps[tick - 1].observation_age_ms) for tick in contacts]


def test_the_command_writes_a_trace_of_every_episode_with_its_contacts(tmp_path, capsys):
    words = ['--episodes', '3', '--workers', '2', '--control', 'oracle', '--schedule', 'overlap',
             '--chunk-steps', '6', '--compute-ms', '40', '--json', str(tmp_path / 'sim.json'),
             '--traces', str(tmp_path / 'traces')]
    assert cli.run(['sim', *words], StopRequest()) == 0
    summary = json.loads((tmp_path / 'sim.json').read_text())
    paths = sorted((tmp_path / 'traces').iterdir())
    assert [path.name for path in paths] == [f'episode_{index:06}.csv' for index in range(3)]
    traces = [read_trace(path) for path in paths]
    assert sum(len(trace['tick']) for trace in traces) == summary['ticks']
    assert sum(trace['runs'].sum() for trace in traces) == summary['runs'] > 0
    ages_ms = np.concatenate([ages_at_contact(trace) for trace in traces])
    at_contact = summary['observation_age_at_contact_ms']
    assert at_contact['count'] == len(ages_ms) >= 3
    assert at_contact['max'] == pytest.approx(ages_ms.max())
    assert summary['config']['schedule'] == 'overlap' and summary['config']['chunk_steps'] == 6
    assert 'at contact' in capsys.readouterr().out
