"""``vla-edge bench engine --endurance``: memory and tokens that stay, and those that do not."""

import json
import threading

import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.clock import ManualClock, NS_PER_MS
from vla_edge_ros.kernels import cpu, reference
from vla_edge_ros.lab.bench_endurance import endure, Memory, RSS_TOLERANCE_BYTES
from vla_edge_ros.lab.bench_page import document
from vla_edge_ros.lab.chunks import EngineChunks, PolicyChunks
from vla_edge_ros.lab.random_model import random_weights, TINY
from vla_edge_ros.lab.roofline import DECODE_TOKENS, PREFILL_TOKENS
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy

LENGTH = 3 * PREFILL_TOKENS + 5
WARM_UP = 6


class FakeChunks:
    """Two inputs; every chunk takes 2 ms but for the slow ones, 10 ms."""

    cycle = 2

    def __init__(self, slow=(), wrong=()):
        self.clock, self.ran, self._slow, self._wrong = ManualClock(), 0, slow, wrong

    def run(self, index):
        assert index == self.ran
        self.ran += 1
        self.clock.advance_ns((10 if index in self._slow else 2) * NS_PER_MS)
        tokens = np.arange(8) + index % self.cycle
        tokens[3] += index in self._wrong
        return tokens


class FakeMemory:
    """Grows by some bytes between any two samples."""

    def __init__(self, device_bytes=0, rss_bytes=0):
        self._step = np.array([-device_bytes, rss_bytes])
        self._now = np.array([10**9, 10**8])

    def sample(self):
        self._now += self._step
        return dict(zip(('device_free_bytes', 'rss_bytes'), self._now.tolist()))


def run(chunks, count=1000, memory=None, **options):
    return endure(chunks, count, memory or FakeMemory(), chunks.clock, warm_up=WARM_UP, **options)


def test_times_of_the_warm_up_are_left_out_and_each_chunk_is_in_the_histogram():
    record = run(FakeChunks(slow=(0, WARM_UP - 1, WARM_UP + 7, WARM_UP + 900)))
    assert record['passed'] and record['chunks'] == 1000 and record['seconds'] == 2.016
    times = record['chunk_ms']
    assert (times['min'], times['median'], times['p99'], times['max']) == (2, 2, 2, 10)
    assert record['p99.9_over_median'] == pytest.approx(5, rel=0.01)
    counts = record['histogram']['chunks']
    assert counts[0] == 998 and counts[-1] == 2 and sum(counts) == 1000


@pytest.mark.parametrize('took_ns', [1, 593_172_666, 10_000_019])
def test_equal_times_have_a_histogram_too(took_ns):
    chunks = FakeChunks()
    chunks.run = lambda index: chunks.clock.advance_ns(took_ns) and np.arange(8)
    record = run(chunks, 3)
    assert sum(record['histogram']['chunks']) == 3 and record['chunk_ms']['max'] == took_ns / 1e6


def test_a_chunk_with_another_token_is_counted_and_the_first_is_named():
    record = run(FakeChunks(wrong=(WARM_UP + 5, WARM_UP + 6)))
    assert not record['passed'] and record['differing_chunks'] == 2
    assert record['first_differing_chunk'] == 5
    early = run(FakeChunks(wrong=(3,)))
    assert not early['passed'] and early['first_differing_chunk'] == 3 - WARM_UP


