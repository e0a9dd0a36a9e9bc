"""``vla-edge sweep``: the same tables however often it is killed, whoever runs the episodes."""

from contextlib import closing
import csv
import fcntl
from importlib import metadata
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from vla_edge_ros import cli
from vla_edge_ros.clock import ManualClock, NS_PER_S
from vla_edge_ros.lab.sweep import blocks, command
from vla_edge_ros.lab.sweep.grid import make_sweep, read_sweep
from vla_edge_ros.lab.sweep.record import EpisodeId, EpisodeRecord
from vla_edge_ros.lab.sweep.tables import cell_table
from vla_edge_ros.nodes.environment import start_process
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.progress import duration, SlowProgress

ROOT = Path(__file__).resolve().parent.parent
TABLES = (command.EPISODES, command.CELLS, command.AGES)
TIMEOUT_S = 60.0
GRID = """
episodes: 20
seeds: [0, 4]
grids:
- control: oracle
  schedule: [deadline, overlap]
  overlap_percent: [0, 50]
  chunk_steps: 8
  latency: [{compute_ms: 8}, {compute_ms: 100}]
  safe_action: zeros
"""
EPISODES = 20 * 2 * 3 * 2


@pytest.fixture
def sweep_file(tmp_path):
    path = tmp_path / 'grid.yaml'
    path.write_text(GRID)
    return path


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """Return the folder of a sweep to which nothing happened."""
    folder = tmp_path_factory.mktemp('undisturbed')
    (folder / 'grid.yaml').write_text(GRID)
    assert sweep(folder / 'grid.yaml', folder / 'out', '--workers', 1) == 0
    return folder / 'out'


@pytest.fixture(scope='module')
def expected(undisturbed):
    """Return its tables."""
    return tables(undisturbed)


@pytest.fixture
def finished(undisturbed, tmp_path):
    """Return a copy of that folder."""
    return shutil.copytree(undisturbed, tmp_path / 'out')


def sweep(file, out, *words):
    words = ['sweep', str(file), '--out', str(out), *map(str, words)]
    return cli.run(words, StopRequest())


def tables(folder):
    return {name: (folder / name).read_bytes() for name in TABLES}


def recorded(folder):
    path = folder / command.RECORD
    return path.read_bytes().count(b'\n') if path.exists() else 0


