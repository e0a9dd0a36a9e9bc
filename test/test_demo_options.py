"""The demo refuses in one line, before a node starts, what a node would refuse in its log."""

import pytest

from vla_edge_ros import cli
from vla_edge_ros.demo import demo
from vla_edge_ros.nodes.process import StopRequest


@pytest.fixture
def started(monkeypatch):
    """Return what the demo would have started with, and start nothing."""
    demos = []
    monkeypatch.setattr(demo.Demo, 'run_nodes', lambda self: demos.append(self._options))
    monkeypatch.setattr(demo.Demo, 'write_results', lambda self: None)
    return demos


@pytest.mark.parametrize(('words', 'line'), [
    (['--seconds', '0'], '--seconds must be in 1..86400 s, got 0.0'),
    (['--seconds', 'nan'], '--seconds must be in 1..86400 s, got nan'),
    (['--seed', '-1'], '--seed must be in 0..2147483647, got -1'),
    (['--seed', '2147483648'], '--seed must be in 0..2147483647, got 2147483648'),
    (['--instruction', ''], '--instruction must name exactly one of red, green, blue, yellow'),
    (['--instruction', 'dance'], '--instruction must name exactly one of red, green, blue, yel'),
    (['--instruction', 'red or blue'], '--instruction must name exactly one of red, green, blue'),
    (['--instruction', 'the red\ncube'], '--instruction must be one line of printable text'),
    (['--instruction', 'the red cube ' * 20], '--instruction must fit 24 prompt tokens'),
    (['--policy', '/nonexistent'], '--policy must be a folder with a config.json'),
    (['--out', '/proc/none'], '--out must be a folder that can be written to'),
    (['--record', '/proc/none'], '--record must be a folder that can be written to'),
    (['--record', '/tmp'], '--record must not exist yet'),
])
def test_option_that_cannot_work_is_one_line_and_code_2(words, line, started, tmp_path, capsys):
    out = tmp_path / 'out'
    assert cli.run(['demo', '--out', str(out), *words], StopRequest()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'vla-edge: {line}') and error.count('\n') == 1
    assert not started and not out.exists()


@pytest.mark.parametrize('name', ['report.html', 'trace.csv', 'summary.json', 'states.npz'])
def test_output_that_cannot_be_replaced_is_named(name, started, tmp_path, capsys):
    (tmp_path / name).mkdir()
    assert cli.run(['demo', '--out', str(tmp_path)], StopRequest()) == 2
    assert capsys.readouterr().err.startswith('vla-edge: --out must be a file that can be written')
    assert not started


@pytest.mark.parametrize('words', [
    [], ['--seed', '2147483647', '--instruction', 'Follow the RED cube!', '--record', 'bag']])
def test_options_that_work_start_the_demo(words, started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(['demo', '--out', 'deep/out', *words], StopRequest()) == 0
    assert len(started) == 1 and [path.name for path in tmp_path.iterdir()] == ['deep']
