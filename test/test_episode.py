import json
import shutil

import numpy as np
import pytest
from test_trace import result as step
from test_trace import write

from vla_edge_ros import cli
from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import BackendUnavailable, ConfigError, VlaEdgeError
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Observation
from vla_edge_ros.sim import rendering
from vla_edge_ros.sim.episode import BatchParameters, run_episodes, summarise, wilson_interval
from vla_edge_ros.sim.scene import COLOURS
from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator
from vla_edge_ros.sim.world import World


class ConstantPolicy:
    """Always moves to the right, and keeps what it was given."""

    def __init__(self):
        self.instructions = []
        self.observed = []

    def reset(self):
        self.observed.clear()

    def set_instruction(self, text):
        self.instructions.append(text)

    def observe(self, image, proprioception, stamp_ns):
        self.observed.append((image, proprioception.copy(), stamp_ns))
        return Observation(0, None, 1, {})

    def act(self):
        values = np.array([[0.2, 0.0]] * 3, np.float32)
        return ActionChunk(
            values, NS_PER_S // 30, np.zeros(2, np.float32), np.zeros(8, np.int32),
            self.observed[-1][2])


def oracle_success(delay_ms, episodes=12):
    simulator = Simulator(EpisodeParameters(delay_ms=delay_ms, control='oracle'))
    return np.mean([simulator.run(0, index).succeeded for index in range(episodes)])


def blind_simulator(policy, camera_phase_ms=0.0, **kwargs):
    parameters = EpisodeParameters(control='blank', camera_phase_ms=camera_phase_ms, **kwargs)
    return Simulator(parameters, policy)


def test_oracle_succeeds_without_delay_and_fails_far_behind():
    assert oracle_success(0.0) == 1.0
    assert oracle_success(200.0) == 0.0


def test_equal_seeds_give_equal_episodes():
    simulator = Simulator(EpisodeParameters(control='oracle', delay_ms=100.0))
    first, other, again = (simulator.run(7, index) for index in (1, 2, 1))
    np.testing.assert_array_equal(first.ages_ms, again.ages_ms)
    assert first.causes == again.causes and first.succeeded == again.succeeded
    assert len(first.ages_ms) != len(other.ages_ms)


def test_age_is_delay_and_compute_and_the_wait_for_a_frame():
    policy = ConstantPolicy()
    result = blind_simulator(policy, delay_ms=50.0, compute_ms=10.0).run(0, 0)
    assert result.decisions == {'refuse': 2, 'full': 88}
    assert result.causes['waiting'] == 2 and result.causes['fresh'] == 88
    np.testing.assert_allclose(result.ages_ms, 60.0, atol=1e-3)
    result = blind_simulator(policy, delay_ms=60.0, compute_ms=10.0).run(0, 0)
    np.testing.assert_allclose(result.ages_ms, 10.0 + 200.0 / 3, atol=1e-3)


def test_costs_are_drawn_from_a_live_trace(tmp_path):
    path = tmp_path / 'trace.csv'
    stages = {'preprocess_ms': 0.5, 'vision_ms': 0.5, 'prefill_ms': 3.0}
    write(path, step(decode_ms=6.0, **stages), step(decode_ms=8.0, **stages))
    simulator = blind_simulator(ConstantPolicy(), latency_trace=str(path))
    first, other, again = (simulator.run(0, index).ages_ms.round(3) for index in (0, 1, 0))
    assert set(first) == {10.0, 12.0} and 20 < (first == 10.0).sum() < 70
    assert (first == again).all() and (first != other).any()


def test_every_episode_draws_the_phase_of_its_camera():
    simulator = blind_simulator(ConstantPolicy(), camera_phase_ms=-1.0, compute_ms=10.0)
    ages_ms = [simulator.run(0, index).ages_ms for index in range(6)]
    assert all(10.0 <= age <= 10.0 + 1000.0 / 60 for age in np.concatenate(ages_ms))
    assert len({round(float(ages[0]), 3) for ages in ages_ms}) == 6


