"""Profiles: shares and roofs from fakes, the parts from the real kernels."""

import io
import json
from types import SimpleNamespace
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.kernels.cpu import measure as cpu_measure
from vla_edge_ros.lab import profile as profiling
from vla_edge_ros.lab.profile import assemble, decoder_works, judge, report, Roofs, Row
from vla_edge_ros.lab.profile_command import show
from vla_edge_ros.lab.roofline_plot import draw_roofline
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.policy import Policy
from vla_edge_ros.policy.shapes import load_shape
from vla_edge_ros.policy.work import decoder_parameters, Work
from vla_edge_ros.telemetry.stages import Stage

ROOFS = Roofs(1e9, 10e9, 'fakes')


def row(seconds, num_bytes, flop, part='mlp'):
    return Row('prefill', part, seconds, Work(num_bytes, flop))


@pytest.mark.parametrize(('seconds', 'num_bytes', 'flop', 'bound'), [
    (1.0, 0.9e9, 1e9, 'memory'), (1.0, 0.1e9, 8e9, 'compute'), (1.0, 0.6e9, 7e9, 'compute'),
    (1.0, 0.4e9, 4e9, 'latency'),
    # Faster than memory: what it reads lies in a cache, which is not what bounds it.
    (1.0, 3e9, 1e9, 'latency'), (1.0, 3e9, 6e9, 'compute'),
])
def test_a_part_is_bound_by_the_roof_it_comes_near(seconds, num_bytes, flop, bound):
    said = judge(row(seconds, num_bytes, flop), ROOFS)
    assert said['bound'] == bound
    assert said['memory_share'] == pytest.approx(num_bytes / 1e9)
    assert said['compute_share'] == pytest.approx(flop / 10e9)


def test_without_a_compute_roof_only_memory_is_judged():
    said = judge(row(1.0, 0.9e9, 9e9), Roofs(1e9, None, ''))
    assert (said['bound'], said['compute_share']) == ('memory', None)


def test_what_is_not_counted_has_no_roof():
    for nothing in (Row('decode', 'rest', 1.0, None), Row('decode', 'rest', -1e-6, Work(1, 1))):
        said = judge(nothing, ROOFS)
        assert said['bound'] is None and said['bytes'] is None


def test_rows_are_stages_with_their_parts_and_what_these_leave():
    totals = {Stage.VISION: 1.0, Stage.PREFILL: 4.0, Stage.DECODE: 5.0}
    parts = {Stage.PREFILL: [row(1.0, 10, 20), row(2.5, 30, 40, 'qkv')]}
    rows = assemble(totals, {Stage.VISION: Work(7, 8)}, parts)
    assert [(r.stage, r.part) for r in rows] == [
        ('vision', ''), ('prefill', ''), ('prefill', 'mlp'), ('prefill', 'qkv'),
        ('prefill', 'rest'), ('decode', '')]
    assert rows[1].work == Work(40, 60) and rows[-1].work is None
    assert rows[4].seconds == pytest.approx(0.5)
    record = report(rows, ROOFS)
    assert record['run_ms'] == 10_000
    assert sum(r['share'] for r in record['rows'] if not r['part']) == pytest.approx(1)
    inside = sum(r['share'] for r in record['rows'] if r['part'])
    assert inside == pytest.approx(0.4)


def test_works_of_the_parts_read_every_weight_of_the_layers_once():
    config = load_shape('')
    layers, _ = decoder_parameters(config.transformer)
    works = decoder_works(config, 1, 0, 2, 0)
    matrices = sum(works[name].bytes for name in ('qkv', 'output', 'mlp', 'down'))
    assert matrices == 2 * layers
    assert works['head'].bytes == 2 * config.bins * config.transformer.hidden_size
    assert works['qkv'].flop == 2 * 128 * (128 + 2 * 64) * 4


@pytest.fixture(scope='module')
def policy():
    return Policy.load(backend='cpu')


