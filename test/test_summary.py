"""The summary and the ages: figures from a trace, None where nothing was measured."""

import json

import numpy as np
import pytest

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.telemetry.age import age_by_cause, ages_at_contact, AgeWindow, percentiles
from vla_edge_ros.telemetry.summary import summarize
from vla_edge_ros.telemetry.trace import MISSING_INT

KEYS = [
    'ticks',
    'action_rate_hz',
    'period_deviation_ms',
    'decisions',
    'unexplained_ticks',
    'camera',
    'observation_age_ms',
    'observation_age_by_cause',
    'observation_age_at_contact_ms',
    'episodes',
    'success_rate',
    'cpu_percent',
    'energy',
]


def trace_of(ticks=100, period_ms=25.0):
    scheduled_ns = (np.arange(ticks) * period_ms * NS_PER_MS).astype(np.int64)
    return {
        'tick': np.arange(ticks),
        'scheduled_ns': scheduled_ns,
        'published_ns': scheduled_ns + 5 * NS_PER_MS,
        'decision': np.array(['full'] * ticks),
        'cause': np.array(['fresh'] * ticks, dtype='<U16'),
        'observation_age_ms': np.arange(ticks, dtype=float),
        'contact': np.full(ticks, MISSING_INT),
        'action_0': np.zeros(ticks),
    }


def test_summary_has_exactly_the_keys_that_others_script_against():
    summary = summarize(trace_of(), period_ms=25.0)
    assert list(summary) == KEYS
    assert summary['ticks'] == 100
    assert summary['action_rate_hz'] == pytest.approx(40.0)
    assert summary['period_deviation_ms'] == pytest.approx({'p50': 0, 'p99': 0, 'max': 0})
    assert summary['decisions'] == {'full': 100}
    assert summary['observation_age_by_cause']['fresh']['count'] == 100
    assert summary['observation_age_ms'] == pytest.approx(
        {'p50': 49.5, 'p95': 94.05, 'p99': 98.01, 'max': 99.0}
    )


def test_what_was_not_measured_is_null():
    summary = json.loads(json.dumps(summarize(trace_of(ticks=0), period_ms=25.0)))
    assert summary['ticks'] == summary['unexplained_ticks'] == 0
    for key in ('action_rate_hz', 'episodes', 'success_rate', 'cpu_percent'):
        assert summary[key] is None
    assert summary['camera'] == {'published': None, 'received': None, 'lost_fraction': None}
    assert summary['period_deviation_ms'] == {'p50': None, 'p99': None, 'max': None}
    assert set(summary['observation_age_ms'].values()) == {None}
    assert summary['observation_age_by_cause'] == {}
    assert summary['observation_age_at_contact_ms'] is None


def test_what_was_measured_is_taken_over():
    summary = summarize(
        trace_of(),
        period_ms=25.0,
        camera={'published': 1000, 'received': 999},
        episodes=10,
        success_rate=0.0,
        cpu_percent={'camera_node': 11.5},
    )
    assert summary['camera']['lost_fraction'] == pytest.approx(0.001)
    assert (summary['episodes'], summary['success_rate']) == (10, 0.0)
    assert summary['cpu_percent'] == {'camera_node': 11.5}
    json.dumps(summary)


def test_jitter_of_the_published_actions_is_the_deviation():
    trace = trace_of()
    trace['published_ns'][50] += 4 * NS_PER_MS
    deviation = summarize(trace, period_ms=25.0)['period_deviation_ms']
    assert deviation['max'] == pytest.approx(4.0) and deviation['p50'] == pytest.approx(0.0)


def test_tick_without_action_or_name_is_unexplained_and_so_is_one_that_never_ran():
    trace = trace_of()
    trace['action_0'][:10] = np.nan
    trace['cause'][:9] = 'waiting'
    assert summarize(trace, period_ms=25.0)['unexplained_ticks'] == 1
    trace = {name: np.delete(column, [50, 51, 70]) for name, column in trace_of().items()}
    summary = summarize(trace, period_ms=25.0)
    assert summary['unexplained_ticks'] == 3
    assert summary['period_deviation_ms']['max'] == pytest.approx(50.0)


def test_clock_set_back_between_two_runs_is_left_out():
    one = trace_of()
    both = {name: np.concatenate([column, column]) for name, column in one.items()}
    summary = summarize(both, period_ms=25.0)
    assert summary['action_rate_hz'] == pytest.approx(40.0)
    assert summary['unexplained_ticks'] == 0


def test_ages_are_told_by_cause_and_silent_ticks_have_none():
    trace = trace_of(ticks=4)
    trace['cause'] = np.array(['fresh', 'queued', 'queued', 'waiting'])
    trace['observation_age_ms'] = np.array([10.0, 20.0, 40.0, np.nan])
    ages = age_by_cause(trace)
    assert ages['queued'] == pytest.approx(
        {'count': 2, 'p50': 30.0, 'p95': 39.0, 'p99': 39.8, 'max': 40.0}
    )
    assert ages['waiting'] == {'count': 0, 'p50': None, 'p95': None, 'p99': None, 'max': None}


def test_age_at_contact_is_that_of_the_action_in_force():
    trace = trace_of(ticks=8)
    assert ages_at_contact(trace) is None, 'nobody could tell'
    trace['contact'] = np.array([0, 0, 1, 0, 0, 1, 0, 1])
    trace['action_0'][4] = np.nan
    trace['observation_age_ms'] = np.array([10.0, 11, 12, 13, np.nan, 15, np.nan, 17])
    assert ages_at_contact(trace).tolist() == [11.0, 13.0], 'tick 6 published zeros'
    trace['contact'][:] = [1] + [0] * 7
    assert ages_at_contact(trace).size == 0, 'nothing was in force yet'


def test_a_live_report_tells_the_newest_ages_of_all_and_of_each_cause():
    window = AgeWindow(size=100)
    assert window.summary() == {}
    for age_ms in range(1000, 1300):
        window.add('fresh', float(age_ms))
    for age_ms in range(1, 101):
        window.add('hold' if age_ms > 50 else 'fresh', float(age_ms))
    window.add('safe_zeros', np.nan)
    told = window.summary()
    assert told['observation_age_max_ms'] == told['observation_age.hold.max_ms'] == 100.0
    assert told['observation_age.fresh.p50_ms'] == 26.0
    assert told['observation_age_p50_ms'] == 51.0
    assert set(told) == {
        f'observation_age{part}{point}_ms' for part in ('_', '.fresh.', '.hold.')
        for point in ('p50', 'p95', 'p99', 'max')}


def test_percentiles_leave_out_what_is_missing():
    assert percentiles(np.array([np.nan, 3.0]), (50,)) == {'p50': 3.0, 'max': 3.0}


def test_energy_that_nobody_measured_is_unavailable():
    assert summarize(trace_of(), period_ms=25.0)['energy'] == 'unavailable'
    energy = {'it': {'joules': 5.0}}
    assert summarize(trace_of(), period_ms=25.0, energy=energy)['energy'] == energy
