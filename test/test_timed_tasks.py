import numpy as np
import pytest
from test_episode import ConstantPolicy

from vla_edge_ros import cli
from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.lab.sweep.grid import make_sweep
from vla_edge_ros.lab.sweep.results import read_results
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.sim import rendering
from vla_edge_ros.sim.conveyor import BELT_EDGE_Y, BeltWorld, BIN, ConveyorTask, NOTHING
from vla_edge_ros.sim.memory import CUE_S, CUE_START_S, CueWorld, MemoryTask
from vla_edge_ros.sim.scene import COLOURS
from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator

TICK_NS = 33_333_333
TIMED = ('conveyor', 'memory')


def run_expert(episodes=10, **parameters):
    simulator = Simulator(EpisodeParameters(control='oracle', **parameters))
    return [simulator.run(0, index) for index in range(episodes)]


def successes(results):
    return sum(result.succeeded for result in results)


@pytest.mark.parametrize('task', TIMED)
def test_expert_succeeds_in_time_and_fails_too_late_or_too_slow(task):
    assert successes(run_expert(task=task)) == 10
    assert successes(run_expert(task=task, delay_ms=200.0)) == 0
    assert successes(run_expert(task=task, object_speed=2.0)) < 10


@pytest.mark.parametrize('task', TIMED)
def test_who_does_not_look_fails(task):
    simulator = Simulator(EpisodeParameters(task=task, control='blank'), ConstantPolicy())
    assert successes(simulator.run(0, index) for index in range(6)) == 0


@pytest.mark.parametrize('task', TIMED)
def test_equal_seeds_give_equal_episodes_whatever_ran_before(task):
    simulator = Simulator(EpisodeParameters(task=task, control='oracle', delay_ms=67.0))
    first, other, again = (simulator.run(7, index) for index in (1, 2, 1))
    np.testing.assert_array_equal(first.ages_ms, again.ages_ms)
    assert (first.succeeded, first.events, first.causes) == (
        again.succeeded, again.events, again.causes)
    assert len(first.ages_ms) != len(other.ages_ms)


@pytest.mark.parametrize('task', TIMED)
def test_age_at_contact_is_that_of_the_action_in_force(task):
    for result in run_expert(3, task=task, delay_ms=50.0, compute_ms=10.0, camera_phase_ms=0.0):
        assert result.contact_ages_ms.size >= 1
        np.testing.assert_allclose(result.contact_ages_ms, 60.0, atol=1e-3)


def test_every_slip_is_noticed_by_the_expert_and_none_happens_unasked():
    slipping = run_expert(task='conveyor', slip_probability=1.0)
    assert [result.events for result in slipping] == 10 * [
        {'grasps': 2, 'slips': 1, 'slips_noticed': 1, 'wrong_grasps': 0}]
    assert successes(slipping) == 10
    firm = run_expert(task='conveyor', slip_probability=0.0)
    assert sum(result.events['slips'] for result in firm) == 0
    assert sum(result.events['grasps'] for result in firm) == 10


def test_who_does_not_notice_a_slip_arrives_with_empty_hands():
    for seed in range(5):
        world = BeltWorld()
        world.reset(np.random.default_rng(seed))
        world.let_slip(0.06)
        task = ConveyorTask('', seed % 4)
        believes_held = False
        while not task.done:
            believes_held |= task.contact
            action = 8.0 * (BIN - world.tip)
            if not believes_held:
                action = task.expert_chunk(world, 1, 0.0)[0]
            world.step(np.clip(action, -1.0, 1.0), TICK_NS)
            task.update(world)
        assert believes_held and not task.succeeded
        assert task.events['slips'] == 1 and task.events['slips_noticed'] == 0
        assert np.linalg.norm(world.tip - BIN) < 0.01


def test_holding_another_cube_ends_the_episode_as_a_failure():
    world = BeltWorld()
    world.reset(np.random.default_rng(0))
    wrong, task = ConveyorTask('', 1), ConveyorTask('', 2)
    while not task.done:
        world.step(wrong.expert_chunk(world, 1, 0.0)[0], TICK_NS)
        task.update(world)
    assert world.held == 1 and task.events['wrong_grasps'] == 1
    assert not task.succeeded and task.ticks < task.LIMIT_TICKS


