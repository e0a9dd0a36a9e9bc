import json

import numpy as np
import pytest

from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.lab import bench_memory
from vla_edge_ros.lab.evidence_tables import memory_table
from vla_edge_ros.policy.policy import Policy
from vla_edge_ros.sim import rendering
from vla_edge_ros.sim.memory import CUE_S, CueWorld
from vla_edge_ros.sim.tasks import TICK_HZ


@pytest.fixture(scope='module')
def policy():
    try:
        rendering.make_gl_context(64, 64).free()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return Policy.load(backend='cpu')


def test_a_cache_that_evicts_nothing_holds_all_the_cue_and_fifo_forgets_it(policy):
    held = bench_memory.run_episode(
        CueWorld(), policy, np.random.default_rng(0), 1.0, frames=(4, 250))
    shown = CUE_S * TICK_HZ
    for name in bench_memory.EVICTIONS:
        assert held[name, 250] == (held['fifo', 250][0],) * 2
        assert shown - 1 < held[name, 250][0] < shown + 1
    assert held['fifo', 4] == (0, 0)


def test_a_short_wait_leaves_the_cue_in_any_cache(policy):
    held = bench_memory.run_episode(
        CueWorld(), policy, np.random.default_rng(0), 0.0, frames=(4,))
    assert all(counts[0] >= 1 for counts in held.values())


def test_embedding_is_that_of_eviction_and_enters_no_cache(policy):
    image = CueWorld().render()
    policy.reset()
    embedding = policy.embed(image)
    assert policy.cache.num_frames == 0 and embedding.shape == (128,)
    policy.observe(image, np.zeros(2), 0)
    policy.cache.retained.prepare(embedding, 1)
    np.testing.assert_array_equal(
        policy.cache.retained._incoming, policy.cache.retained._units[0])


def test_record_and_table_tell_every_cell_with_its_interval(policy, tmp_path, capsys):
    path = tmp_path / 'memory.json'
    assert bench_memory.main(['--episodes', '1', '--json', str(path)]) == 0
    record = json.loads(path.read_text())
    assert len(record['rows']) == 3 * 4 * 3
    lines = memory_table(record, 'here')
    assert len(lines) == 4 + 3 * 4 + 2 and 'not shown' in lines[0]
    assert all(line.count('–') == 3 for line in lines[4:-2])


def test_verdict_names_where_intervals_lie_apart_and_nothing_else():
    intervals = {'semantic': [0.5, 0.7], 'fifo': [0.0, 0.1], 'uniform': [0.6, 0.9]}
    rows = [{
        'recall_s': recall_s, 'frames': 8, 'kv_slots': 256, 'eviction': name,
        'at_release': {'rate': 0.5, 'interval': [0.4, 0.6]},
        'at_success': {'rate': 0.5, 'interval': [0.8, 0.9] if recall_s == 9.0 and
                       name == 'uniform' else interval}}
        for recall_s in (3.0, 9.0) for name, interval in intervals.items()]
    record = {'rows': rows, 'episodes': 5, 'object_speed': 0.3}
    assert memory_table(record, 'here')[-1] == (
        'When the task is fulfilled, `semantic` is shown to hold the cue (intervals apart) more '
        'often than `fifo` at 8 frames 3 s, 8 frames 9 s and less often at none; more often than '
        '`uniform` at none and less often at 8 frames 9 s. Elsewhere they are not told apart.')


def test_number_of_episodes_out_of_range_is_refused(capsys):
    assert bench_memory.main(['--episodes', '0']) == 2
    assert capsys.readouterr().err == 'memory: --episodes must be in 1..100000, got 0\n'