def kill_after(file, out, episodes, *words):
    """Start the command, and kill -9 it when so many episodes are in the record."""
    process = start_process(
        [sys.executable, '-m', 'vla_edge_ros.cli', 'sweep', str(file), '--out', str(out), *words],
        os.environ, cwd=ROOT, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        for _ in range(int(TIMEOUT_S / 0.005)):
            if recorded(out) >= episodes:
                break
            try:
                pytest.fail(f'ended with {process.wait(0.005)}: {process.stdout.read()}')
            except subprocess.TimeoutExpired:
                pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        # The workers hold the pipe too: it ends when the last of them has noticed.
        output = process.stdout.read()
    return output


def test_sweep_killed_again_and_again_gives_the_same_tables_bit_for_bit(
        sweep_file, tmp_path, expected, capsys):
    out = tmp_path / 'out'
    for episodes in (5, 40, 90):
        output = kill_after(sweep_file, out, episodes, '--workers', '2')
        assert 'Traceback' not in output
        assert episodes <= recorded(out) < EPISODES
        assert not any((out / name).exists() for name in TABLES)
    with open(out / command.RECORD, 'ab') as file:
        file.write(b'3f00aa17 [0,0,0,{"succ')
    before = recorded(out)
    assert sweep(sweep_file, out, '--workers', 3) == 0
    told = capsys.readouterr().out
    assert f'{before} are done, {EPISODES - before} left' in told
    assert f'damaged lines moved from the record to {command.DAMAGED}: 1;' in told
    assert sweep(sweep_file, out) == 0
    assert 'damaged' not in capsys.readouterr().out
    assert tables(out) == expected
    assert recorded(out) == EPISODES


def test_policy_and_its_pictures_give_the_same_tables_with_any_number_of_processes(tmp_path):
    path = tmp_path / 'grid.yaml'
    path.write_text(
        'episodes: 3\ngrids: [{schedule: [sync, latest], object_speed: [0.1, 0.3]}]\n')
    for workers in (1, 3):
        assert sweep(path, tmp_path / str(workers), '--workers', workers) == 0
    assert tables(tmp_path / '1') == tables(tmp_path / '3')


def test_code_of_hosts_and_reports_is_none_that_rows_depend_on(monkeypatch):
    root = Path(blocks.__file__).parents[2]
    watched = {path.relative_to(root) for name in command.SOURCES
               for path in command._sources(root / name)}
    for name in ('sim/world.py', 'runtime/devices.yaml', 'telemetry/power.yaml',
                 'lab/sweep/grid.py', 'kernels/cpu/engine.py', 'parameters.py'):
        assert Path(name) in watched, name
    assert not [path for path in watched if path.parts[0] in ('nodes', 'demo', 'replay')]
    assert Path('lab/sweep/findings.py') not in watched
    before = command.sources_digest()
    monkeypatch.setattr(command, 'SOURCES', command.SOURCES[:-1])
    assert command.sources_digest() != before


def test_finished_sweep_runs_no_episode_again(sweep_file, finished, expected, monkeypatch):
    monkeypatch.setattr(blocks, 'run_in_workers', lambda *_, **__: pytest.fail('ran again'))
    (finished / command.CELLS).unlink()
    assert sweep(sweep_file, finished) == 0
    assert tables(finished) == expected


def test_tables_hold_a_line_for_each_episode_and_cell(expected):
    episodes = list(csv.DictReader(expected[command.EPISODES].decode().splitlines()))
    cells = list(csv.DictReader(expected[command.CELLS].decode().splitlines()))
    ages = list(csv.DictReader(expected[command.AGES].decode().splitlines()))
    assert len(episodes) == EPISODES and len(cells) == 6
    assert len({(row['cell'], row['seed'], row['index']) for row in episodes}) == EPISODES
    for cell in cells:
        own = [row for row in episodes if row['cell'] == cell['cell']]
        assert len(own) == int(cell['episodes']) == 40
        assert sum(int(row['succeeded']) for row in own) == int(cell['successes'])
        assert sum(int(row['runs']) for row in own) == int(cell['runs'])
        counted = sum(int(row['count']) for row in ages
                      if row['cell'] == cell['cell'] and row['cause'] != 'contact')
        assert counted == int(cell['age_count']) == sum(int(row['age_count']) for row in own)
        assert float(cell['success_low']) < float(cell['success_rate']) + 1e-9
        assert cell['energy_j'] == cell['energy_j_per_success'] == ''
    fast, slow = (cell for cell in cells if cell['schedule'] == 'deadline')
    assert (fast['latency'], slow['latency']) == ('8 ms', '100 ms')
    assert int(fast['refused']) == 0 < int(slow['refused'])
    assert float(fast['age_p99_ms']) < 26 < 100 < float(slow['age_p50_ms'])


def test_tasks_are_an_axis_and_their_events_are_counted(tmp_path):
    path = tmp_path / 'grid.yaml'
    path.write_text(
        'episodes: 4\ngrids:\n- {control: oracle, task: [track, conveyor], chunk_steps: 3, '
        'slip_probability: [0, 1]}\n')
    assert sweep(path, tmp_path / 'out', '--workers', 1) == 0
    cells = list(csv.DictReader((tmp_path / 'out' / command.CELLS).read_text().splitlines()))
    assert [(cell['task'], cell['slip_probability'], cell['event_slips']) for cell in cells] == [
        ('track', '', '0'), ('conveyor', '0', '0'), ('conveyor', '1', '4')]
    assert [int(cell['event_grasps']) >= 4 for cell in cells] == [False, True, True]


def test_cell_with_energy_tells_it_by_success(sweep_file):
    from dataclasses import replace

    from vla_edge_ros.sim.episode_row import EpisodeRunner

    checked = read_sweep(sweep_file)
    runner = EpisodeRunner()
    rows = {
        EpisodeId(0, 0, index): replace(
            runner.run(checked.cells[0].setup, 0, index), energy_j=2.5, succeeded=index > 0)
        for index in range(3)}
    one_cell = replace(checked, cells=checked.cells[:1])
    cell = next(csv.DictReader(cell_table(one_cell, rows).splitlines()))
    assert (cell['energy_j'], cell['energy_j_per_success']) == ('7.5', '3.75')


def test_another_sweep_in_the_same_folder_is_refused_with_the_difference(
        sweep_file, finished, expected, capsys):
    sweep_file.write_text(GRID.replace('[0, 50]', '[0, 75]').replace('20', '21'))
    assert sweep(sweep_file, finished) == 2
    error = capsys.readouterr().err
    assert error.startswith('vla-edge: --out must be empty or hold part of the same sweep')
    assert 'episodes: 20 -> 21\n' in error
    assert 'grids[0].overlap_percent: [0.0, 50.0] -> [0.0, 75.0]\n' in error
    assert tables(finished) == expected


def test_other_code_and_other_versions_are_a_difference(sweep_file, finished, monkeypatch, capsys):
    saved = yaml.safe_load((finished / command.CONFIGURATION).read_text())
    assert saved['versions']['numpy'] == metadata.version('numpy')
    monkeypatch.setattr(command, 'sources_digest', lambda: 'other')
    assert sweep(sweep_file, finished) == 2
    assert f'versions.sources: {saved["versions"]["sources"]!r} -> \'other\'' in (
        capsys.readouterr().err)


def test_record_without_its_configuration_is_refused(sweep_file, tmp_path, capsys):
    out = tmp_path / 'out'
    out.mkdir()
    (out / command.RECORD).write_bytes(b'anything\n')
    assert sweep(sweep_file, out) == 2
    assert 'must have a sweep.yaml beside its record.jsonl' in capsys.readouterr().err
    assert (out / command.RECORD).read_bytes() == b'anything\n'


def test_sweep_killed_between_its_lock_and_its_configuration_goes_on(
        sweep_file, tmp_path):
    sweep_file.write_text('grids: [{control: oracle}]\nepisodes: 1\n')
    EpisodeRecord(tmp_path / 'out' / command.RECORD).close()
    assert sweep(sweep_file, tmp_path / 'out', '--workers', 1) == 0
    assert recorded(tmp_path / 'out') == 1


def test_configuration_is_written_by_the_one_that_has_the_lock(sweep_file, tmp_path, capsys):
    out = tmp_path / 'out'
    with closing(EpisodeRecord(out / command.RECORD)):
        assert sweep(sweep_file, out) == 2
    assert 'one is at work there' in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == [command.RECORD]


def test_another_sweep_that_began_before_the_lock_was_taken_is_noticed(
        sweep_file, tmp_path, monkeypatch, capsys):
    out, lock = tmp_path / 'out', command.EpisodeRecord

    def beaten(path):
        monkeypatch.setattr(command, 'EpisodeRecord', lock)
        other = tmp_path / 'other.yaml'
        other.write_text('grids: [{control: oracle}]\nepisodes: 1\n')
        assert sweep(other, out, '--workers', 1) == 0
        return lock(path)

    monkeypatch.setattr(command, 'EpisodeRecord', beaten)
    assert sweep(sweep_file, out) == 2
    assert 'must be empty or hold part of the same sweep' in capsys.readouterr().err
    assert yaml.safe_load((out / command.CONFIGURATION).read_text())['episodes'] == 1
    assert recorded(out) == 1


def test_dry_run_tells_cells_episodes_and_time_and_writes_nothing(sweep_file, tmp_path, capsys):
    assert sweep(sweep_file, tmp_path / 'out', '--dry-run', '--workers', 1) == 0
    told = capsys.readouterr().out
    assert f'6 cells, {EPISODES} episodes' in told
    assert f'{EPISODES} left to do: an estimated ' in told and 'ms each' in told
    assert not (tmp_path / 'out').exists()


def test_dry_run_changes_nothing_in_the_folder_of_a_sweep_at_work(sweep_file, finished, capsys):
    def state():
        return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
                for path in (finished, *finished.rglob('*'))}

    path = finished / command.RECORD
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b''.join(lines[:-1]) + lines[-1][:9])
    before = state()
    with open(path, 'rb') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep(sweep_file, finished, '--dry-run', '--workers', 1) == 0
    assert '1 left to do' in capsys.readouterr().out
    assert state() == before


