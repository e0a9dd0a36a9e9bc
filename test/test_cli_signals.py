"""SIGINT and SIGTERM end every subcommand with code 0, without a traceback or half a result."""

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from bag_maker import make_bag
import psutil
import pytest

from vla_edge_ros.cli import COMMANDS
from vla_edge_ros.nodes.environment import start_process

COMMAND = [sys.executable, '-m', 'vla_edge_ros.cli']
TIMEOUT_S = 60.0


@pytest.fixture
def start(tmp_path):
    """Return a function that starts ``vla-edge`` in a session of its own."""
    processes = []

    def start(*words):
        process = start_process(
            [*COMMAND, *map(str, words)], os.environ, cwd=tmp_path, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(process, condition):
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.01)


def assert_ended_quietly(process):
    output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    assert output.rstrip().endswith('vla-edge: stopped') and 'Traceback' not in output, output


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_is_loaded_ends_every_subcommand(start, tmp_path, number):
    for words in ([name] for name in COMMANDS):
        if words == ['replay']:
            words.append(make_bag(tmp_path / 'bag', 2))
        if words in (['sweep'], ['report']):
            words.append(tmp_path)
        process = start(*words)
        process.send_signal(number)
        assert_ended_quietly(process)


def test_doctor_started_in_the_background_of_a_script_ends_on_sigint(tmp_path):
    script = f'{" ".join(COMMAND)} doctor & echo $!; wait $!; echo code $?'
    with subprocess.Popen(
        ['sh', '-c', script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as shell:
        pid = int(shell.stdout.readline())
        assert 'python' in shell.stdout.readline()
        os.kill(pid, signal.SIGINT)
        output = shell.stdout.read()
    assert output.endswith('vla-edge: stopped\ncode 0\n') and 'Traceback' not in output


def test_doctor_ends_while_it_measures_the_policy(start):
    process = start('doctor', '--runs', 10_000)
    while not process.stdout.readline().split()[1:2] == ['gpu']:
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert_ended_quietly(process)


def test_interrupted_replay_ends(start, tmp_path):
    bag = make_bag(tmp_path / 'bag', 2000, names=('gantry_x', 'gantry_y'))
    process = start('replay', bag)
    wait_until(process, (tmp_path / 'out/replay/trace.csv').exists)
    process.send_signal(signal.SIGINT)
    assert_ended_quietly(process)


@pytest.mark.parametrize('workers, number', [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_interrupted_episodes_leave_no_json_and_no_process(start, tmp_path, workers, number):
    folder = tmp_path / 'results'
    process = start('sim', '--workers', workers, '--control', 'oracle', '--episodes', 100_000,
                    '--json', folder / 'sim.json')
    maps = Path(f'/proc/{process.pid}/maps')
    wait_until(process, lambda: workers > 1 or 'libmujoco' in maps.read_text())
    children = []
    if workers > 1:
        parent = psutil.Process(process.pid)
        wait_until(process, lambda: len(parent.children()) > workers)  # and multiprocessing's own
        children = parent.children()
    os.killpg(process.pid, number)  # as a terminal does
    assert_ended_quietly(process)
    assert not folder.exists()
    psutil.wait_procs(children, 5.0)
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize('workers', [1, 2])
def test_interrupted_sweep_keeps_what_is_done_and_leaves_no_process(start, tmp_path, workers):
    file = tmp_path / 'grid.yaml'
    file.write_text('episodes: 100000\ngrids: [{control: oracle}]\n')
    process = start('sweep', file, '--workers', workers)
    record = tmp_path / 'out/grid/record.jsonl'
    wait_until(process, lambda: record.exists() and record.stat().st_size)
    children = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)
    assert_ended_quietly(process)
    assert record.read_bytes().endswith(b'\n')
    psutil.wait_procs(children, 5.0)
    assert not [child for child in children if child.is_running()]


def test_interrupted_training_keeps_its_films_and_its_state(start, tmp_path):
    pytest.importorskip('torch', reason='PyTorch is needed to train')
    from safetensors import safe_open

    process = start(
        'train', '--streams', 6, '--validation', 2, '--frames', 3, '--batch', 2, '--workers', 1,
        '--steps', 1_000_000, '--save-every', 2, '--device', 'cpu')
    wait_until(process, lambda: list(tmp_path.glob('out/train/*/state_0.safetensors')))
    process.send_signal(signal.SIGTERM)
    assert_ended_quietly(process)
    (folder,) = (tmp_path / 'out/train').iterdir()
    assert len(list((folder / 'streams').glob('*.npz'))) == 1
    with safe_open(folder / 'state_0.safetensors', 'pt') as state:
        assert int(state.metadata()['step']) >= 2
    assert not (tmp_path / 'out/policy').exists()
