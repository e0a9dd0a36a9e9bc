"""The demo's parts: children that never outlive it, counts that agree, a view of any terminal."""

import io
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from vla_edge_ros.demo.live_view import line, LINE_PERIOD_S, LiveView
from vla_edge_ros.demo.processes import CpuMeter, NodeFailed, NodeProcesses
from vla_edge_ros.demo.state import CAMERA, REASONING, RunState, SIM

PATIENT = (
    'import signal, sys, time\n'
    'signal.signal(signal.SIGINT, lambda *_: sys.exit({code}))\n'
    'signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM])\n'
    'print("ready", flush=True)\n'
    'while True: time.sleep(0.01)\n')
DEAF = (
    'import signal, time\n'
    'signal.signal(signal.SIGINT, signal.SIG_IGN)\n'
    'print("ready", flush=True)\n'
    'time.sleep(60)\n')


def child(code: int = 0) -> list[str]:
    return [sys.executable, '-S', '-c', PATIENT.format(code=code)]


def wait_for(path: Path, text: str) -> None:
    until = time.monotonic() + 10.0
    while text not in path.read_text():
        assert time.monotonic() < until, path.read_text()
        time.sleep(0.01)


@pytest.fixture
def state():
    state = RunState()
    state.on_status('/sim_node', 'running', {
        'published': '60', 'episodes': '4', 'successes': '3', 'running': 'True',
        'instruction': 'reach the red cube'})
    state.on_status('/camera_node', '60 images', {'received': '59', 'rate_hz': '60'})
    state.on_status('/reasoning_node', 'active', {
        'tick': '17', 'decision': 'refuse', 'reason': 'no_frame', 'cause': 'safe_hold'})
    for action in range(10):
        state.on_observation(1_000_000_000 + action, 990_000_000 + action, 'fresh')
    state.on_observation(1_000_000_100, 0, 'hold')
    return state


def test_state_is_read_from_diagnostics_and_observations(state):
    assert state.acting and not state.camera_stopped
    assert state.camera_counts == (60, 59)
    assert state.causes == {'fresh': 10, 'hold': 1}
    # A held action without an image has no age.
    assert state.age_percentiles() == pytest.approx((10.0, 10.0, 10.0))


def test_state_before_any_report_is_empty_and_ignores_strangers():
    state = RunState()
    state.on_status('/somebody_else', '', {'published': '7'})
    assert state.camera_counts == (0, 0) and state.age_percentiles() is None
    assert not state.acting and not state.camera_stopped


def test_end_of_the_camera_is_seen(state):
    state.on_status('/left/sim_node', 'run ended', {'running': 'False', 'published': '1860'})
    assert state.camera_stopped and state.count(SIM, 'published') == 1860


def test_plain_terminal_gets_a_line_every_few_seconds(state):
    out, now = io.StringIO(), [100.0]
    console = Console(file=out, force_terminal=False)
    with LiveView(state, 30.0, console, clock=lambda: now[0]) as view:
        view.start_clock()
        for _ in range(100):
            view.refresh()
            now[0] += 2 * LINE_PERIOD_S / 100
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    for text in ('tick 17  refuse: no_frame  cause safe_hold', 'p99 10.0', 'camera 60 Hz',
                 'success 3 of 4'):
        assert text in lines[0]
    assert '59' not in lines[0]


def test_decision_and_cause_shown_are_of_one_tick(state):
    state.on_observation(1_000_000_200, 990_000_200, 'late')
    assert 'refuse: no_frame  cause safe_hold' in line(state, 1.0)
    state.on_status('/reasoning_node', 'active', {
        'tick': '20', 'decision': 'full', 'reason': 'admitted', 'cause': 'fresh'})
    # The report on /diagnostics says nothing about a tick.
    state.on_status('/reasoning_node', 'active', {'ticks': '20', 'cause.hold': '3'})
    assert 'tick 20  full: admitted  cause fresh' in line(state, 2.0)


def test_real_terminal_shows_the_instruction_and_the_causes(state):
    out = io.StringIO()
    with LiveView(state, 30.0, Console(file=out, force_terminal=True, width=100)) as view:
        view.refresh()
    for text in ('reach the red cube', 'fresh 10', '60 Hz', 'refuse: no_frame', 'safe_hold'):
        assert text in out.getvalue()


def test_line_before_the_first_report_says_starting():
    assert line(RunState(), None) == 'starting the nodes: none has reported yet'


def test_the_last_line_shows_the_end_of_the_run(state):
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=False)
    with LiveView(state, 3.0, console, clock=lambda: now[0]) as view:
        view.start_clock()
        view.refresh()
        now[0] = 3.0
        view.stop_clock()
        now[0] = 60.0
        view.refresh()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and lines[1].startswith('  3.0 s')