def test_dry_run_of_a_finished_sweep_says_so(sweep_file, finished, capsys):
    assert sweep(sweep_file, finished, '--dry-run') == 0
    assert 'nothing is left to do' in capsys.readouterr().out


@pytest.mark.parametrize(('words', 'message'), [
    (['--workers', '-1'], '--workers must be in 0..1024, got -1'),
    (['--workers', '2', '--ray', 'auto'], '--workers must not be given with --ray'),
    (['--out', '/proc/none'], '--out must be a folder that can be written to'),
])
def test_bad_option_is_one_clear_line(sweep_file, words, message, capsys):
    assert cli.run(['sweep', str(sweep_file), *words], StopRequest()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'vla-edge: {message}') and error.count('\n') == 1


def test_blocks_hold_every_missing_episode_once():
    checked = make_sweep(
        {'episodes': 25, 'seeds': [0, 1], 'grids': [{'control': 'oracle',
         'schedule': ['sync', 'latest']}]}, None)
    done = {EpisodeId(1, 0, index) for index in range(3, 25)} | {EpisodeId(0, 1, 7)}
    made = blocks.make_blocks(checked, done)
    flat = [episode for block in made for episode in block]
    assert len(flat) == len(set(flat)) == 100 - len(done) and not done & set(flat)
    assert all(len({(e.cell, e.seed) for e in block}) == 1 for block in made)
    assert max(map(len, made)) == blocks.BLOCK_EPISODES
    assert made == blocks.make_blocks(checked, done)


