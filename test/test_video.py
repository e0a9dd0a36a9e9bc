import csv

import cv2
import numpy as np
import pytest

from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.sim import rendering
from vla_edge_ros.sim.video import render_video, StateLog
from vla_edge_ros.sim.world import World
from vla_edge_ros.telemetry.trace import COLUMNS

START_NS = 1_700_000_000_000_000_000


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """One second of motion: its state log and trace."""
    try:
        rendering.make_gl_context(64, 64).free()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp('run')
    world, log = World(), StateLog()
    rows = []
    for frame in range(61):
        log.append(START_NS + world.time_ns, world.get_state(), 'go' if frame < 30 else 'stop')
        if frame % 2 == 0:
            rows.append({
                **{name: '' for name, _, _ in COLUMNS},
                'tick': frame // 2, 'published_ns': world.time_ns + 9_000_000,
                'action_stamp_ns': START_NS + world.time_ns + 9_000_000,
                'decision': 'full', 'reason': 'admitted', 'cause': 'fresh',
                'observation_age_ms': '' if frame == 0 else 25.0,
            })
        world.step([0.3, 0.2], 16_666_667)
    assert len(log) == 61
    log.save(folder / 'states.npz')
    with open(folder / 'trace.csv', 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_log_loads_without_pickle(run):
    with np.load(run / 'states.npz', allow_pickle=False) as log:
        assert log['stamps_ns'][0] == START_NS
        assert log['states'].shape == (61, 20)
        assert list(log['instructions'][log['instruction_indices'][[29, 30]]]) == ['go', 'stop']


def test_film_lasts_as_long_as_the_run(run):
    count = render_video(run / 'states.npz', run / 'trace.csv', run / 'film.mp4', fps=10)
    assert count == 11
    film = cv2.VideoCapture(str(run / 'film.mp4'))
    assert film.get(cv2.CAP_PROP_FRAME_COUNT) == 11
    assert film.get(cv2.CAP_PROP_FPS) == pytest.approx(10)
    pictures = [film.read()[1].astype(int) for _ in range(11)]
    assert pictures[0].shape == (480, 640, 3)
    assert np.abs(pictures[10] - pictures[0])[50:400].max() > 60
    green = [(np.abs(p[448:478] - [90, 170, 70]).max(axis=2) < 30).sum() for p in pictures]
    assert green[0] == 0 and green[2] < green[10]  # one bar a tick, once it has happened


@pytest.mark.parametrize('suffix', ['gif', 'webp'])
def test_animation_is_written(run, suffix):
    path = run / f'film.{suffix}'
    assert render_video(run / 'states.npz', run / 'trace.csv', path, fps=5) == 6
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(('name', 'fps', 'field'), [
    ('film.avi', 30.0, 'out_path'), ('film.mp4', 0.0, 'fps'), ('film.mp4', float('nan'), 'fps'),
])
def test_bad_value_is_refused(tmp_path, name, fps, field):
    with pytest.raises(ConfigError, match=field):
        render_video(tmp_path / 'states.npz', tmp_path / 'trace.csv', tmp_path / name, fps)


@pytest.mark.parametrize('content', [None, b'no archive'])
def test_unreadable_log_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / 'states.npz').write_bytes(content)
    with pytest.raises(ConfigError, match='must be a readable state log'):
        render_video(tmp_path / 'states.npz', tmp_path / 'trace.csv', tmp_path / 'film.mp4')


def test_empty_log_is_refused(tmp_path):
    StateLog().save(tmp_path / 'states.npz')
    with pytest.raises(ConfigError, match='at least one state'):
        render_video(tmp_path / 'states.npz', tmp_path / 'trace.csv', tmp_path / 'film.mp4')
