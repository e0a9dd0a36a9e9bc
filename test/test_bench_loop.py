"""``vla-edge bench engine --loop``: the loop in virtual time, and its parts in real time."""

import json
import os

from fake_policy import FakePolicy
import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.clock import ManualClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.lab.bench_endurance import Memory
from vla_edge_ros.lab.bench_loop import make_loop, run_loop
from vla_edge_ros.lab.bench_page import document
from vla_edge_ros.lab.virtual_camera import camera, film
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.runtime.frame_buffer import Frame, FrameReader, FrameWriter
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.telemetry.stages import Stage

PERIOD_NS = 33_333_333
CALIBRATION = (4.0, 6.0)


class FakeFrames:
    """A new frame at each look."""

    def __init__(self, clock):
        self._clock, self._sequence = clock, 0

    def read(self):
        self._sequence += 1
        now_ns = self._clock.now_ns() - 5 * NS_PER_MS
        return Frame(np.zeros((2, 2, 3), np.uint8), now_ns, now_ns, self._sequence)


class Costs:
    """What the runs cost, ms: 4 and 6, but for some by number."""

    def __init__(self, slow):
        self._slow, self._run = slow, 0

    def draw(self):
        decode_ms = self._slow.get(self._run, 6)
        self._run += 1
        return FixedLatency(
            {Stage.PREFILL: 4 * NS_PER_MS, Stage.DECODE: decode_ms * NS_PER_MS}).draw()


def run(ticks, slow=None, late_ms=None, policy=None, **options):
    """Run a loop in virtual time: what is slow by run, what starts late by tick."""
    clock = ManualClock(NS_PER_S)
    loop = make_loop(
        policy or FakePolicy(0, 0), FakeFrames(clock), VirtualRunner(clock, Costs(slow or {})),
        clock, clock, CALIBRATION)

    def on_tick(result):
        late_ns = (late_ms or {}).get(result.tick + 1, 0) * NS_PER_MS
        clock.advance_to_ns(result.scheduled_ns + PERIOD_NS + late_ns)

    return run_loop(loop, ticks, Memory(), clock, on_tick, **options)


def test_a_loop_in_time_passes_with_every_tick_decided():
    record = run(100)
    assert record['passed'] and record['ticks'] == 100 and record['decisions'] == {'full': 100}
    assert record['causes'] == {'fresh': 100} and record['deadline_misses'] == 0
    for name in ('tick_late_ms', 'period_deviation_ms'):
        assert record[name] == {'p50': 0, 'p99': 0, 'p99.9': 0, 'max': 0}
    assert record['run_ms']['p50'] == record['run_ms']['first'] == pytest.approx(10)
    assert record['stages_ms']['decode']['max'] == pytest.approx(6)
    assert record['stages_ms']['vision']['max'] is None  # never told, so never 0
    assert record['published_after_ms']['p50'] == pytest.approx(10)
    assert record['observation_age_ms']['max'] == pytest.approx(15)


def test_a_missed_deadline_is_counted_once_and_fails_the_loop():
    record = run(60, slow={40: 35})
    assert record['deadline_misses'] == 1 and record['late_results'] == 1
    assert not record['passed'] and record['ticks'] == 60
    assert sum(record['decisions'].values()) == sum(record['reasons'].values()) == 60
    assert record['run_ms']['max'] == pytest.approx(39)


def test_jitter_and_skipped_ticks_are_told():
    record = run(100, late_ms={50: 3})
    assert record['passed'] and record['tick_late_ms']['max'] == pytest.approx(3)
    assert record['period_deviation_ms']['max'] == pytest.approx(3)
    skipping = run(100, late_ms={50: 40})
    assert skipping['skipped_ticks'] == 1 and not skipping['passed']


def test_an_error_of_the_policy_is_named_and_fails_the_loop():
    policy = FakePolicy(0, 0)
    policy.error = ValueError('planted')
    record = run(10, policy=policy)
    assert record['policy_errors'] == {'ValueError: planted': 10} and not record['passed']
    assert record['run_ms'] == {'p50': None, 'p99': None, 'p99.9': None, 'max': None,
                                'first': None}  # fmt: skip


def test_a_stop_keeps_the_ticks_so_far():
    ticks = []
    record = run(10**6, stopped=lambda: len(ticks) > 0, progress=lambda *_: ticks.append(1))
    assert 0 < record['ticks'] < 10**6 and record['asked_ticks'] == 10**6


def test_a_tick_that_fails_ends_the_run_with_its_cause():
    with pytest.raises(RuntimeError, match='control thread failed') as caught:
        run(5, late_ms={1: 'no number'})
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ('busy_ms', 'stamps_ms'), [(0, [0, 20, 40, 60]), (50, [0, 60, 120, 180])])
def test_a_camera_keeps_its_rate_and_leaves_out_what_came_due_meanwhile(busy_ms, stamps_ms):
    clock, waits = ManualClock(), []

    class Writer:
        def __init__(self):
            self.stamps, self.images = [], []

        def write(self, image, stamp_ns, received_ns):
            self.stamps.append(stamp_ns)
            self.images.append(image)
            clock.advance_ns(busy_ms * NS_PER_MS)

    def wait(seconds):
        waits.append(seconds)
        clock.advance_ns(round(seconds * NS_PER_S))
        return len(waits) <= 4

    writer = Writer()
    assert film(writer, (4, 6, 3), 50.0, clock, wait) == 4
    assert writer.stamps == [ms * NS_PER_MS for ms in stamps_ms]
    assert all(image.shape == (4, 6, 3) for image in writer.images)
    assert not np.array_equal(writer.images[0], writer.images[1])


def test_the_camera_process_films_until_it_is_stopped_and_leaves_nothing():
    name = f'vla_edge_test_camera_{os.getpid()}'
    with camera(name, 32, 24, 100.0) as filming, FrameReader(name) as reader:
        frame = reader.read()
        assert frame.image.shape == (24, 32, 3) and frame.stamp_ns == frame.received_ns
    assert filming.published >= frame.sequence
    with FrameReader(name) as reader:
        assert reader.read() is None


def test_a_camera_that_cannot_film_is_told():
    name = f'vla_edge_test_taken_{os.getpid()}'
    with FrameWriter(name, 12), pytest.raises(TimeoutError, match='gives no frame'):
        with camera(name, 2, 2, 100.0):
            raise AssertionError('it films')


def test_the_command_runs_the_loop_in_real_time(tmp_path, capsys):
    path = tmp_path / 'loop.json'
    words = ['bench', 'engine', '--loop', '0.5', '--shape', 'policy', '--backend', 'cpu']
    # Whether this machine kept the deadline just now is not for a test to say.
    assert cli.run([*words, '--json', str(path)], StopRequest()) in (0, 1)
    record = json.loads(path.read_text())
    assert record['mode'] == 'loop' and record['ticks'] == record['asked_ticks'] == 15
    assert sum(record['decisions'].values()) == 15 and record['decisions']['full'] > 0
    assert record['policy_errors'] == {} and record['camera']['frames'] > 0
    assert document(record) + '\n' == capsys.readouterr().out
