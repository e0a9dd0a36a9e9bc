from types import SimpleNamespace

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.sim.scene import COLOURS
from vla_edge_ros.sim.tasks import (
    expert_action,
    expert_chunk,
    named_colour,
    sample_instruction,
    TrackTask,
)
from vla_edge_ros.sim.world import World

TICK_NS = 33_333_333


def make_state(tip, target, velocity=(0.0, 0.0)):
    return SimpleNamespace(
        tip=np.array(tip), object_positions=np.array([target] * 4),
        object_velocities=np.array([velocity] * 4))


@pytest.mark.parametrize('colour', list(COLOURS))
def test_instruction_names_its_colour_and_no_other(colour):
    rng = np.random.default_rng(0)
    for _ in range(300):
        words = sample_instruction(rng, colour).lower()
        assert colour in words
        assert not any(other in words for other in COLOURS if other != colour)


@pytest.mark.parametrize('colour', list(COLOURS))
def test_the_colour_of_every_drawn_instruction_is_found(colour):
    rng = np.random.default_rng(1)
    assert all(named_colour(sample_instruction(rng, colour)) == colour for _ in range(300))
    assert named_colour(f'touch the coloured, hundred times blurred {colour}-painted cube')


@pytest.mark.parametrize(('text', 'rule'), [
    ('reach the cube', 'must name exactly one of red, green, blue, yellow'),
    ('reach the bored cube', 'must name exactly one of'),
    ('the red cube left of the blue cube', 'must name exactly one of'),
    ('', 'must name exactly one of'),
    ('reach the red\ncube', 'must be one line of printable text'),
    ('reach the red\x1b[2J cube', 'must be one line of printable text'),
    ('reach the red \udcff cube', 'must be one line of printable text'),
])
def test_instruction_without_exactly_one_colour_in_one_line_is_refused(text, rule):
    with pytest.raises(ConfigError, match=f'^instruction {rule}'):
        named_colour(text)


def test_instructions_vary():
    rng = np.random.default_rng(0)
    texts = {sample_instruction(rng, 'red') for _ in range(2000)}
    assert len(texts) > 500
    assert max(map(len, texts)) < 64


def test_expert_moves_towards_target_and_with_it():
    action = expert_action(make_state([0.0, 0.0], [0.05, -0.02], [0.1, 0.2]), 1)
    assert action.dtype == np.float32
    np.testing.assert_allclose(action, [0.5, 0.04], rtol=1e-5)


def test_expert_keeps_the_speed_limit():
    np.testing.assert_array_equal(expert_action(make_state([-0.3, 0.2], [0.3, -0.2]), 0), [1, -1])


def test_chunk_begins_with_the_action_and_closes_in():
    state = make_state([0.0, 0.0], [0.1, -0.05], [0.3, 0.0])
    chunk = expert_chunk(state, 0, 3, 1 / 30)
    assert chunk.shape == (3, 2) and chunk.dtype == np.float32
    np.testing.assert_array_equal(chunk[0], expert_action(state, 0))
    after = make_state(chunk[0] / 30, [0.1 + 0.3 / 30, -0.05], [0.3, 0.0])
    np.testing.assert_allclose(chunk[1], expert_action(after, 0), rtol=1e-5)


def test_success_needs_consecutive_ticks():
    task = TrackTask('reach the red cube', 0)
    near, far = make_state([0.03, 0.0], [0.0, 0.0]), make_state([0.05, 0.0], [0.0, 0.0])
    for state in [near] * 14 + [far] + [near] * 14:
        assert not task.update(state)
    assert task.update(near)
    assert task.done


def test_task_fails_after_its_limit():
    task = TrackTask('reach the red cube', 0)
    far = make_state([0.2, 0.0], [0.0, 0.0])
    for _ in range(task.LIMIT_TICKS):
        assert not task.done
        task.update(far)
    assert task.done and not task.succeeded


def test_expert_succeeds_and_idling_does_not():
    world = World()
    successes = {'expert': 0, 'idle': 0}
    for seed in range(10):
        for actor in successes:
            world.reset(np.random.default_rng(seed))
            task = TrackTask('', seed % 4)
            while not task.done:
                action = expert_action(world, task.target) if actor == 'expert' else [0.0, 0.0]
                world.step(action, TICK_NS)
                task.update(world)
            successes[actor] += task.succeeded
    assert successes == {'expert': 10, 'idle': 0}