def test_frames_come_at_60_hz_with_the_joints_of_their_moment():
    policy = ConstantPolicy()
    tips = {}
    simulator = blind_simulator(policy, delay_ms=100.0, compute_ms=0.0)
    simulator.run(0, 0, lambda result, world: tips.setdefault(world.time_ns, world.tip))
    assert len(policy.observed) == 87
    for number, (_, joints, stamp_ns) in enumerate(policy.observed):
        assert stamp_ns == 2 * number * NS_PER_S // 60
        np.testing.assert_array_equal(joints, tips[stamp_ns])
    assert policy.observed[-1][1][0] > policy.observed[0][1][0] + 0.1


def test_old_command_stays_in_force_until_the_new_one_is_published():
    seen = []
    simulator = blind_simulator(ConstantPolicy(), compute_ms=20.0)
    simulator.run(0, 0, lambda result, world: seen.append(
        (result.published_ns, world.time_ns, world.tip[0])))
    assert [(row[0], row[1]) for row in seen[:2]] == [
        (20_000_000, 20_000_000), (53_333_333, 53_333_333)]
    start = seen[0][2]
    assert seen[1][2] - start == pytest.approx(0.2 * (0.0333 - 0.03 * 0.67), rel=0.1)


def test_compute_over_the_deadline_is_refused_by_name():
    result = blind_simulator(ConstantPolicy(), compute_ms=45.0).run(0, 0)
    assert result.reasons['over_budget'] + result.reasons['decode_over_budget'] > 40
    assert sum(result.reasons.values()) == sum(result.causes.values()) == 90


def test_wrong_colour_control_names_another_cube():
    for index in range(8):
        colours = []
        for control in ('blank', 'wrong-colour'):
            policy = ConstantPolicy()
            simulator = Simulator(EpisodeParameters(control=control), policy)
            simulator._draw = lambda: None
            simulator.run(3, index)
            words = policy.instructions[0].lower()
            colours += [colour for colour in COLOURS if colour in words]
        assert len(colours) == 2 and colours[0] != colours[1]


def test_policy_sees_pictures_and_blank_control_sees_none():
    try:
        rendering.make_gl_context(64, 64).free()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    spread = {}
    for control in ('none', 'blank'):
        policy = ConstantPolicy()
        simulator = Simulator(EpisodeParameters(control=control), policy)
        simulator.run(0, 0)
        simulator.close()
        images = [image for image, _, _ in policy.observed]
        assert {image.shape for image in images} == {(160, 192, 3)}
        spread[control] = images[0].std()
        changed = np.abs(images[-1].astype(int) - images[0]).max()
        assert (changed > 100) == (control == 'none')
    assert spread['none'] > 20 and spread['blank'] == 0


def test_policy_error_ends_the_run():
    class TooShort(ConstantPolicy):
        def set_instruction(self, text):
            raise ConfigError('instruction', 'must fit 3 prompt tokens', text)

    with pytest.raises(ConfigError, match='must fit 3'):
        blind_simulator(TooShort()).run(0, 0)


def test_result_does_not_depend_on_workers():
    parameters = EpisodeParameters(control='oracle', delay_ms=100.0)
    summaries = []
    for workers in (1, 2):
        batch = BatchParameters(episodes=6, seed=5, workers=workers)
        results = run_episodes(batch, parameters, StopRequest())
        summaries.append(summarise(results, batch, parameters))
    assert summaries[0] == summaries[1]


def test_worker_error_reaches_the_caller(tmp_path):
    batch = BatchParameters(episodes=2, workers=2)
    with pytest.raises(VlaEdgeError, match=str(tmp_path)):
        list(run_episodes(batch, EpisodeParameters(policy=str(tmp_path)), StopRequest()))


