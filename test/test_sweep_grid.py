"""What a sweep's YAML file may say, and which cells come of it."""

from pathlib import Path

import pytest
from test_trace import result as step
from test_trace import write

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.sweep.grid import make_sweep, read_sweep
from vla_edge_ros.runtime.schedules import SCHEDULES

ROOT = Path(__file__).resolve().parent.parent
ORACLE = {'control': 'oracle'}


def cells(*grids, folder=None, **parameters):
    return make_sweep({'grids': list(grids), **parameters}, folder).cells


def test_every_axis_is_crossed_with_every_other():
    found = cells({
        **ORACLE, 'schedule': ['sync', 'latest'], 'object_speed': [0.1, 0.3, 0.6],
        'latency': [{'compute_ms': 8}, {'compute_ms': 40}]})
    assert len(found) == 12
    assert {(cell.values['schedule'], cell.values['object_speed'], cell.values['latency'])
            for cell in found} == {
        (schedule, speed, latency) for schedule in ('sync', 'latest')
        for speed in (0.1, 0.3, 0.6) for latency in ('8 ms', '40 ms')}
    for cell in found:
        assert cell.setup.loop.schedule == cell.values['schedule']
        assert cell.setup.episode.object_speed == cell.values['object_speed']
        assert f'{cell.setup.episode.compute_ms:g} ms' == cell.values['latency']


def test_what_has_no_effect_is_no_axis():
    found = cells({
        **ORACLE, 'schedule': ['sync', 'overlap'], 'overlap_percent': [0, 50, 100],
        'seam': ['switch', 'blend'], 'eviction': ['semantic', 'fifo']})
    assert len(found) == 1 + 3 * 2
    assert found[0].values['overlap_percent'] == found[0].values['seam'] == ''
    assert {cell.values['eviction'] for cell in found} == {''}
    found = cells({'eviction': ['semantic', 'fifo'], 'control': ['none', 'oracle']})
    assert [(cell.setup.episode.control, cell.setup.episode.eviction) for cell in found] == [
        ('none', 'semantic'), ('none', 'fifo'), ('oracle', 'semantic')]


def test_latency_may_bring_the_power_of_its_device():
    found = cells({**ORACLE, 'latency': [
        {'compute_ms': 8, 'power_model': 'h200'}, {'power_model': 'agx-orin', 'compute_ms': 40}]})
    assert [(cell.values['latency'], cell.values['power_model']) for cell in found] == [
        ('8 ms', 'h200'), ('40 ms', 'agx-orin')]
    assert [cell.setup.episode.power_model for cell in found] == ['h200', 'agx-orin']


def test_what_a_sweep_was_resolved_to_is_a_sweep_again():
    grid = {**ORACLE, 'latency': [{'compute_ms': 8, 'power_model': 'h200'}, {'compute_ms': 40}]}
    sweep = make_sweep({'grids': [grid]}, None)
    assert make_sweep({'grids': sweep.grids}, None) == sweep


def test_grids_are_put_together_and_equal_cells_taken_once():
    first = {**ORACLE, 'schedule': ['sync', 'latest']}
    assert len(cells(first, {**ORACLE, 'schedule': ['latest', 'deadline']})) == 3


def test_episodes_are_counted_for_every_cell_and_seed():
    sweep = make_sweep(
        {'episodes': 7, 'seeds': [0, 3], 'grids': [{**ORACLE, 'chunk_steps': [1, 16]}]}, None)
    assert sweep.episodes == 28
    assert sweep.grids[0]['chunk_steps'] == [1, 16]
    assert sweep.grids[0]['latency'] == [{'compute_ms': 8.0}]


def test_files_lie_beside_the_sweep_and_are_told_by_content(tmp_path):
    write(tmp_path / 'engine.csv', step(decode_ms=6.0))
    (tmp_path / 's.yaml').write_text(
        'grids:\n- control: oracle\n  latency: [{latency_trace: engine.csv}]\n')
    sweep = read_sweep(tmp_path / 's.yaml')
    assert sweep.cells[0].values['latency'] == 'engine'
    assert sweep.cells[0].setup.episode.latency_trace == str(tmp_path / 'engine.csv')
    write(tmp_path / 'engine.csv', step(decode_ms=7.0))
    other = read_sweep(tmp_path / 's.yaml')
    assert list(sweep.files) == list(other.files) == ['engine.csv']
    assert sweep.files != other.files
    assert list(make_sweep({'grids': [{}]}, tmp_path).files) == ['embedded policy']


