"""The kernels of an engine one by one, on the emulated device: each is found, none is spoiled."""

from dataclasses import replace
from functools import partial
import json

from emulated_gpu import EmulatedGpu
import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.kernels.cuda import driver, layout, measure
from vla_edge_ros.kernels.cuda.measure import kernel_times, read_bandwidth
from vla_edge_ros.lab import bench_engine, bench_lengths
from vla_edge_ros.lab.bench_endurance import endure
from vla_edge_ros.lab.bench_lengths import measure as measure_lengths
from vla_edge_ros.lab.bench_page import document
from vla_edge_ros.lab.chunks import EngineChunks
from vla_edge_ros.lab.gpu_state import UNAVAILABLE
from vla_edge_ros.lab.random_model import random_weights, TINY
from vla_edge_ros.lab.roofline import STAGES
from vla_edge_ros.nodes.process import StopRequest

pytest.importorskip('numba_cuda', reason='no CUDA compiler; make kernels installs it')
CONTEXT = 40
SLOTS = CONTEXT + 40
TOY = replace(TINY, vocab_size=90, hidden_size=64, intermediate_size=160, num_hidden_layers=2)
PREFILL = {'arrange': 1, 'prefill_norm': 3, 'prefill_qkv': 2, 'prefill_attention': 1,
           'prefill_mix': 1, 'prefill_partial': 1, 'prefill_stream': 1}  # fmt: skip
DECODE = dict.fromkeys(
    ('decode_qkv', 'decode_attention', 'decode_output', 'decode_mlp', 'decode_down'), 16)
DECODE |= {'embed': 8, 'decode_head': 8}
"""Launches of a chunk: two layers, the last of a prefill as far as it matters, eight tokens."""


class NamedGpu(EmulatedGpu):
    name = 'NVIDIA H200, emulated'

    def memory(self):
        return 5, 9

    def attribute(self, name):
        return 0 if name.startswith('PCI') else super().attribute(name)


@pytest.fixture(autouse=True)
def no_repetition(monkeypatch):
    """Launch each once: the emulated device is slow, and its times mean nothing."""
    monkeypatch.setattr(measure, 'WARM_UP_RUNS', 0)
    monkeypatch.setattr(measure, 'LEAST_LAUNCHES', 1)


def make_engine(streams, config=TOY, weights=None, slots=SLOTS):
    from vla_edge_ros.kernels.cuda.engine import Engine

    with pytest.MonkeyPatch.context() as patch:
        NamedGpu((9, 0), 2).install(patch)
        if not streams:
            patch.setattr(layout, 'can_stream', lambda *_: False)
        weights = weights or random_weights(config, 1, 'bfloat16')
        return Engine(config, weights, 'bfloat16', slots, 32)


@pytest.mark.parametrize(('streams', 'decode'), [(True, {'decode_stream': 1}), (False, DECODE)])
def test_every_kernel_of_a_chunk_is_timed_and_the_engine_goes_on(streams, decode):
    engine = make_engine(streams)
    chunks = EngineChunks(engine, TOY, CONTEXT)
    launched, engine.device.launched = engine.device.launched, set()
    expected = chunks.run(0)
    of_chunk = set(engine.device.launched)
    times = kernel_times(engine, CONTEXT, 8, repeats=1)
    counts = {}
    for kernel, turn, count, seconds in times:
        assert seconds > 0 and (kernel, turn) in STAGES
        counts[kernel] = counts.get(kernel, 0) + count
    assert counts == PREFILL | decode and set(counts) == of_chunk >= launched - {'gather'}
    assert read_bandwidth(engine, 1) > 0
    # What was measured spoiled the cache; filled anew it gives the same tokens.
    np.testing.assert_array_equal(EngineChunks(engine, TOY, CONTEXT).run(0), expected)


def test_the_record_of_an_engine_holds_all_that_the_page_tells(monkeypatch):
    monkeypatch.setattr(bench_lengths, 'gpu_state', lambda *_: UNAVAILABLE)
    peers = {'chunk_ms': {'hugging_face': 'not run: it is slow'}}
    record = measure_lengths(
        TOY, [1, 33], [2, 1], lambda *given: make_engine(True, *given),
        lambda config, weights, length: dict(peers), warm_up=0, idle_s=0, repeats=1)
    assert [row['chunks'] for row in record['lengths'].values()] == [2, 1]
    for row in record['lengths'].values():
        assert row['chunk_ms']['max'] >= row['chunk_ms']['p99.9'] >= row['chunk_ms']['median'] > 0
        assert row['p99.9_over_median'] >= 1 and row['host_cpu_ms']['median'] > 0
    assert record['stage_length'] == record['peer_length'] == 33
    assert record['read_bandwidth_gb_s'] > 0 and record['compute_roof_tflop_s'] == 989.4
    assert all(row['memory_roof'] > 0 for row in record['stages'])
    assert record['gpu'] == {'idle': UNAVAILABLE, 'under_load': UNAVAILABLE}
    page = document(record | {'environment': {'commit': ''}, 'shape': 'toy'})
    assert 'commit unknown' in page and 'decode (one kernel)' in page and 'it is slow' in page


def test_an_endurance_on_the_gpu_tells_its_memory_and_state(tmp_path, monkeypatch):
    gpu, asked = NamedGpu((9, 0), 2), []
    gpu.install(monkeypatch)
    monkeypatch.setattr(driver, 'Device', lambda: gpu)
    monkeypatch.setattr(bench_engine, 'SHAPES', {'1.5b': TOY})
    monkeypatch.setattr(bench_engine, 'endure', partial(endure, warm_up=1))

    def gpu_state(address, work):
        asked.append(address)
        work()
        return UNAVAILABLE

    monkeypatch.setattr(bench_engine, 'gpu_state', gpu_state)
    path = tmp_path / 'endurance.json'
    words = ['bench', 'engine', '--endurance', '1', '--lengths', '33', '--json', str(path)]
    assert cli.run(words, StopRequest()) == 0
    record = json.loads(path.read_text())
    assert record['passed'] and record['length'] == 33 and record['backend'] == 'cuda'
    assert record['memory']['device_grown_bytes'] == 0 and record['device'] == gpu.name
    assert record['gpu'] == {'under_load': UNAVAILABLE} and asked == ['00000000:00:00.0']
    assert 'under load | unavailable' in document(record)