@pytest.mark.parametrize(
    ('memory', 'passed'),
    [
        (FakeMemory(), True),
        (FakeMemory(rss_bytes=RSS_TOLERANCE_BYTES // 20), True),
        (FakeMemory(rss_bytes=RSS_TOLERANCE_BYTES // 20 + 1), False),
        (FakeMemory(device_bytes=1), False),
    ],
)
def test_memory_may_not_grow_after_the_warm_up(memory, passed):
    record = run(FakeChunks(), memory=memory)
    assert record['passed'] is passed and len(record['memory_samples']) == 21
    assert record['memory']['device_grown_bytes'] in (0, 20)


def test_the_device_is_asked_for_its_memory_from_any_thread():
    class Device:
        current = threading.local()

        def use(self):
            self.current.here = True

        def memory(self):
            return (5 if self.current.here else None), 9

    memory, samples = Memory(Device()), []
    thread = threading.Thread(target=lambda: samples.append(memory.sample()))
    thread.start()
    thread.join()
    assert samples[0]['device_free_bytes'] == 5 and samples[0]['rss_bytes'] > 10**6


def test_a_stop_keeps_what_was_measured_so_far():
    chunks = FakeChunks()
    record = run(chunks, stopped=lambda: chunks.ran == WARM_UP + 25)
    assert record['chunks'] == 25 and record['asked_chunks'] == 1000 and record['passed']
    assert sum(record['histogram']['chunks']) == 25
    assert record['memory_samples'][-1]['chunk'] == 25
    at_once = run(FakeChunks(), stopped=lambda: True)
    assert not at_once['passed'] and at_once['chunks'] == 0 and 'chunk_ms' not in at_once


def make_engine(kernels):
    slots = LENGTH + PREFILL_TOKENS + DECODE_TOKENS
    weights = random_weights(TINY, 1, 'bfloat16')
    return kernels.Engine(TINY, weights, 'bfloat16', slots, PREFILL_TOKENS)


def test_the_chunks_of_an_engine_change_rank_and_equal_the_reference():
    ours, exact = (EngineChunks(make_engine(k), TINY, LENGTH) for k in (cpu, reference))
    tokens = [ours.run(index) for index in range(ours.cycle)]
    for index, chosen in enumerate(tokens):
        np.testing.assert_array_equal(chosen, exact.run(index))
    assert len({tuple(chosen) for chosen in tokens}) > 1


def test_an_engine_on_the_processor_holds_for_some_rounds():
    chunks = EngineChunks(make_engine(cpu), TINY, LENGTH)
    record = endure(chunks, 3 * chunks.cycle, Memory(), warm_up=chunks.cycle)
    assert record['differing_chunks'] == 0 and record['chunks'] == 12
    assert record['memory']['device_grown_bytes'] == 'unavailable'


def test_an_engine_that_forgets_to_write_a_key_is_found_out():
    engine = make_engine(cpu)
    chunks = EngineChunks(engine, TINY, LENGTH)
    fill = engine.fill

    def forgetful(embeddings, context, new):
        # From the third round on, the frame before this one stays in the slots.
        if len(calls) < 9:
            fill(embeddings, context, new)
        calls.append(1)

    calls = []
    engine.fill = forgetful
    record = endure(chunks, 8, Memory(), warm_up=chunks.cycle)
    assert not record['passed'] and record['differing_chunks'] > 0
    assert record['first_differing_chunk'] == 5


def test_the_chunks_of_a_policy_begin_anew_each_cycle_and_evict_frames():
    policy = Policy.load(DEFAULT_POLICY, backend='cpu')
    chunks = PolicyChunks(policy)
    first = [chunks.run(index).copy() for index in range(chunks.cycle)]
    assert policy.cache.num_frames == policy.config.max_frames < chunks.cycle
    second = [chunks.run(chunks.cycle + index) for index in range(chunks.cycle)]
    np.testing.assert_array_equal(first, second)


def test_the_command_writes_the_record_and_tells_it(tmp_path, capsys):
    path = tmp_path / 'new' / 'endurance.json'
    words = ['bench', 'engine', '--endurance', '30', '--shape', 'policy', '--backend', 'cpu']
    assert cli.run([*words, '--json', str(path)], StopRequest()) == 0
    record = json.loads(path.read_text())
    assert record['mode'] == 'endurance' and record['device'] == 'CPU' and record['chunks'] == 30
    assert record['passed'] and record['environment']['commit']
    assert document(record) + '\n' == capsys.readouterr().out
    assert 'the embedded policy' in document(record)
