"""``vla-edge bench engine --energy`` on a machine whose power is known, in virtual time."""

import json
import time
from types import SimpleNamespace

from fake_policy import FakeObservation
import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.clock import ManualClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.lab import bench_energy
from vla_edge_ros.lab.bench_endurance import Memory
from vla_edge_ros.lab.bench_energy import (
    by_steady_power,
    EnergyBench,
    find_source,
    measure_energy,
    STEADY,
)
from vla_edge_ros.lab.bench_loop import make_loop, run_loop
from vla_edge_ros.lab.bench_page import document
from vla_edge_ros.lab.metered_policy import MeteredPolicy
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.frame_buffer import Frame
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.sim.simulator import Simulator
from vla_edge_ros.telemetry.energy_sources import (
    CounterSource,
    PowerSource,
    Unavailable,
    Unreadable,
)
from vla_edge_ros.telemetry.stages import Stage
from vla_edge_ros.telemetry.work import LATE

IDLE_W, PREFILL_W, DECODE_W = 100.0, 600.0, 400.0
PREFILL_MS, DECODE_MS, PERIOD_NS = 4, 6, 33_333_333
CHUNK_J = (PREFILL_W * PREFILL_MS + DECODE_W * DECODE_MS) / 1e3


class Machine:
    """Uses known power in virtual time; its counter moves every 20 ms."""

    def __init__(self, update_ms=20, lost_j=0.0):
        self.clock = ManualClock(5 * NS_PER_S)
        self.config = SimpleNamespace(proprioception_mean=(0.0, 0.0))
        self.cache = SimpleNamespace(layout=SimpleNamespace(max_frames=3))
        self.frame_target = None
        self.instructions, self.stamps = [], []
        self.sample = lambda: None
        self._used_j = self._shown_j = 0.0
        self._update_ms, self._lost_j, self._reads = update_ms, lost_j, 0

    def spend(self, milliseconds, power_w):
        ends_ns = self.clock.now_ns() + round(milliseconds * NS_PER_MS)
        while (now_ns := self.clock.now_ns()) < ends_ns:
            next_ns = min((now_ns // NS_PER_MS + 1) * NS_PER_MS, ends_ns)
            self.clock.advance_to_ns(next_ns)
            self._used_j += power_w * (next_ns - now_ns) / NS_PER_S
            if self._update_ms and next_ns % (self._update_ms * NS_PER_MS) == 0:
                self._shown_j = self._used_j
            self.sample()

    def counter_j(self):
        return self._shown_j

    def pause(self, seconds):
        self.spend(seconds * 1e3, IDLE_W)

    def set_instruction(self, text):
        self.instructions.append(text)

    def observe(self, image, proprioception, stamp_ns):
        self.stamps.append(stamp_ns)
        self.spend(PREFILL_MS, PREFILL_W)
        return FakeObservation({Stage.PREFILL: PREFILL_MS * NS_PER_MS})

    def act(self):
        self.spend(DECODE_MS, DECODE_W)
        return ActionChunk(np.zeros((3, 2), np.float32), PERIOD_NS, np.zeros(2, np.float32),
                           np.zeros(8, np.int32), self.stamps[-1])  # fmt: skip

    def bench(self, source=None, **options):
        policy = MeteredPolicy(self, self.clock)
        bench = EnergyBench(
            policy, source or CounterSource('it', self.counter_j), self.clock, self.pause,
            **options)
        self.sample = bench.meter.sample
        bench.meter.start = lambda: None  # sampled in virtual time
        return bench

    def run_loop(self, ticks, slow=()):
        """Return what runs a loop on this machine; some runs, by number, take 40 ms."""
        machine, runs = self, []

        class Frames:
            sequence = 0

            def read(self):
                self.sequence += 1
                now_ns = machine.clock.now_ns()
                return Frame(np.zeros((2, 2, 3), np.uint8), now_ns, now_ns, self.sequence)

        class Policy:
            """Computes in no time; the runner charges for it."""

            config = machine.config
            set_instruction, reset = machine.set_instruction, lambda _: None

            def observe(self, image, proprioception, stamp_ns):
                machine.stamps.append(stamp_ns)
                return FakeObservation({})

            def act(self):
                return ActionChunk(
                    np.zeros((3, 2), np.float32), PERIOD_NS, np.zeros(2, np.float32),
                    np.zeros(8, np.int32), machine.stamps[-1])

        class Costs:
            def draw(self):
                runs.append(len(runs))
                decode_ms = 40 if runs[-1] in slow else DECODE_MS
                return FixedLatency({Stage.PREFILL: PREFILL_MS * NS_PER_MS,
                                     Stage.DECODE: decode_ms * NS_PER_MS}).draw()

        class Clock:
            """Time that the runner lets pass is spent at the power of a decode."""

            def now_ns(self):
                return machine.clock.now_ns()

            def advance_to_ns(self, time_ns):
                machine.spend(max(time_ns - self.now_ns(), 0) / NS_PER_MS, DECODE_W)
                return self.now_ns()

        def run(on_tick):
            clock = Clock()
            loop = make_loop(
                Policy(), Frames(), VirtualRunner(clock, Costs()), clock, clock,
                (PREFILL_MS, DECODE_MS))

            def after(result):
                on_tick(result)
                due_ns = result.scheduled_ns + PERIOD_NS
                machine.spend(max(due_ns - machine.clock.now_ns(), 0) / NS_PER_MS, IDLE_W)

            return run_loop(loop, ticks, Memory(), machine.clock, after)

        return run


def test_each_steady_measurement_tells_the_energy_of_what_ran():
    bench = Machine().bench()
    found = {what: bench.steady(what, 2.0) for what in STEADY}
    assert found['idle']['watts'] == pytest.approx(IDLE_W, rel=1e-3)
    assert found['prefill']['joules_per_run'] == pytest.approx(PREFILL_W * 4e-3, rel=1e-2)
    assert found['decode']['joules_per_run'] == pytest.approx(DECODE_W * 6e-3, rel=1e-2)
    assert found['chunk']['joules_per_run'] == pytest.approx(CHUNK_J, rel=1e-2)
    assert found['chunk']['run_ms'] == pytest.approx(10, rel=1e-2)
    assert found['idle']['idle_share'] == pytest.approx(1) and 'runs' not in found['idle']
    for record in found.values():
        assert record['passed'] and record['parts_over_counter'] == pytest.approx(1, abs=2e-3)
        assert record['counter_period_ms'] == pytest.approx(20)
    assert found['chunk']['parts_seconds']['decode'] == pytest.approx(
        0.6 * found['chunk']['seconds'], rel=1e-2)


def test_parts_that_miss_energy_fail_the_check():
    machine = Machine()
    bench = machine.bench()
    good = machine.sample
    # The sampler sleeps through most of it, and then is too late for the end.
    machine.sample = lambda: good() if machine.clock.now_ns() < 6.5 * NS_PER_S else None
    record = bench.steady('chunk', 2.0)
    assert not record['passed'] and record['parts_over_counter'] < 0.9


def test_a_loop_is_told_by_tick_and_late_runs_apart():
    machine = Machine()
    bench = machine.bench()
    record = bench.loop(machine.run_loop(90, slow=(40,)))
    assert record['ticks'] == 90 and record['deadline_misses'] == 1
    assert record['seconds'] == pytest.approx(3.0, abs=0.01)
    assert record['parts_seconds'][LATE] == pytest.approx(0.044, abs=2e-3)
    assert record['chunks'] + 1 == record['decisions']['full']
    assert record['parts_seconds']['decode'] == pytest.approx(record['chunks'] * 6e-3, rel=0.02)
    total = sum(record['parts_joules'].values())
    assert total == pytest.approx(record['joules']) and record['whole']['passed']
    assert record['joules_per_chunk'] == pytest.approx(record['joules'] / record['chunks'])


def test_a_whole_measurement_holds_every_part_and_the_page_tells_them():
    machine = Machine()
    bench = machine.bench()
    record = measure_energy(bench, 1.0, machine.run_loop(30))
    assert record['passed']
    tasks, alone = record['tasks'], record['tasks']['by_steady_power']
    assert tasks['episodes'] >= 1 and tasks['completed'] == tasks['episodes']
    assert tasks['late_ticks'] == 0 and tasks['seconds'] >= 1.0
    assert tasks['joules_per_completed_task'] == pytest.approx(
        tasks['joules'] / tasks['completed'])
    # Samples cannot tell 10 ms from the 23 ms around them; the powers measured alone can.
    assert alone['rest_watts'] == pytest.approx(IDLE_W, rel=0.02)
    assert alone['predicted_over_counter'] == pytest.approx(1, abs=0.01)
    environment = {'commit': 'abc'}
    page = document(record | {
        'mode': 'energy', 'environment': environment, 'shape': '1.5b', 'kv_slots': 96,
        'source': 'it', 'device': 'GPU'})
    figures = [f'{record[what]["joules_per_run"]:.3f}' for what in ('prefill', 'chunk')]
    for text in ('**Energy**', 'passed', *figures, 'of the counter', 'rest'):
        assert text in page
    assert f'{tasks["completed"]} of {tasks["episodes"]}' in page


def test_what_fails_is_unavailable_and_the_rest_stands(monkeypatch):
    machine = Machine()
    bench = machine.bench()

    def fail(_on_tick):
        raise RuntimeError('planted')

    monkeypatch.setattr(EnergyBench, 'tasks', lambda *_: (_ for _ in ()).throw(
        ImportError('No module named mujoco')))
    record = measure_energy(bench, 0.5, fail)
    assert record['loop'] == 'unavailable: RuntimeError: planted'
    assert record['tasks'] == 'unavailable: ImportError: No module named mujoco'
    assert record['chunk']['joules_per_run'] > 0 and not record['passed']
    page = document(record | {
        'mode': 'energy', 'environment': {'commit': ''}, 'shape': '1.5b', 'kv_slots': 96,
        'source': 'it', 'device': 'GPU'})
    assert 'unavailable: ImportError' in page


def test_tasks_that_fail_close_their_simulator(monkeypatch):
    closed = []
    monkeypatch.setattr(Simulator, 'close', lambda _: closed.append(True))
    monkeypatch.setattr(Simulator, 'run', lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Machine().bench().tasks(1.0, 10.0)
    assert closed == [True]


def test_a_counter_that_stands_still_is_no_measurement():
    bench = Machine(update_ms=0).bench()
    with pytest.raises(Unreadable, match='it did not move for 2 s'):
        bench.steady('idle', 1.0)
    record = measure_energy(bench, 0.3, lambda _: {})
    assert all(record[what].startswith('unavailable: Unreadable') for what in STEADY)
    assert not record['passed']


def test_a_power_sensor_has_no_counter_to_be_compared_with():
    machine = Machine()
    bench = machine.bench(PowerSource('rail', lambda: 55.0))
    record = bench.steady('idle', 1.0)
    assert record['watts'] == pytest.approx(55)
    assert record['counter_joules'].startswith('unavailable') and 'passed' not in record


def test_a_stop_ends_a_measurement_early():
    machine = Machine()
    bench = machine.bench(stopped=lambda: machine.clock.now_ns() > 6 * NS_PER_S)
    assert bench.steady('chunk', 100.0)['seconds'] < 1.0


def test_the_cache_stays_full_and_stamps_only_grow():
    machine = Machine()
    policy = MeteredPolicy(machine, machine.clock)
    assert len(machine.stamps) == 3 and machine.instructions
    policy.observe(None, None, 10**18)
    policy.reset()
    policy.chunk()
    assert machine.stamps == sorted(machine.stamps) and machine.stamps[-1] > 10**18
    assert [kind for kind, *_ in policy.intervals[-3:]] == ['prefill', 'prefill', 'decode']


def test_the_gpu_of_the_engine_is_asked_first_and_a_machine_without_sources_says_why(monkeypatch):
    counter, sensor = CounterSource('rapl 0', lambda: 1.0), PowerSource('hwmon', lambda: 1.0)
    gpu = CounterSource('nvml H200', lambda: 1.0)
    monkeypatch.setattr(bench_energy, 'nvml_source_at', lambda address: gpu)
    monkeypatch.setattr(bench_energy, 'find_sources', lambda: [
        CounterSource('nvml 0', lambda: 1.0), sensor, counter])
    assert find_source('0:1:0.0') is gpu
    assert find_source(None) is counter  # of the processor, and no sensor while there is one
    monkeypatch.setattr(bench_energy, 'find_sources', lambda: [Unavailable('rapl', 'no zone')])
    with pytest.raises(BackendUnavailable, match='rapl: no zone'):
        find_source(None)


@pytest.mark.parametrize(('words', 'message'), [
    (['--energy', '0.1'], '--energy must be in 0.2..1e4 s'),
    (['--energy', '5', '--loop', '5'], '--energy must not be given with --loop'),
    (['--energy', '5', '--chunks', '50'], '--chunks must not be given here'),
    (['--energy', '5', '--lengths', '50'], '--lengths must not be given here'),
])
def test_what_cannot_be_measured_is_refused(words, message, capsys):
    assert cli.run(['bench', 'engine', *words], StopRequest()) == 2
    assert message in capsys.readouterr().err


def test_the_command_measures_in_real_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_energy, 'find_sources', lambda: [
        CounterSource('rapl fake', lambda: 50 * time.monotonic())])
    monkeypatch.setattr(bench_energy, 'SETTLE_S', 0.05)
    path = tmp_path / 'energy.json'
    words = ['bench', 'engine', '--energy', '0.2', '--shape', 'policy', '--backend', 'cpu']
    # Whether samples came in time on a busy machine is not for a test to say.
    assert cli.run([*words, '--json', str(path)], StopRequest()) in (0, 1)
    record = json.loads(path.read_text())
    assert record['source'] == 'rapl fake' and record['mode'] == 'energy'
    assert record['loop']['ticks'] == 6 and record['tasks']['episodes'] == 1
    assert record['chunk']['watts'] == pytest.approx(50, rel=0.2)
    assert document(record) + '\n' == capsys.readouterr().out


def test_steady_power_over_the_times_of_a_run_is_compared_with_the_counter():
    steady = {what: {'watts': watts} for what, watts in
              (('idle', 100.0), ('prefill', 600.0), ('decode', 400.0), ('chunk', 450.0))}
    record = {'seconds': 10.0, 'joules': 2000.0,
              'parts_seconds': {'prefill': 1.0, 'decode': 2.0}}  # fmt: skip
    found = by_steady_power(record, steady)
    assert found['rest_joules'] == 600 and found['rest_watts'] == pytest.approx(600 / 7)
    assert found['predicted_joules'] == 2100
    assert found['predicted_over_counter'] == pytest.approx(1.05)
    # Late chunks and probes are no rest: a device that idles at 100 W is found to.
    record['parts_seconds'] |= {'late_or_aborted': 1.0, 'retries': 1.0}
    record['joules'] = 600 + 800 + 2 * 450 + 5 * 100
    found = by_steady_power(record, steady)
    assert found['rest_seconds'] == 5 and found['rest_watts'] == pytest.approx(100)
    assert found['predicted_over_counter'] == pytest.approx(1)