@pytest.mark.parametrize(('rows', 'head'), [(32, []), (1, ['head'])])
def test_parts_of_the_decoder_are_timed_one_by_one(policy, rows, head):
    found = cpu_measure.part_times(policy.transformer.engine, 40, rows, 512, 256, repeats=2)
    assert [part for part, _ in found] == [
        'qkv', 'attention', 'output', 'mlp', 'down', *head]
    assert min(seconds for _, seconds in found) > 0


def test_parts_in_their_order_compute_what_the_whole_pass_does(policy):
    engine = policy.transformer.engine
    weights, b = engine.weights, engine.buffers
    slots = np.arange(44, dtype=np.int32)
    embeddings = np.random.default_rng(3).standard_normal((44, 128), dtype=np.float32)
    engine.forward(embeddings[:32], slots[:0], slots[:32])
    rows, first = np.intp(12), np.intp(32)
    layers = np.empty((4, 12, 128), np.float32)
    engine.forward(embeddings[32:], slots[:32], slots[32:], layers)
    wanted = layers[0].copy()
    # One layer: the timed functions run each kind over all of them.
    one = weights._replace(**{
        name: getattr(weights, name)[:1] for name in (
            'attention_norm', 'qkv', 'qkv_bias', 'output', 'mlp_norm', 'gate_up', 'down')})
    first_layer = b._replace(keys=b.keys[:1])
    b.residual[:12, :128] = embeddings[32:]
    cpu_measure._qkv(one, first_layer, rows)
    cpu_measure._attention(one, first_layer, rows, first)
    cpu_measure._output(one, first_layer, rows)
    cpu_measure._mlp(one, first_layer, rows)
    cpu_measure._down(one, first_layer, rows)
    np.testing.assert_array_equal(b.residual[:12, :128], wanted)


def test_roofs_count_what_was_read_and_multiplied(monkeypatch):
    # Half a second each, whatever is done.
    monkeypatch.setattr(cpu_measure, '_seconds', lambda work, repeats: [work() and 0.5 or 0.5])
    assert cpu_measure.read_bandwidth(1e6) == pytest.approx(67 * 1e6 / 0.5)
    flop = 2 * cpu_measure.ROWS * cpu_measure.ROOF_DEPTH * cpu_measure.PANEL * 20_000
    assert cpu_measure.product_rate() == pytest.approx(flop / 0.5)


def test_the_timed_reading_reads_everything_every_time():
    array = np.arange(1, 101, dtype=np.float32)
    assert cpu_measure._read(array, np.intp(3)) == 5050 * (0 + 1 + 2)


class FakeCache:
    layout = SimpleNamespace(prompt_slots=24, max_frames=8)


def test_kernels_of_a_gpu_become_parts_and_one_kernel_stays_whole(monkeypatch):
    pytest.importorskip('numba.cuda')
    from vla_edge_ros.kernels.cuda import measure as cuda_measure
    from vla_edge_ros.kernels.cuda.measure import KernelTime

    config = load_shape('')
    engine = SimpleNamespace(device=SimpleNamespace(name='NVIDIA H200'))
    policy = SimpleNamespace(
        config=config, cache=FakeCache(), transformer=SimpleNamespace(engine=engine))
    times = [KernelTime('prefill_qkv', 0, 4, 1e-5), KernelTime('decode_stream', 0, 1, 9e-3),
             KernelTime('unheard_of', 0, 2, 1e-6)]  # fmt: skip
    monkeypatch.setattr(cuda_measure, 'kernel_times', lambda *_: times)
    monkeypatch.setattr(cuda_measure, 'read_bandwidth', lambda _: 4e12)
    monkeypatch.setattr(profiling, 'time_stages', lambda *_: {
        stage: np.array([1_000_000]) for stage in Stage})
    rows, roofs = profiling.measure_cuda(policy, 1, 1)
    assert roofs.flop_s == 989.4e12 and 'stated by NVIDIA' in roofs.about
    named = {(r.stage, r.part): r for r in rows}
    assert named['prefill', 'qkv'].seconds == pytest.approx(4e-5)
    assert named['prefill', 'unheard_of'].work is None
    assert ('decode', 'decode (one kernel)') not in named
    seen = decoder_works(config, 1, 24 + 256, 2, 2)
    assert named['decode', ''].work == sum(seen.values(), Work(0, 0)) * 8


