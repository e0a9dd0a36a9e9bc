import os
import subprocess
import sys

import numpy as np
import pytest

from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.sim import rendering
from vla_edge_ros.sim.scene import COLOURS, OBJECT_SIZE
from vla_edge_ros.sim.world import object_index, OBJECT_LIMIT, TIP_LIMIT, World

TICK_NS = 33_333_333


def make_world(seed=0, **kwargs):
    world = World(**kwargs)
    world.reset(np.random.default_rng(seed))
    return world


@pytest.fixture(scope='module')
def gl():
    try:
        rendering.make_gl_context(64, 64).free()
    except BackendUnavailable as error:
        pytest.skip(str(error))


def test_same_seed_gives_the_same_run():
    states = []
    for seed in (3, 3, 4):
        world = make_world(seed)
        for tick in range(90):
            world.step([np.sin(tick / 10), np.cos(tick / 10)], TICK_NS)
        states.append(world.get_state())
    np.testing.assert_array_equal(states[0], states[1])
    assert np.abs(states[0] - states[2]).max() > 0.01


def test_slicing_of_time_does_not_change_the_motion():
    whole, sliced = make_world(), make_world()
    whole.step([0.4, -0.2], 300_000_000)
    for duration_ns in (1, 999_999, 33_000_001, 265_999_999):
        sliced.step([0.4, -0.2], duration_ns)
    assert sliced.time_ns == whole.time_ns
    np.testing.assert_array_equal(whole.get_state(), sliced.get_state())


def test_tip_follows_commanded_velocity_with_its_time_constant():
    world = make_world()
    world.set_state(np.zeros(20))
    world.step([0.5, -0.3], 30_000_000)
    np.testing.assert_allclose(
        world.joint_velocities, [0.5 * 0.632, -0.3 * 0.632], rtol=0.06
    )
    world.step([0.5, -0.3], 170_000_000)
    np.testing.assert_allclose(world.joint_velocities, [0.5, -0.3], rtol=0.01)


def test_command_beyond_the_speed_limit_is_clipped():
    world = make_world()
    world.set_state(np.zeros(20))
    world.step([-9.0, 0.0], 150_000_000)
    assert world.joint_velocities[0] == pytest.approx(-1.0, rel=0.02)


def test_tip_stops_at_the_edge_of_the_workspace():
    world = make_world()
    for _ in range(60):
        world.step([1.0, 1.0], TICK_NS)
    np.testing.assert_allclose(world.tip, TIP_LIMIT, atol=0.003)


def test_cubes_start_apart_and_inside():
    world = World()
    for seed in range(50):
        world.reset(np.random.default_rng(seed))
        positions = world.object_positions
        assert (np.abs(positions) <= OBJECT_LIMIT).all()
        for first in range(4):
            for second in range(first):
                assert np.linalg.norm(positions[first] - positions[second]) > OBJECT_SIZE * 1.5


def test_cubes_keep_their_speed_stay_inside_and_never_get_stuck():
    world = make_world(1, object_speed=0.3)
    track = []
    for _ in range(30 * 30):
        world.step([0.0, 0.0], TICK_NS)
        track.append(world.object_positions.copy())
    track = np.array(track)
    np.testing.assert_allclose(np.linalg.norm(world.object_velocities, axis=1), 0.3)
    assert (np.abs(track) <= OBJECT_LIMIT + 0.002).all()
    for start in range(0, 900, 60):
        spread = np.ptp(track[start:start + 60], axis=0).max(axis=1)
        assert (spread > 0.1).all()


def test_object_speed_zero_leaves_cubes_at_rest():
    world = make_world(object_speed=0.0)
    before = world.object_positions.copy()
    world.step([0.0, 0.0], 1_000_000_000)
    np.testing.assert_array_equal(world.object_positions, before)


def test_state_round_trip():
    world, other = make_world(1), make_world(2)
    world.step([0.3, 0.3], 200_000_000)
    other.set_state(world.get_state())
    np.testing.assert_array_equal(other.get_state(), world.get_state())
    np.testing.assert_array_equal(other.tip, world.tip)


def test_picture_shows_every_cube_where_it_is(gl):
    world = make_world()
    shape = (160, 192, 3)
    for index, (red, green, blue) in enumerate(COLOURS.values()):
        state = np.zeros(20)
        state[4:12] = np.repeat([[0.0, -0.2]], 4, axis=0).ravel() + 5.0  # out of view
        state[:2] = [-0.3, 0.25]
        columns = []
        for x in (-0.2, 0.2):
            state[4 + 2 * index:6 + 2 * index] = [x, 0.0]
            world.set_state(state)
            picture = world.render()
            assert picture.shape == shape and picture.dtype == np.uint8
            hue = picture / (picture.sum(axis=2, keepdims=True) + 1.0)
            expected = np.array([red, green, blue]) / (red + green + blue)
            mask = np.abs(hue - expected).max(axis=2) < 0.1
            assert 40 < mask.sum() < 1000
            columns.append(np.nonzero(mask)[1].mean())
        assert columns[0] < 80 and columns[1] > 112
    world.close()


def test_same_state_gives_the_same_picture_and_randomisation_changes_it(gl):
    world = make_world(5)
    plain = world.render()
    np.testing.assert_array_equal(plain, world.render())
    world.reset(np.random.default_rng(5), randomisation=1.0)
    assert np.abs(world.render().astype(int) - plain).mean() > 2.0
    world.reset(np.random.default_rng(5))
    np.testing.assert_array_equal(world.render(), plain)
    assert world.render_video().shape == (480, 640, 3)
    np.testing.assert_array_equal(world.render(), plain)
    world.close()
    world.close()


@pytest.mark.parametrize('kwargs', [
    {'camera_width': 0}, {'camera_height': 100_000}, {'object_speed': -0.1},
    {'object_speed': float('nan')},
])
def test_bad_value_is_refused(kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        World(**kwargs)


def test_unknown_colour_is_refused():
    assert object_index('blue') == 2
    with pytest.raises(ConfigError, match='colour must be one of red'):
        object_index('mauve')


def test_missing_gl_is_one_clear_error_and_physics_goes_on():
    code = (
        'import ctypes, numpy\n'
        'from vla_edge_ros.errors import BackendUnavailable\n'
        'from vla_edge_ros.sim.world import World\n'
        'def missing(*args, **kwargs): raise OSError("no library")\n'
        'world = World()\n'
        'ctypes.CDLL = missing\n'
        'world.step([0.1, 0.1], 33_000_000)\n'
        'try:\n'
        '    world.render()\n'
        'except BackendUnavailable as error:\n'
        '    print(error)\n'
    )
    environment = {k: v for k, v in os.environ.items() if k != 'MUJOCO_GL'}
    result = subprocess.run(
        [sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True
    )
    assert 'libEGL' in result.stdout and 'apt install' in result.stdout


def test_wrong_gl_choice_is_named(monkeypatch):
    monkeypatch.setenv('MUJOCO_GL', 'vulkan')
    with pytest.raises(BackendUnavailable, match='MUJOCO_GL must be egl, osmesa'):
        rendering.choose_gl_backend()