def test_children_are_ended_with_sigint_and_none_is_left(tmp_path):
    with NodeProcesses(os.environ, tmp_path) as nodes:
        for name in (REASONING, CAMERA):
            nodes.start(name, child())
            wait_for(tmp_path / f'{name}.log', 'ready')
        nodes.check()
        pids = [process.pid for process in psutil.Process().children()]
        assert len(pids) >= 2
        nodes.end_all()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_one_deaf_child_keeps_no_other_alive(tmp_path, monkeypatch):
    monkeypatch.setattr('vla_edge_ros.demo.processes.END_TIMEOUT_S', 0.2)
    with pytest.raises(KeyboardInterrupt), NodeProcesses(os.environ, tmp_path) as nodes:
        nodes.start(SIM, [sys.executable, '-S', '-c', DEAF])
        nodes.start(CAMERA, child())
        for name in (SIM, CAMERA):
            wait_for(tmp_path / f'{name}.log', 'ready')
        pids = [process.pid for process in psutil.Process().children()]
        raise KeyboardInterrupt
    assert len(pids) >= 2 and not any(psutil.pid_exists(pid) for pid in pids)


def test_crashed_child_is_reported_with_the_end_of_its_log(tmp_path):
    with NodeProcesses(os.environ, tmp_path) as nodes:
        nodes.start(SIM, [sys.executable, '-S', '-c', 'print("no GL here"); raise SystemExit(3)'])
        nodes._children[SIM].wait(10.0)
        with pytest.raises(NodeFailed, match='(?s)sim_node ended with code 3.*no GL here'):
            nodes.check()


@pytest.mark.parametrize('number, text', [
    (signal.SIGKILL, 'was killed (SIGKILL)'), (signal.SIGABRT, 'was killed (SIGABRT)'),
    (signal.SIGRTMIN + 3, f'was killed (signal {signal.SIGRTMIN + 3})')])
def test_killed_child_is_reported_with_the_signal(tmp_path, number, text):
    with NodeProcesses(os.environ, tmp_path) as nodes:
        for look in (nodes.check, nodes.end_all):
            nodes.start(SIM, child())
            nodes._children[SIM].send_signal(number)
            nodes._children[SIM].wait(10.0)
            with pytest.raises(NodeFailed, match=f'^sim_node {re.escape(text)}; the end of '):
                look()


def test_child_that_ends_badly_is_reported(tmp_path):
    with NodeProcesses(os.environ, tmp_path) as nodes:
        nodes.start(CAMERA, child(code=134))
        wait_for(tmp_path / 'camera_node.log', 'ready')
        with pytest.raises(NodeFailed, match='camera_node ended with code 134'):
            nodes.end_all()


def test_child_deaf_to_sigint_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr('vla_edge_ros.demo.processes.END_TIMEOUT_S', 0.2)
    with NodeProcesses(os.environ, tmp_path) as nodes:
        nodes.start(SIM, [sys.executable, '-S', '-c', DEAF])
        wait_for(tmp_path / 'sim_node.log', 'ready')
        pid = nodes._children[SIM].pid
        with pytest.raises(NodeFailed, match='did not end'):
            nodes.end_all()
        assert not psutil.pid_exists(pid)


def test_cpu_meter_tells_busy_from_idle(tmp_path):
    busy = PATIENT.format(code=0).replace('time.sleep(0.01)', 'pass')
    with NodeProcesses(os.environ, tmp_path) as nodes:
        nodes.start(REASONING, [sys.executable, '-S', '-c', busy])
        nodes.start(CAMERA, child())
        for name in (REASONING, CAMERA):
            wait_for(tmp_path / f'{name}.log', 'ready')
        meter = CpuMeter(nodes)
        until = time.monotonic() + 10.0
        while nodes.cpu_seconds()[REASONING] < 0.3:
            assert time.monotonic() < until
            time.sleep(0.01)
        use = meter.read()
    assert use[REASONING] > 2 * use[CAMERA]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signal_while_starting_ends_the_demo_with_code_0(tmp_path, number):
    pytest.importorskip('rclpy')
    before = set(os.listdir('/dev/shm'))
    process = subprocess.Popen(
        [sys.executable, '-m', 'vla_edge_ros.cli', 'demo', '--out', str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + 30.0
    while not (tmp_path / 'log' / 'camera_node.log').exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30.0)
    assert process.returncode == 0, output
    assert not any(item.is_running() for item in children)
    assert not {name for name in set(os.listdir('/dev/shm')) - before if 'vla_edge' in name}