RECORD = {
    'model': 'm', 'backend': 'cpu', 'weights_dtype': 'bfloat16', 'slots': 4, 'runs': 1,
    **report(
        assemble({Stage.VISION: 1.0, Stage.PREFILL: 4.0}, {Stage.VISION: Work(7e6, 8e7)},
                 {Stage.PREFILL: [row(1.0, 1e8, 2e9), row(2.5, 3e8, 4e8, 'qkv')]}),
        ROOFS)}  # fmt: skip


def test_the_plot_has_a_point_for_every_part_and_is_the_same_each_time():
    pictures = [io.BytesIO() for _ in range(2)]
    for picture in pictures:
        draw_roofline(RECORD, picture, 'svg')
    assert pictures[0].getvalue() == pictures[1].getvalue()
    root = ElementTree.fromstring(pictures[0].getvalue())
    texts = {''.join(node.itertext()) for node in root.iter('{http://www.w3.org/2000/svg}text')}
    assert {'vision', 'prefill mlp', 'prefill qkv', '1.0 GB/s', '10 GFLOP/s'} <= texts
    assert 'prefill' not in texts and 'prefill rest' not in texts


def test_the_plot_needs_no_compute_roof():
    record = RECORD | {'roofs': {**RECORD['roofs'], 'flop_per_s': None}}
    picture = io.BytesIO()
    draw_roofline(record, picture, 'png')
    assert picture.getvalue().startswith(b'\x89PNG')


def test_the_table_tells_what_is_unknown():
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    show(RECORD | {'roofs': {**RECORD['roofs'], 'flop_per_s': None}}, console)
    text = console.file.getvalue()
    assert 'Roofs: 1.0 GB/s, unavailable' in text
    assert '  qkv' in text and 'latency' in text


def run(*words):
    return cli.run(['profile', *words], StopRequest())


def test_command_profiles_the_embedded_policy_on_the_cpu(tmp_path, capsys):
    record_path, plot = tmp_path / 'a' / 'profile.json', tmp_path / 'b' / 'roofline.svg'
    words = ['--backend', 'cpu', '--runs', '3', '--repeats', '2']
    assert run(*words, '--json', str(record_path), '--plot', str(plot)) == 0
    text = capsys.readouterr().out
    for part in ('preprocess', 'vision', 'prefill', 'decode', 'qkv', 'attention', 'head', 'GB/s'):
        assert part in text
    record = json.loads(record_path.read_text())
    stages = {row['stage']: row for row in record['rows'] if not row['part']}
    assert list(stages) == [stage.value for stage in Stage]
    assert sum(row['share'] for row in stages.values()) == pytest.approx(1)
    assert {row['bound'] for row in record['rows']} <= {'memory', 'compute', 'latency', None}
    assert min(record['roofs']['bytes_per_s'], record['roofs']['flop_per_s']) > 0
    assert record['environment']['cores'] >= 1 and record['backend'] == 'cpu (asked for)'
    ElementTree.parse(plot)


@pytest.mark.parametrize(('words', 'message'), [
    (['--model', 'random:9b'], '--model must be a checkpoint folder or one of'),
    (['--model', 'nowhere'], 'policy must be a folder with a config.json'),
    (['--runs', '0'], '--runs must be in 1..10000, got 0'),
    (['--repeats', '0'], '--repeats must be in 1..10000, got 0'),
    (['--slots', '-32'], '--slots must be >= 0, got -32'),
    (['--slots', '33'], 'kv_slots must hold more frames than the 1 pinned, got 33'),
    (['--plot', 'roofline.txt'], '--plot must end with .svg or .png'),
    (['--json', '/proc/profile.json'], '--json must be a file that can be written'),
])
def test_mistakes_are_one_line_and_code_2(words, message, capsys):
    assert run('--backend', 'cpu', *words) == 2
    assert capsys.readouterr().err.startswith(f'vla-edge: {message}')