@pytest.mark.parametrize(('document', 'message'), [
    ([], 'sweep must be a mapping of names to values, got []'),
    ({}, 'grids must be a list of one or more grids, got None'),
    ({'grids': []}, 'grids must be a list of one or more grids, got []'),
    ({'grids': [{}], 'speed': 3}, 'speed is not known in sweep (known: episodes, grids, seeds)'),
    ({'grids': [{}], 'episodes': 0}, 'episodes must be in 1..1000000, got 0'),
    ({'grids': [{}], 'episodes': '5'}, "episodes must be of type int, got '5'"),
    ({'grids': [{}], 'seeds': []}, 'seeds must be one or more, each once, got []'),
    ({'grids': [{}], 'seeds': [1, 1]}, 'seeds must be one or more, each once, got [1, 1]'),
    ({'grids': [{}], 'seeds': [-1]}, 'seeds must be integers in 0..2147483647, got -1'),
    ({'grids': [{}], 'seeds': [True]}, 'seeds must be integers in 0..2147483647, got True'),
    ({'grids': [5]}, 'grids[0] must be a mapping of names to values, got 5'),
    ({'grids': [{}, {'shedule': 'sync'}]}, 'shedule is not known in grids[1] (known: '),
    ({'grids': [{'compute_ms': 8}]}, 'compute_ms is not known in grids[0] (known: '),
    ({'grids': [{'schedule': ['sync', 'fast']}]},
     "grids[0].schedule must be one of deadline, sync, overlap, latest, got 'fast'"),
    ({'grids': [{'overlap_percent': [101]}]},
     'grids[0].overlap_percent must be in 0.0..100.0 %, got 101.0'),
    ({'grids': [{'object_speed': ['fast']}]},
     "grids[0].object_speed must be of type float, got 'fast'"),
    ({'grids': [{'object_speed': []}]}, 'grids[0].object_speed must have one or more values'),
    ({'grids': [{'latency': [8]}]},
     'grids[0].latency must be a mapping of names to values, got 8'),
    ({'grids': [{'latency': {}}]},
     'grids[0].latency must have one of compute_ms, latency_trace, latency_profile, got {}'),
    ({'grids': [{'latency': {'compute_ms': 8, 'latency_trace': 'a'}}]},
     'grids[0].latency must have one of compute_ms, latency_trace, latency_profile, got {'),
    ({'grids': [{'latency': {'power_model': 'h200'}}]},
     'grids[0].latency must have one of compute_ms, latency_trace, latency_profile, got {'),
    ({'grids': [{'latency': {'compute_ms': 8, 'power_model': 'sun'}}]}, 'grids[0].power'),
    ({'grids': [{'power_model': ['', 'h200'], 'latency': [
        {'compute_ms': 8}, {'compute_ms': 8, 'power_model': 'agx-orin'}]}]},
     "grids[0].power_model must not be given both as an axis and in a latency, got ['', 'h200']"),
    ({'grids': [{'latency': {'compute_ms': -1}}]},
     'grids[0].latency.compute_ms must be in 0.0..1000.0 ms, got -1.0'),
    ({'grids': [{'latency': {'latency_trace': 'none.csv'}}]},
     'grids[0].latency_trace must be a readable trace (No such file'),
    ({'grids': [{'chunk_steps': [3, 4]}]}, 'grids[0].chunk_steps must be at most 3'),
    ({'grids': [{'policy': 'none'}]}, 'grids[0].'),
    ({'grids': [{'chunk_steps': [1, 2]}, {'chunk_steps': 3}], 'episodes': 200_000,
      'seeds': [0, 1]}, 'grids must have at most 1,000,000 episodes, got 1200000'),
])
def test_mistake_is_told_by_place_rule_and_value(document, message, tmp_path):
    with pytest.raises(ConfigError) as raised:
        make_sweep(document, tmp_path)
    assert str(raised.value).startswith(message)


def test_a_grid_may_take_over_another_and_change_it(tmp_path):
    path = tmp_path / 's.yaml'
    path.write_text(
        'grids:\n- &a {control: oracle, chunk_steps: [4, 8]}\n- {<<: *a, chunk_steps: 16}\n')
    assert [cell.values['chunk_steps'] for cell in read_sweep(path).cells] == [4, 8, 16]


@pytest.mark.parametrize(('text', 'message'), [
    ('grids: [', 'sweep must be a readable YAML file (while parsing'),
    ('\x00', 'sweep must be a readable YAML file ('),
    ('episodes: 3\nepisodes: 4\ngrids: [{}]', "episodes must be given once, got '2 times'"),
    ('grids: [{seam: [switch], seam: [blend]}]', "seam must be given once, got '2 times'"),
    ('? [a, b]\n: 3', 'sweep must be a readable YAML file ('),
    ('!!python/object/apply:os.getcwd []', 'sweep must be a readable YAML file ('),
])
def test_file_that_is_no_plain_yaml_is_refused(text, message, tmp_path):
    path = tmp_path / 's.yaml'
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_sweep(path)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(('name', 'episodes'), [('small', 5_400), ('paper', 43_200)])
def test_ready_sweep_has_its_number_of_episodes(name, episodes):
    sweep = read_sweep(ROOT / 'config' / f'sweep_{name}.yaml')
    assert sweep.episodes == episodes
    assert {cell.values['schedule'] for cell in sweep.cells} == set(SCHEDULES)
    assert {0.0, 100.0} <= {cell.values['overlap_percent'] for cell in sweep.cells}


def test_traces_of_one_name_in_two_folders_are_two_latencies(tmp_path):
    for folder in ('orin', 'thor'):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / 'trace.csv', step(decode_ms=6.0))
    traces = [{'latency_trace': f'{folder}/trace.csv'} for folder in ('orin', 'thor')]
    found = cells({**ORACLE, 'latency': [*traces, traces[0]]}, folder=tmp_path)
    assert [cell.values['latency'] for cell in found] == ['orin/trace', 'thor/trace']


def test_trace_that_would_be_called_as_a_device_is_refused_not_left_out(tmp_path):
    write(tmp_path / 'h200.csv', step(decode_ms=6.0))
    latency = [{'latency_profile': 'h200'}, {'latency_trace': 'h200.csv'}]
    with pytest.raises(ConfigError, match=r'grids\[0\].latency must have another name in tables'):
        cells({**ORACLE, 'latency': latency}, folder=tmp_path)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='No such file'):
        read_sweep(tmp_path / 'none.yaml')
