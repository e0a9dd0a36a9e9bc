"""Energy over time: what is not known is told as such, and the parts add up to the whole."""

import json
import threading

import numpy as np
import pytest

from vla_edge_ros.clock import ManualClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.telemetry.energy import EnergyMeter, IDLE, Interval
from vla_edge_ros.telemetry.energy_sources import (
    CounterSource,
    PowerSource,
    Unavailable,
    Unreadable,
)

WAIT_S = 10.0
TOLD = ('joules', 'measured_s', 'unmeasured_s')


class Machine:
    """Uses power in virtual time, and knows how much."""

    def __init__(self, power_w=100.0, update_ns=1):
        self.clock = ManualClock(5 * NS_PER_S)
        self.power_w = power_w
        self.used_j = 0.0
        self.broken = ''
        self._update_ns = update_ns
        self._shown_j = 0.0

    def run(self, milliseconds, meter=None, power_w=None, step_ms=10):
        """Let time pass and sample after every step; return when it began and ended."""
        start_ns = self.clock.now_ns()
        self.power_w = self.power_w if power_w is None else power_w
        for _ in range(round(milliseconds / step_ms)):
            now_ns = self.clock.advance_ns(round(step_ms * NS_PER_MS))
            self.used_j += self.power_w * step_ms / 1e3
            if now_ns % self._update_ns == 0:
                self._shown_j = self.used_j
            if meter is not None:
                meter.sample()
        return start_ns, self.clock.now_ns()

    def counter_j(self):
        if self.broken:
            raise Unreadable(self.broken)
        return self._shown_j

    def sensor_w(self):
        if self.broken:
            raise Unreadable(self.broken)
        return self.power_w

    def meter(self, power=False, **options):
        source = PowerSource('it', self.sensor_w) if power else CounterSource('it', self.counter_j)
        meter = EnergyMeter([source], clock=self.clock, **options)
        meter.sample()
        return meter


