"""The doctor reports what it finds and breaks over none of it."""

import json
import math
from types import SimpleNamespace

import pytest

from vla_edge_ros import doctor
from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.kernels.cuda import available
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.parameters import describe
from vla_edge_ros.policy.policy import DEFAULT_POLICY
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.runtime.control_loop import ControlLoopParameters
from vla_edge_ros.telemetry import energy_sources


def options(**changes):
    values = {'json': False, 'policy': None, 'deadline_ms': 33.0, 'runs': 3, **changes}
    return SimpleNamespace(**values)


@pytest.fixture
def healthy(monkeypatch):
    names = (
        'python', 'packages', 'rclpy', 'dds_profile', 'shared_memory', 'gl', 'gpu', 'energy',
        'backend')
    for name in names:
        check = doctor.Check(name, doctor.OK, 'fine')
        monkeypatch.setattr(doctor, f'check_{name}', lambda *_, check=check: check)
    monkeypatch.setattr(doctor, 'measure_policy', lambda _folder, runs: (1.0, [10.0] * runs))


def test_fast_policy_holds_the_deadline():
    status, advice = doctor.judge(8.0, 12.0, 33.0)
    assert status == doctor.OK and 'can be held with 19.0 ms to spare' in advice


def test_slow_policy_is_told_a_rate_whose_period_holds_its_deadline():
    status, advice = doctor.judge(60.0, 77.5, 33.0)
    assert status == doctor.WARNING and 'cannot be held' in advice
    assert 'rate_hz to 12.5 and deadline_ms to 80' in advice


def test_policy_with_a_slow_tail_holds_it_mostly():
    status, advice = doctor.judge(20.0, 40.0, 33.0)
    assert status == doctor.WARNING and 'mostly' in advice


def test_healthy_machine_exits_with_0_and_gives_advice(healthy, capsys):
    assert doctor.run(options(), StopRequest()) == 0
    assert 'ok       policy' in capsys.readouterr().out


def test_slow_policy_is_no_broken_essential(healthy, monkeypatch):
    monkeypatch.setattr(doctor, 'measure_policy', lambda _folder, runs: (1.0, [90.0] * runs))
    assert doctor.run(options(), StopRequest()) == 0


def test_raising_check_is_a_finding_and_exits_with_1(healthy, monkeypatch, capsys):
    def check():
        raise BackendUnavailable('rclpy', 'must be importable', 'nothing')

    monkeypatch.setattr(doctor, 'check_rclpy', check)
    assert doctor.run(options(), StopRequest()) == 1
    assert 'broken   rclpy          rclpy must be importable' in capsys.readouterr().out


def test_json_holds_every_check_and_the_figures(healthy, capsys):
    assert doctor.run(options(json=True), StopRequest()) == 0
    report = json.loads(capsys.readouterr().out)
    assert report['ok'] and len(report['checks']) == 10
    assert report['checks'][-1]['figures']['chunk_ms']['p99'] == 10.0


def test_missing_driver_is_said_plainly(monkeypatch):
    monkeypatch.setattr(doctor.shutil, 'which', lambda _name: None)
    check = doctor.check_gpu()
    assert check.status == doctor.NOTE and 'no NVIDIA driver' in check.message


@pytest.mark.parametrize(('found', 'reason', 'status', 'line'), [
    (True, 'found Some GPU', doctor.OK, 'auto takes cuda (found Some GPU)'),
    (False, 'Some GPU is older than compute capability 7.5', doctor.NOTE,
     'auto takes cpu (Some GPU is older than compute capability 7.5)'),
])
def test_it_says_which_backend_auto_takes_and_why(monkeypatch, found, reason, status, line):
    asked = []
    monkeypatch.setattr(
        available, 'find_gpu', lambda config: asked.append(config) or (found, reason))
    check = doctor.check_backend(None)
    assert (check.status, check.message) == (status, line)
    assert check.figures['backend'] == line.split()[2]
    assert asked == [PolicyConfig.load(DEFAULT_POLICY).transformer]


def test_it_says_which_energy_can_be_read_and_what_hinders_the_rest(monkeypatch):
    counter = energy_sources.CounterSource('nvml 0 Some GPU', lambda: 1.0)
    denied = [
        energy_sources.Unavailable(f'rapl {i}', 'Permission denied', 'chmod') for i in (0, 1)]
    monkeypatch.setattr(energy_sources, 'find_sources', lambda: [counter, *denied])
    check = doctor.check_energy()
    assert (check.status, check.advice) == (doctor.OK, 'chmod')
    assert check.message == (
        'can be read: nvml 0 Some GPU; rapl 0: Permission denied; rapl 1: Permission denied')


def test_machine_that_tells_no_energy_is_unavailable_and_not_broken(monkeypatch):
    missing = energy_sources.Unavailable('nvml', 'no NVIDIA driver')
    monkeypatch.setattr(energy_sources, 'find_sources', lambda: [missing])
    check = doctor.check_energy()
    assert (check.status, check.message) == (doctor.NOTE, 'unavailable; nvml: no NVIDIA driver')
    assert check.figures == {'sources': [], 'unavailable': {'nvml': 'no NVIDIA driver'}}


def test_foreign_dds_profile_is_noticed(monkeypatch):
    monkeypatch.setenv('FASTRTPS_DEFAULT_PROFILES_FILE', '/elsewhere.xml')
    check = doctor.check_dds_profile()
    assert check.status == doctor.NOTE and '/elsewhere.xml' in check.message


def test_little_shared_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(
        doctor.shutil, 'disk_usage', lambda _path: SimpleNamespace(free=2e7, total=6.4e7))
    check = doctor.check_shared_memory()
    assert check.status == doctor.WARNING and '--shm-size' in check.advice


def test_missing_checkpoint_is_named(tmp_path):
    check = doctor.guarded('policy', lambda: doctor.check_policy(tmp_path / 'none', 33.0, 1))
    assert check.status == doctor.BROKEN and 'none' in check.message


@pytest.mark.parametrize('runs', [0, -1, doctor.MAX_RUNS + 1])
def test_number_of_runs_out_of_range_is_refused(runs):
    with pytest.raises(ConfigError, match=f'--runs must be in 1..10000, got {runs}'):
        doctor.run(options(runs=runs), StopRequest())


@pytest.mark.parametrize('deadline_ms', [0.0, -1.0, math.nan, math.inf, 1e9])
def test_deadline_out_of_range_is_refused(deadline_ms):
    with pytest.raises(ConfigError, match='--deadline-ms must be in 0.1..10000.0 ms, got'):
        doctor.run(options(deadline_ms=deadline_ms), StopRequest())


def test_deadline_has_the_range_of_the_node():
    ranges = {name: metadata['range'] for name, _, metadata in describe(ControlLoopParameters)}
    assert ranges['deadline_ms'] == doctor.DEADLINE_RANGE_MS
