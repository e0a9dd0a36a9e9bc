"""The console script: lazy subcommands, one line for what a user can fix, quiet endings."""

import subprocess
import sys
from types import ModuleType

import pytest

from vla_edge_ros import cli
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.nodes.process import Interrupted, StopRequest


def install(monkeypatch, run) -> None:
    host = ModuleType('fake_host')
    host.add_arguments = lambda parser: parser.add_argument('--seconds', type=float, default=30)
    host.run = run
    monkeypatch.setitem(sys.modules, 'fake_host', host)
    monkeypatch.setitem(cli.COMMANDS, 'demo', ('fake_host', 'fake'))


def test_subcommand_gets_its_own_options(monkeypatch):
    seen = []
    install(monkeypatch, lambda options, _stop: seen.append(options.seconds))
    assert cli.run(['demo', '--seconds', '2'], StopRequest()) == 0
    assert seen == [2.0]


def test_user_error_is_one_line_and_code_2(monkeypatch, capsys):
    def run(_options, _stop):
        raise ConfigError('seconds', 'must be > 0 s', -1.0)

    install(monkeypatch, run)
    assert cli.run(['demo'], StopRequest()) == 2
    assert capsys.readouterr().err == 'vla-edge: seconds must be > 0 s, got -1.0\n'


def test_interrupt_ends_with_code_0(monkeypatch):
    def run(_options, _stop):
        raise Interrupted

    install(monkeypatch, run)
    assert cli.run(['demo'], StopRequest()) == 0


def test_exit_code_of_the_host_is_passed_on(monkeypatch):
    install(monkeypatch, lambda _options, _stop: 1)
    assert cli.run(['demo'], StopRequest()) == 1


def test_unknown_subcommand_is_refused_with_the_list(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(['dance'], StopRequest())
    assert caught.value.code == 2
    assert 'doctor' in capsys.readouterr().err


def test_help_loads_no_host_library():
    program = (
        'import sys\nfrom vla_edge_ros import cli\nsys.argv[1:] = ["--help"]\n'
        'try:\n    cli.main()\nexcept SystemExit:\n    pass\n'
        'assert not {"rclpy", "mujoco", "numba", "numpy", "torch"} & set(sys.modules)\n')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert name in done.stdout