class FakeRay:
    """As much of Ray as a sweep uses; its actors run when waited for, the last one first."""

    def __init__(self, cpus=3, address='auto'):
        self.exceptions = SimpleNamespace(RayError=KeyError)
        self._resources = {'CPU': float(cpus)} if cpus else {}
        self._address = address
        self.actors = self.running = self.most_running = 0
        self.is_up = False

    def init(self, address, runtime_env, log_to_driver):
        if address != self._address:
            raise ConnectionError('Could not find any running Ray instance.')
        assert runtime_env['env_vars']['NUMBA_NUM_THREADS'] == '1'
        self.is_up = True

    def shutdown(self):
        self.is_up = False

    def cluster_resources(self):
        return self._resources

    def put(self, value):
        return value

    def remote(self, num_cpus):
        assert num_cpus == 1

        def make(actor_class):
            def start(*arguments):
                self.actors += 1
                actor = actor_class(*arguments)
                return SimpleNamespace(run=SimpleNamespace(remote=lambda block: self._later(
                    actor, block)))
            return SimpleNamespace(remote=start)
        return make

    def _later(self, actor, block):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return (id(actor), tuple(block)), actor

    def wait(self, references, timeout):
        return [references[-1]], references[:-1]

    def get(self, reference):
        self.running -= 1
        (_, block), actor = reference
        return actor.run(block)


def use(monkeypatch, ray):
    monkeypatch.setitem(sys.modules, 'ray', ray)
    return ray