def random_intervals(rng, start_ns, end_ns):
    edges = np.sort(rng.integers(start_ns, end_ns, 60)).tolist()
    kinds = rng.choice(['prefill', 'decode', 'refused', 'late'], 30)
    return [Interval(str(kind), *edges[2 * i:2 * i + 2]) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize('seed', range(5))
def test_parts_of_a_run_add_up_to_what_the_counter_says(seed):
    rng = np.random.default_rng(seed)
    machine = Machine()
    meter = machine.meter()
    start_ns = machine.clock.now_ns()
    for _ in range(200):
        step_ms = rng.uniform(1, 40)
        machine.run(step_ms, meter, rng.uniform(5, 700), step_ms)
    end_ns = machine.clock.now_ns()
    intervals = random_intervals(rng, start_ns, end_ns)
    rng.shuffle(intervals)
    found = meter.report(start_ns, end_ns, intervals)['it']
    parts = found['joules_by_kind']
    assert set(parts) == {IDLE, 'prefill', 'decode', 'refused', 'late'}
    assert sum(parts.values()) == pytest.approx(machine.used_j, rel=1e-9)
    assert found['joules'] == pytest.approx(machine.used_j, rel=1e-9)
    assert found['measured_s'] == pytest.approx((end_ns - start_ns) / NS_PER_S)


def test_each_kind_gets_the_energy_of_its_own_time():
    machine = Machine()
    meter = machine.meter()
    start_ns = machine.clock.now_ns()
    machine.run(1000, meter, 20.0)
    first = machine.run(500, meter, 300.0)
    machine.run(1000, meter, 20.0)
    second = machine.run(200, meter, 100.0)
    intervals = [Interval('prefill', *first), Interval('decode', *second)]
    found = meter.report(start_ns, machine.clock.now_ns(), intervals)['it']
    assert found['joules_by_kind'] == pytest.approx(
        {IDLE: 40.0, 'prefill': 150.0, 'decode': 20.0})


def test_moment_between_two_samples_is_interpolated():
    machine = Machine()
    meter = machine.meter()
    start_ns, _ = machine.run(1000, meter, 80.0, step_ms=100)
    energy = meter.report(start_ns + 130 * NS_PER_MS, start_ns + 280 * NS_PER_MS)['it']
    assert energy['joules'] == pytest.approx(80.0 * 0.15)
    assert energy['measured_s'] == pytest.approx(0.15)


def test_counter_that_moves_seldom_is_spread_over_its_step_and_says_so():
    machine = Machine(update_ns=100 * NS_PER_MS)
    meter = machine.meter()
    start_ns, end_ns = machine.run(1000, meter, 50.0)
    energy = meter.report(start_ns + 120 * NS_PER_MS, start_ns + 140 * NS_PER_MS)['it']
    assert energy['joules'] == pytest.approx(50.0 * 0.02)
    assert meter.report(start_ns, end_ns)['it']['resolution_ms'] == pytest.approx(100.0)


def test_counter_that_never_moves_is_unavailable_and_not_0_joules():
    machine = Machine(power_w=0.0)
    meter = machine.meter()
    start_ns, end_ns = machine.run(1000, meter)
    assert meter.report(start_ns, end_ns)['it'].startswith('unavailable: ')
    assert 'has not moved' in meter.report(start_ns, end_ns)['it']


def test_time_after_a_counter_has_stopped_is_not_measured():
    machine = Machine()
    meter = machine.meter()
    machine.run(1000, meter, 10.0)
    start_ns, end_ns = machine.run(3000, meter, 0.0)
    energy = meter.report(start_ns - NS_PER_S, end_ns)['it']
    assert [energy[name] for name in TOLD] == pytest.approx([10, 1, 3])
    assert meter.report(start_ns, end_ns)['it'].startswith('unavailable: ')


def test_power_that_could_not_be_read_for_a_while_is_counted_and_not_guessed():
    machine = Machine(power_w=40.0)
    meter = machine.meter(power=True)
    start_ns, _ = machine.run(1000, meter)
    machine.broken = 'curr1_input: No such device'
    gap = machine.run(500, meter)
    machine.broken = ''
    _, end_ns = machine.run(1000, meter)
    report = meter.report(start_ns, end_ns, [Interval('decode', *gap)])['it']
    assert report['faults'] == {'curr1_input: No such device': 50}
    # The step back to a good reading is lost with them.
    assert report['joules'] == pytest.approx(40.0 * 1.99)
    assert report['unmeasured_s'] == pytest.approx(0.51)
    assert report['joules_by_kind'] == {IDLE: report['joules'], 'decode': None}
    assert meter.report(*gap)['it'] == (
        'unavailable: nothing was measured at that time; curr1_input: No such device: 50')


def test_counter_loses_nothing_while_it_cannot_be_read():
    machine = Machine()
    meter = machine.meter()
    start_ns, _ = machine.run(1000, meter, 40.0)
    machine.broken = 'GPU is lost'
    machine.run(500, meter)
    machine.broken = ''
    _, end_ns = machine.run(1000, meter)
    report = meter.report(start_ns, end_ns)['it']
    assert report['joules'] == pytest.approx(100.0) and report['unmeasured_s'] == 0
    assert report['faults'] == {'GPU is lost': 50}


def test_source_that_vanished_for_good_is_unavailable_from_then_on():
    machine = Machine()
    meter = machine.meter()
    machine.run(1000, meter)
    machine.broken = 'energy_uj: No such file or directory'
    start_ns, end_ns = machine.run(1000, meter)
    assert meter.report(start_ns, end_ns) == {
        'it': 'unavailable: energy_uj: No such file or directory'}


def test_reset_of_a_counter_costs_no_more_than_its_own_step():
    machine = Machine()
    machine.run(1000, None, 900.0)
    meter = machine.meter()
    start_ns, _ = machine.run(1000, meter, 60.0)
    machine.used_j = 0.0
    _, end_ns = machine.run(1000, meter)
    report = meter.report(start_ns, end_ns)['it']
    assert report['faults'] == {'counter reset': 1}
    assert report['joules'] == pytest.approx(60.0 * 1.99)
    assert report['unmeasured_s'] == pytest.approx(0.01)


def test_time_before_the_first_and_after_the_last_sample_is_unmeasured():
    machine = Machine()
    meter = machine.meter()
    start_ns, end_ns = machine.run(1000, meter, 30.0)
    energy = meter.report(start_ns - NS_PER_S, end_ns + 2 * NS_PER_S)['it']
    assert [energy[name] for name in TOLD] == pytest.approx([30, 1, 3])


def test_oldest_samples_are_forgotten_and_become_unmeasured():
    machine = Machine()
    meter = machine.meter(max_samples=40)
    start_ns, end_ns = machine.run(1000, meter, 30.0)
    joules, measured_s, unmeasured_s = (
        meter.report(start_ns, end_ns)['it'][name] for name in TOLD)
    assert 0.29 <= measured_s <= 0.4
    assert joules == pytest.approx(30.0 * measured_s)
    assert unmeasured_s == pytest.approx(1 - measured_s)


def test_interval_is_cut_to_the_run():
    machine = Machine()
    meter = machine.meter()
    start_ns, end_ns = machine.run(1000, meter, 30.0)
    intervals = [
        Interval('late', 0, start_ns + 100 * NS_PER_MS), Interval('decode', end_ns, 10 * end_ns)]
    assert meter.report(start_ns, end_ns, intervals)['it']['joules_by_kind'] == pytest.approx(
        {'late': 3.0, IDLE: 27.0})


@pytest.mark.parametrize(('intervals', 'message'), [
    ([Interval('decode', 20, 30), Interval('late', 10, 21)], 'overlap'),
    ([Interval('decode', 30, 20)], 'ends before it begins'),
])
def test_intervals_that_would_count_twice_are_refused(intervals, message):
    with pytest.raises(ValueError, match=message):
        Machine().meter().report(0, 100, intervals)


def test_report_is_json_and_gives_the_reason_of_what_cannot_be_read():
    machine = Machine()
    missing = Unavailable('rapl 0 package-0', 'energy_uj: Permission denied')
    meter = EnergyMeter([missing, CounterSource('gpu', machine.counter_j)], clock=machine.clock)
    meter.sample()
    report = json.loads(json.dumps(meter.report(*machine.run(100, meter, 10.0))))
    assert report['rapl 0 package-0'] == 'unavailable: energy_uj: Permission denied'
    assert report['gpu']['joules'] == pytest.approx(1.0)


def test_two_sources_of_one_name_are_refused():
    machine = Machine()
    with pytest.raises(ValueError, match='same name'):
        EnergyMeter([PowerSource('a', machine.sensor_w), CounterSource('a', machine.counter_j)])


@pytest.mark.parametrize('rate_hz', [0.0, 1.0, 1001.0, float('nan')])
def test_rate_out_of_range_is_refused(rate_hz):
    with pytest.raises(ConfigError, match='rate_hz must be in 2.0..1000.0 Hz'):
        EnergyMeter([], rate_hz)


def test_thread_samples_again_and_again_and_is_joined():
    threads, enough = [], threading.Event()

    def read_j():
        threads.append(threading.current_thread())
        if len(threads) == 3:
            enough.set()
        return float(len(threads))

    with EnergyMeter([CounterSource('it', read_j)], rate_hz=1000.0) as meter:
        assert enough.wait(WAIT_S)
    assert meter.close()
    (thread,) = set(threads)
    assert (thread.name, thread.daemon, thread.is_alive()) == ('energy', True, False)


def test_end_of_the_run_is_sampled_when_the_meter_closes():
    counts, sampled = [], threading.Event()

    def read_j():
        counts.append(len(counts))
        sampled.set()
        return float(len(counts))

    meter = EnergyMeter([CounterSource('it', read_j)], rate_hz=2.0)
    meter.start()
    assert sampled.wait(WAIT_S)
    before = len(counts)
    assert meter.close() and len(counts) > before


def test_source_that_hangs_blocks_neither_the_reader_nor_the_end():
    entered, release = threading.Event(), threading.Event()

    def read_j():
        entered.set()
        assert release.wait(WAIT_S)
        return 1.0

    meter = EnergyMeter([CounterSource('it', read_j)])
    meter.start()
    try:
        assert entered.wait(WAIT_S)
        assert meter.report(0, NS_PER_S)['it'].startswith('unavailable: ')
        assert not meter.close(timeout_s=0.01)
    finally:
        release.set()
    assert meter.close(WAIT_S)