def test_command_writes_its_summary(tmp_path, capsys):
    path = tmp_path / 'new' / 'sim.json'
    words = ['sim', '--episodes', '3', '--seed', '2', '--workers', '1', '--control', 'oracle']
    assert cli.run([*words, '--json', str(path)], StopRequest()) == 0
    summary = json.loads(path.read_text())
    assert summary['episodes'] == 3
    assert summary['success_rate'] == 1.0
    assert summary['success_interval'][0] < 1.0
    assert set(summary['observation_age_ms']) == {'p50', 'p95', 'p99', 'max'}
    assert summary['decisions'] == {'full': summary['ticks']}
    assert summary['config']['camera_phase_ms'] == -1.0
    assert summary['config']['seed'] == 2
    assert 'success rate' in capsys.readouterr().out


@pytest.mark.parametrize(('option', 'value'), [
    ('episodes', '0'), ('delay-ms', '-1'), ('delay-ms', 'nan'), ('workers', '999'),
    ('object-speed', '9'), ('seed', '-1'), ('seed', str(2**31)), ('json', '/proc/none/file.json'),
    ('json', '/'), ('policy', '/nonexistent'), ('latency-trace', '/nonexistent'),
    ('latency-trace', '/'),
])
@pytest.mark.parametrize('workers', ['1', '2'])
def test_bad_value_is_one_clear_line_before_any_progress(option, value, workers, capsys):
    words = ['sim', '--workers', workers, f'--{option}', value]
    assert cli.run(words, StopRequest()) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f'vla-edge: --{option} must be')
    assert output.err.count('\n') == 1 and not output.out


@pytest.mark.parametrize(('words', 'option'), [
    (['--control', 'oracle', '--policy', 'p'], '--policy'),
    (['--latency-trace', 't.csv', '--compute-ms', '8'], '--compute-ms'),
])
def test_option_without_effect_is_refused(words, option, capsys):
    assert cli.run(['sim', *words], StopRequest()) == 2
    assert capsys.readouterr().err.startswith(f'vla-edge: {option} must not be given with ')


@pytest.mark.parametrize('workers', ['1', '2'])
def test_what_only_the_workers_find_out_is_told_before_any_progress(workers, tmp_path, capsys):
    policy = shutil.copytree(DEFAULT_POLICY, tmp_path / 'policy')
    (policy / 'model.safetensors').write_bytes(b'no weights')
    out = tmp_path / 'sim.json'
    words = ['sim', '--workers', workers, '--policy', str(policy), '--json', str(out)]
    assert cli.run(words, StopRequest()) == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and 'model.safetensors' in error
    assert not out.exists()


@pytest.mark.parametrize(('successes', 'trials', 'interval'), [
    (0, 10, (0.0, 0.2775)), (95, 100, (0.8882, 0.9785)), (10, 10, (0.7225, 1.0)),
])
def test_wilson_interval_matches_published_values(successes, trials, interval):
    np.testing.assert_allclose(wilson_interval(successes, trials), interval, atol=1e-4)


@pytest.mark.parametrize(('control', 'low', 'high'), [
    ('none', 0.9, 1.0), ('wrong-colour', 0.0, 0.1), ('blank', 0.0, 0.1)])
def test_the_shipped_policy_follows_what_is_named_and_only_what_it_sees(control, low, high):
    simulator = Simulator(EpisodeParameters(control=control))
    successes = [simulator.run(11, index).succeeded for index in range(20)]
    simulator.close()
    assert low <= np.mean(successes) <= high


def test_an_action_moves_the_robot_only_after_the_time_of_actuation():
    parameters = EpisodeParameters(
        control='oracle', compute_ms=8.0, camera_phase_ms=5.0, actuation_ms=6.0)
    seen = []
    Simulator(parameters).run(
        0, 0, lambda step, world: seen.append(
            (step.published_ns, world.time_ns, world.tip.copy())))
    assert all(now_ns - published_ns == 6_000_000 for published_ns, now_ns, _ in seen)
    start = World()
    start.reset(np.random.default_rng([0, 0]))
    np.testing.assert_array_equal(seen[0][2], start.tip)
    assert np.linalg.norm(seen[1][2] - start.tip) > 1e-3