def test_a_held_cube_goes_with_the_tool_and_a_dropped_one_with_the_belt_or_not_at_all():
    world = BeltWorld(object_speed=0.2)
    world.reset(np.random.default_rng(1))
    task = ConveyorTask('', 0)
    while world.held == NOTHING:
        world.step(task.expert_chunk(world, 1, 0.0)[0], TICK_NS)
    world.step([0.0, -0.5], NS_PER_S // 10)
    np.testing.assert_allclose(world.object_positions[0], world.tip, atol=2e-3)
    world.held = NOTHING
    for y, moves in ((BELT_EDGE_Y + 0.01, True), (BELT_EDGE_Y - 0.01, False)):
        world.object_positions[0] = [-0.1, y]
        world.step([0.0, 0.0], NS_PER_S // 10)
        assert (world.object_positions[0, 0] > -0.095) == moves


def test_the_belt_changes_its_speed_within_its_range():
    world = BeltWorld(object_speed=0.2)
    world.reset(np.random.default_rng(0))
    speeds = []
    for _ in range(120):
        world.step([0.0, 0.0], NS_PER_S // 10)
        speeds.append(world.belt_speed)
    assert 0.1 <= min(speeds) < 0.14 and 0.26 < max(speeds) <= 0.3


@pytest.mark.parametrize('make', [BeltWorld, CueWorld])
def test_a_viewer_shows_all_that_a_state_tells(make):
    world, viewer = make(), make()
    world.reset(np.random.default_rng(3))
    if make is CueWorld:
        world.plan_cue(2, 0, NS_PER_S, NS_PER_S)
    else:
        world.held = 1
    world.step([0.1, 0.0], NS_PER_S // 5)
    viewer.set_state(world.get_state())
    np.testing.assert_array_equal(viewer.get_state(), world.get_state())
    np.testing.assert_array_equal(viewer.object_velocities, world.object_velocities)
    try:
        np.testing.assert_array_equal(viewer.render(), world.render())
    except BackendUnavailable as error:
        pytest.skip(str(error))


def test_cue_is_shown_in_its_time_only_and_the_brake_holds_until_the_release():
    policy, seen = ConstantPolicy(), []
    simulator = Simulator(EpisodeParameters(task='memory', recall_s=1.0), policy)
    simulator._draw = lambda: simulator._viewer.shown
    tips = []
    simulator.run(0, 0, lambda step, world: tips.append((world.time_ns, world.tip[0])))
    shown = np.array([image for image, _, _ in policy.observed])
    stamps_s = np.array([stamp for _, _, stamp in policy.observed]) / NS_PER_S
    seen = stamps_s[shown >= 0]
    assert CUE_START_S[0] <= seen[0] and seen[-1] < CUE_START_S[1] + CUE_S
    assert len(seen) in (6, 7) and len(set(shown[shown >= 0])) == 1
    assert len(seen) == np.flatnonzero(shown >= 0)[-1] - np.flatnonzero(shown >= 0)[0] + 1
    opened_s = simulator._world._release_ns / NS_PER_S
    assert seen[-1] + 0.9 < opened_s <= seen[0] + CUE_S + 1.0 + 0.04
    still = [x for time_ns, x in tips if time_ns / NS_PER_S <= opened_s]
    assert np.ptp(still) < 1e-6 and tips[-1][1] > still[0] + 0.05


def test_only_the_pictures_in_the_time_of_the_cue_have_its_colour():
    world = CueWorld()
    world.plan_cue(0, NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S)
    pictures = []
    try:
        for stop_s in (0.5, 1.5, 2.5):
            world.step([0.0, 0.0], int(stop_s * NS_PER_S) - world.time_ns)
            pictures.append(world.render().astype(int))
    except BackendUnavailable as error:
        pytest.skip(str(error))
    # Above the table, where no cube comes.
    red = [(top[..., 0] - top[..., 1] > 80).sum() for top in (p[:20] for p in pictures)]
    assert red[0] == red[2] == 0 and red[1] > 500
    world.reset(np.random.default_rng(0))
    assert world.shown == NOTHING


def test_expert_that_saw_no_cue_stands_still():
    world = CueWorld()
    task = MemoryTask('', 1, 0)
    task.see(world)
    np.testing.assert_array_equal(task.expert_chunk(world, 3, 0.03), np.zeros((3, 2)))
    world.plan_cue(1, 0, NS_PER_S, 0)
    task.see(world)
    world.plan_cue(1, NS_PER_S, 2 * NS_PER_S, 0)
    task.see(world)
    assert task.remembered == 1 and np.abs(task.expert_chunk(world, 3, 0.03)).max() > 0


def test_instruction_of_memory_names_no_colour_and_that_of_conveyor_the_target():
    for task, named in (('memory', 0), ('conveyor', 1)):
        policy = ConstantPolicy()
        simulator = Simulator(EpisodeParameters(task=task, control='blank'), policy)
        for index in range(5):
            simulator.run(0, index)
        counts = {sum(colour in text for colour in COLOURS) for text in policy.instructions}
        assert counts == {named}


@pytest.mark.parametrize(('words', 'message'), [
    (['--slip-probability', '1.0'], '--slip-probability must not be given with task'),
    (['--task', 'conveyor', '--recall-s', '9'], '--recall-s must not be given with task'),
    (['--task', 'conveyor', '--slip-probability', '2'], '--slip-probability must be in'),
    (['--task', 'memory', '--recall-s', '-1'], '--recall-s must be in'),
])
def test_option_of_another_task_or_out_of_range_is_refused_by_name(words, message, capsys):
    assert cli.run(['sim', *words], StopRequest()) == 2
    assert capsys.readouterr().err.startswith(f'vla-edge: {message}')


def test_task_without_a_name_in_the_list_is_refused():
    with pytest.raises(ConfigError, match='^task must be one of track, conveyor, memory'):
        EpisodeParameters(task='juggle')
    simulator = Simulator(EpisodeParameters(control='oracle'))
    with pytest.raises(ConfigError, match="^task must stay 'track'"):
        simulator.reconfigure(EpisodeParameters(control='oracle', task='memory'))


def test_a_sweep_crosses_tasks_and_takes_their_own_options_once(tmp_path):
    sweep = make_sweep({'grids': [{
        'control': 'oracle', 'task': ['track', 'conveyor', 'memory'],
        'slip_probability': [0.0, 1.0], 'object_speed': [0.1, 0.3]}]}, tmp_path)
    assert [(cell.values['task'], cell.values['slip_probability']) for cell in sweep.cells] == [
        ('track', ''), ('track', ''),
        ('conveyor', 0.0), ('conveyor', 0.0), ('conveyor', 1.0), ('conveyor', 1.0),
        ('memory', ''), ('memory', '')]


def test_a_report_names_the_tasks_of_a_sweep_that_has_several(tmp_path):
    grid = tmp_path / 'grid.yaml'
    text = 'episodes: 1\ngrids:\n- control: oracle\n  object_speed: [0.1, 0.3]\n  task: '
    for tasks, families in (('track', {'expert'}),
                            ('[track, conveyor]', {'track, expert', 'conveyor, expert'})):
        grid.write_text(f'{text}{tasks}\n')
        out = tmp_path / f'out{len(families)}'
        assert cli.run(['sweep', str(grid), '--out', str(out)], StopRequest()) == 0
        assert {cell.family for cell in read_results(out).cells} == families


def test_rendering_is_what_it_was_for_track():
    try:
        rendering.make_gl_context(64, 64).free()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert CueWorld.PROPS and BeltWorld.PROPS
    dark, plain = CueWorld(), Simulator(EpisodeParameters(control='oracle'))._world
    for world in (dark, plain):
        world.reset(np.random.default_rng(4))
    np.testing.assert_array_equal(dark.render(), plain.render())


@pytest.mark.parametrize(
    'words', [['--task', 'track'], ['--task', 'conveyor', '--control', 'oracle']])
def test_success_of_a_policy_in_a_task_it_is_not_trained_for_comes_with_that_note(words, capsys):
    few = ['--episodes', '1', '--workers', '1']
    assert cli.run(['sim', '--task', 'conveyor', *few], StopRequest()) == 0
    assert 'trained for track alone' in capsys.readouterr().out
    assert cli.run(['sim', *words, *few], StopRequest()) == 0
    assert 'trained for track alone' not in capsys.readouterr().out