def test_ray_gives_the_same_tables(sweep_file, tmp_path, expected, monkeypatch):
    ray = use(monkeypatch, FakeRay(cpus=3))
    assert sweep(sweep_file, tmp_path / 'out', '--ray', 'auto') == 0
    assert tables(tmp_path / 'out') == expected
    assert ray.actors == ray.most_running == 3 and ray.running == 0 and not ray.is_up


def test_without_ray_the_option_says_what_to_install(sweep_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'ray', None)
    assert sweep(sweep_file, tmp_path / 'out', '--ray', 'auto') == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "vla-edge: ray must be installed for --ray: pip install 'vla_edge_ros[ray]'")
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(('ray', 'message'), [
    (FakeRay(address='elsewhere'), '--ray must be the address of a running Ray cluster (Could'),
    (FakeRay(cpus=0), '--ray must be the address of a cluster with a CPU'),
])
def test_cluster_that_cannot_be_used_is_one_clear_line(
        ray, message, sweep_file, tmp_path, monkeypatch, capsys):
    use(monkeypatch, ray)
    assert sweep(sweep_file, tmp_path / 'out', '--ray', 'auto') == 2
    assert f'vla-edge: {message}' in capsys.readouterr().err
    assert not ray.is_up


def test_failing_actor_ends_the_sweep_and_what_was_done_stays(
        sweep_file, tmp_path, expected, monkeypatch, capsys):
    class Dying(FakeRay):
        left = 4

        def get(self, reference):
            self.left -= 1
            if not self.left:
                raise KeyError('the actor died')
            return super().get(reference)

    ray = use(monkeypatch, Dying())
    assert sweep(sweep_file, tmp_path / 'out', '--ray', 'auto') == 2
    assert 'a process of the Ray cluster failed' in capsys.readouterr().err
    assert 0 < recorded(tmp_path / 'out') < EPISODES and not ray.is_up
    assert sweep(sweep_file, tmp_path / 'out') == 0
    assert tables(tmp_path / 'out') == expected


def test_worker_that_cannot_go_on_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / 'grid.yaml'
    path.write_text('grids: [{control: oracle}]\nepisodes: 3\n')
    checked = read_sweep(path)
    setup = checked.cells[0].setup
    object.__setattr__(setup.episode, 'latency_trace', str(tmp_path / 'gone.csv'))
    told = blocks.BlockRunner([setup]).run([EpisodeId(0, 0, 0)])
    assert told.startswith('latency_trace must be a readable trace (No such file')


def test_record_is_locked_while_a_sweep_is_at_work(sweep_file, finished, capsys):
    record = EpisodeRecord(finished / command.RECORD)
    assert sweep(sweep_file, finished) == 2
    assert 'one is at work there' in capsys.readouterr().err
    record.close()


def test_progress_tells_what_is_done_and_how_long_the_rest_takes(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: False)
    clock = ManualClock()
    with SlowProgress('episodes', 1000, 200, clock) as progress:
        for done in range(201, 261):
            clock.advance_ns(NS_PER_S)
            progress.update(done)
    assert capsys.readouterr().err.splitlines() == [
        '230 of 1,000 episodes, 23 %, 13 min left', '260 of 1,000 episodes, 26 %, 12 min left',
        '260 of 1,000 episodes, 26 %, 12 min left']


def test_progress_at_a_terminal_keeps_to_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: True)
    clock = ManualClock()
    with SlowProgress('episodes', 10, 0, clock) as progress:
        for done in range(1, 11):
            clock.advance_ns(NS_PER_S // 10)
            progress.update(done)
    told = capsys.readouterr().err
    assert told.count('\n') == 1 and told.count('\r') == 6
    assert told.rstrip().endswith('10 of 10 episodes, 100 %, 0 s left')


@pytest.mark.parametrize(('seconds', 'words'), [
    (0.0, '0 s'), (99.4, '99 s'), (99.6, '2 min'), (5900.0, '98 min'), (11_100.0, '3 h 05 min')])
def test_duration_is_told_in_words(seconds, words):
    assert duration(seconds) == words
