"""``vla-edge report``: one self-contained page from a sweep or from traces."""

import csv
from html.parser import HTMLParser
from pathlib import Path
import re
import shutil
from xml.etree import ElementTree

import pytest

from vla_edge_ros import cli
from vla_edge_ros.lab.sweep.names import CELLS, CONFIGURATION, FINDINGS, REPORT
from vla_edge_ros.lab.sweep.results import common_model, read_results
from vla_edge_ros.nodes.process import StopRequest

GRID = """
episodes: 6
grids:
- control: oracle
  schedule: [deadline, sync, overlap, latest]
  overlap_percent: [0, 50]
  chunk_steps: [4, 8]
  latency: [{compute_ms: 8}, {compute_ms: 100}]
  object_speed: [0.1, 0.6]
  safe_action: zeros
"""


def run(*words):
    return cli.run([str(word) for word in words], StopRequest())


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('report')
    (folder / 'grid.yaml').write_text(GRID)
    assert run('sweep', folder / 'grid.yaml', '--out', folder / 'out') == 0
    return folder / 'out'


@pytest.fixture(scope='module')
def page(folder):
    assert run('report', folder) == 0
    return (folder / REPORT).read_text(encoding='utf-8')


class Reader(HTMLParser):
    """Notes every tag, and that what was opened is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], []
        self.feed(re.sub(r'<svg.*?</svg>', '', text, flags=re.S))

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag != 'meta':
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def assert_self_contained(text):
    reader = Reader(text)
    assert not reader.open
    tags = {tag for tag, _ in reader.seen}
    assert not tags & {'script', 'link', 'img', 'iframe', 'object'}
    assert 'src=' not in text and '@import' not in text
    for svg in re.findall(r'<svg.*?</svg>', text, re.S):
        tree = ElementTree.fromstring(svg)
        for element in tree.iter():
            for name, value in element.attrib.items():
                assert not name.endswith('href') or value.startswith(('#', 'data:image/png'))


def test_page_of_a_sweep_loads_nothing_and_has_every_picture(page):
    assert_self_contained(page)
    assert page.count('<svg') == 6
    for words in ('No configuration dominates', 'Energy per completed task: unavailable',
                  'expert: what to choose from', 'runs a second; energy is unavailable',
                  'at contact', '40 cells', 'Wilson', 'Bonferroni'):
        assert words in page, words


def test_page_holds_every_cell_and_every_condition(page, folder):
    results = read_results(folder)
    assert len(results.cells) == 40
    for cell in results.cells:
        assert f'<td>{cell.condition}</td><td>{cell.choice}</td><td>{cell.success}</td>' in page
    assert {cell.condition for cell in results.cells} == {
        '8 ms, 0.1 m/s', '8 ms, 0.6 m/s', '100 ms, 0.1 m/s', '100 ms, 0.6 m/s'}
    assert 'overlap 50 % switch chunk 8' in {cell.choice for cell in results.cells}
    assert 'sync chunk 4' in {cell.choice for cell in results.cells}


def test_torn_line_about_a_session_costs_no_report(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / 'copy')
    with (copy / 'sessions.jsonl').open('a') as file:
        file.write('{"started": "20\n')
    assert read_results(copy).sessions == read_results(folder).sessions


def test_equal_tables_give_equal_pages_and_findings(page, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / 'copy')
    assert run('report', copy, '--out', tmp_path / 'new' / 'page.html') == 0
    assert (tmp_path / 'new' / 'page.html').read_text(encoding='utf-8') == page
    (copy / FINDINGS).unlink()
    assert run('report', copy) == 0
    text = (copy / FINDINGS).read_text(encoding='utf-8')
    assert text == (folder / FINDINGS).read_text(encoding='utf-8')
    assert '- expert: No configuration dominates' in text and '| 100 ms, 0.6 m/s |' in text


def test_page_that_goes_elsewhere_goes_alone(folder, tmp_path):
    (tmp_path / FINDINGS).write_text('my own')
    assert run('report', folder, '--out', tmp_path / 'page.html') == 0
    assert {path.name for path in tmp_path.iterdir()} == {'page.html', FINDINGS}
    assert (tmp_path / FINDINGS).read_text() == 'my own'


def test_energy_is_drawn_and_told_where_it_is_known(tmp_path):
    (tmp_path / 'grid.yaml').write_text(GRID + '  power_model: agx-orin\n')
    assert run('sweep', tmp_path / 'grid.yaml', '--out', tmp_path / 'out') == 0
    assert run('report', tmp_path / 'out') == 0
    text = (tmp_path / 'out' / REPORT).read_text(encoding='utf-8')
    assert 'expert: success and energy' in text and 'unavailable' not in text
    assert 'Energy per completed task, by the power model' in text
    cells = list(csv.DictReader((tmp_path / 'out' / CELLS).read_text().splitlines()))
    for cell in cells:
        parts = [float(cell[name]) for name in cell
                 if re.fullmatch(r'energy_(idle|prefill|decode|refused|late_or_aborted|retries)_j',
                                 name)]
        assert len(parts) == 6
        assert sum(parts) == pytest.approx(float(cell['energy_j']), rel=1e-4)


@pytest.fixture
def traces(tmp_path):
    for cost_ms in (8, 100):
        assert run('sim', '--control', 'oracle', '--episodes', 1, '--workers', 1, '--compute-ms',
                   cost_ms, '--traces', tmp_path / f'at_{cost_ms}') == 0
    return [shutil.move(tmp_path / f'at_{cost_ms}' / 'episode_000000.csv',
                        tmp_path / f'engine_{cost_ms}.csv') for cost_ms in (8, 100)]


def test_page_of_one_trace_tells_it_as_the_demo_does(traces, tmp_path, capsys):
    capsys.readouterr()
    assert run('report', traces[0]) == 0
    out = tmp_path / 'engine_8.report.html'
    assert capsys.readouterr().out == f'{out}\n'
    text = out.read_text(encoding='utf-8')
    assert_self_contained(text)
    assert text.count('<svg') == 4 and 'report of a run' in text
    assert 'Half of the actions were computed from an image younger than' in text
    assert 'when the tool met its object' in text
    assert not (tmp_path / FINDINGS).exists()


def test_page_of_several_traces_compares_them(traces, tmp_path):
    assert run('report', *traces, '--out', tmp_path / 'both.html') == 0
    text = (tmp_path / 'both.html').read_text(encoding='utf-8')
    assert_self_contained(text)
    assert text.count('<svg') == 1 + 2 * 4
    assert '99 of 100 actions of engine_8 came from an image younger than' in text
    assert '<td>engine_8</td><td>deadline</td>' in text


def test_many_traces_are_all_in_the_table_and_some_are_drawn(traces, tmp_path):
    copies = [shutil.copy(traces[0], tmp_path / f'copy_{number}.csv') for number in range(10)]
    assert run('report', *copies, '--out', tmp_path / 'many.html') == 0
    text = (tmp_path / 'many.html').read_text(encoding='utf-8')
    assert all(f'<td>{Path(copy).stem}</td>' in text for copy in copies)
    assert text.count('<h1>') == 1 + 8 and 'The first 8 of 10 are drawn' in text


@pytest.mark.parametrize(('make', 'message'), [
    (lambda path: [path / 'none.csv'], 'trace must be a readable trace (No such file'),
    (lambda path: [path], 'report must be the folder of a sweep, with a cells.csv, or a trace'),
    (lambda path: [path, path], 'report must be one folder of a sweep, or traces'),
    (lambda path: [path / 'x.csv', '--out', '/proc/x.html'], '--out must be a file that can'),
])
def test_what_cannot_be_reported_is_one_clear_line(make, message, tmp_path, capsys):
    (tmp_path / 'x.csv').write_text('no trace\n')
    assert run('report', *make(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'vla-edge: {message}') and error.count('\n') == 1


def test_unfinished_sweep_is_told_to_be_finished_first(folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / 'copy')
    (copy / CELLS).unlink()
    assert run('report', copy) == 2
    assert 'must be the folder of a finished sweep' in capsys.readouterr().err
    shutil.copy(folder / CELLS, copy / CELLS)
    (copy / CONFIGURATION).write_text('[')
    assert run('report', copy) == 2
    assert 'must hold the readable tables of a sweep' in capsys.readouterr().err
    (copy / CELLS).write_text('cell,episodes\nx,y\n')
    assert run('report', copy) == 2


def test_traces_of_one_name_are_told_apart_by_their_folders(traces, tmp_path):
    for number, trace in enumerate(traces):
        (tmp_path / f'run_{number}').mkdir()
        shutil.copy(trace, tmp_path / f'run_{number}' / 'trace.csv')
    paths = [tmp_path / f'run_{number}' / 'trace.csv' for number in (0, 1)]
    assert run('report', *paths, '--out', tmp_path / 'page.html') == 0
    text = (tmp_path / 'page.html').read_text(encoding='utf-8')
    assert '<td>run_0/trace</td>' in text and '<td>run_1/trace</td>' in text


def test_same_trace_twice_is_refused(traces, capsys):
    assert run('report', traces[0], traces[0]) == 2
    assert 'must name every trace once' in capsys.readouterr().err


@pytest.mark.parametrize(('latencies', 'model'), [
    (['h200 random:1.5b', 'agx-orin:int4 random:1.5b'], 'random:1.5b'),
    (['h200 random:1.5b', 'h200 random:0.5b'], ''), (['8 ms', '40 ms'], ''),
    (['h200', 'agx-orin'], ''), (['8 ms', 'h200 random:1.5b'], ''),
])
def test_policy_that_all_latencies_are_of_is_told_once(latencies, model):
    assert common_model(latencies) == model


def test_devices_are_told_without_the_policy_they_share(tmp_path):
    (tmp_path / 'grid.yaml').write_text(
        'episodes: 2\ngrids:\n- control: oracle\n  schedule: [sync, latest]\n  latency:\n'
        '  - {latency_profile: h200, profile_model: "random:1.5b", power_model: h200}\n'
        '  - {latency_profile: agx-orin, profile_model: "random:1.5b", power_model: agx-orin}\n')
    assert run('sweep', tmp_path / 'grid.yaml', '--out', tmp_path / 'out') == 0
    results = read_results(tmp_path / 'out')
    assert {cell.condition for cell in results.cells} == {'h200', 'agx-orin'}
    assert run('report', tmp_path / 'out') == 0
    text = (tmp_path / 'out' / REPORT).read_text(encoding='utf-8')
    assert 'latencies of the policy random:1.5b' in text
