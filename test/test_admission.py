"""Admission: properties of the estimate and of the decisions made by it."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.admission import (
    AdmissionController,
    AdmissionParameters,
    DecisionKind,
    Reason,
)
from vla_edge_ros.telemetry.stages import Stage

PERIOD_NS = 33_333_333
DEADLINE_NS = 33 * NS_PER_MS
FULL, PREFILL_ONLY, REFUSE = DecisionKind.FULL, DecisionKind.PREFILL_ONLY, DecisionKind.REFUSE
AGAINST_ESTIMATE = {Reason.PROBE, Reason.NO_ESTIMATE}


class Bench:
    """An engine whose runs cost what the test says, asked once a period."""

    def __init__(self, **parameters):
        self.admission = AdmissionController(AdmissionParameters(**parameters))
        self.now_ns = 0

    def tick(self, prefill_ms, decode_ms, budget_ms=33.0):
        """Ask, run what was admitted, and return the decision."""
        decision = self.admission.decide(self.now_ns, self.now_ns + int(budget_ms * NS_PER_MS))
        busy_ns = 0
        if decision.kind is not REFUSE:
            self.admission.observe(Stage.PREFILL, int(prefill_ms * NS_PER_MS))
            busy_ns += int(prefill_ms * NS_PER_MS)
        if decision.kind is FULL:
            self.admission.observe(Stage.DECODE, int(decode_ms * NS_PER_MS))
            busy_ns += int(decode_ms * NS_PER_MS)
        periods = max(1, math.ceil(busy_ns / PERIOD_NS))
        self.now_ns += periods * PERIOD_NS
        return decision

    def settle(self, prefill_ms=10.0, decode_ms=8.0, ticks=30):
        """Run until the estimate is steady."""
        for _ in range(ticks):
            decision = self.tick(prefill_ms, decode_ms)
        assert (decision.kind, decision.reason) == (FULL, Reason.ADMITTED)
        return decision


stage_ms = st.floats(0.01, 60.0)
runs = st.lists(st.tuples(stage_ms, stage_ms, st.floats(-10.0, 80.0)), min_size=1, max_size=120)
parameter_sets = st.fixed_dictionaries(
    {
        'margin_ms': st.floats(0.0, 10.0),
        'ema_alpha': st.floats(0.05, 1.0),
        'tail_factor': st.floats(0.0, 8.0),
        'warmup_samples': st.integers(0, 5),
        'probe_after': st.integers(1, 10),
        'idle_gap_ms': st.floats(50.0, 5000.0),
    }
)


@settings(deadline=None)
@given(runs, parameter_sets)
def test_nothing_starts_that_its_own_estimate_says_cannot_finish(history, parameters):
    bench = Bench(**parameters)
    for prefill, decode, budget in history:
        decision = bench.tick(prefill, decode, budget)
        assert decision.budget_ms == pytest.approx(budget - parameters['margin_ms'], abs=1e-5)
        if decision.kind is FULL and decision.reason not in AGAINST_ESTIMATE:
            assert decision.estimate_ms <= decision.budget_ms
        if decision.kind is not FULL and decision.reason is not Reason.DEADLINE_PASSED:
            assert decision.estimate_ms > decision.budget_ms
        if decision.budget_ms <= 0:
            assert (decision.kind, decision.reason) == (REFUSE, Reason.DEADLINE_PASSED)
    assert sum(bench.admission.counts.values()) == len(history)


@settings(deadline=None)
@given(runs, parameter_sets)
def test_runs_against_the_estimate_are_spaced_by_the_probe_interval(history, parameters):
    bench = Bench(**{**parameters, 'warmup_samples': 0, 'idle_gap_ms': 3.6e6})
    since_probe = parameters['probe_after']
    for prefill, decode, budget in history:
        decision = bench.tick(prefill, decode, budget)
        if decision.reason is Reason.PROBE:
            assert since_probe >= parameters['probe_after']
            since_probe = 0
        elif decision.kind is not FULL:
            since_probe += 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(1.0, 13.0), st.floats(1.0, 13.0)), min_size=10, max_size=60),
    st.sampled_from([(500.0, 5.0), (5.0, 500.0), (250.0, 250.0), (5.0, 60.0)]),
    parameter_sets,
)
def test_one_spike_locks_the_loop_for_no_more_than_the_stated_ticks(history, spike, parameters):
    parameters = {**parameters, 'margin_ms': 2.0, 'idle_gap_ms': 1000.0}
    bench = Bench(**parameters)
    for prefill, decode in history:
        bench.tick(prefill, decode)
    while bench.tick(*spike).kind is not FULL:
        pass
    decisions = [bench.tick(12.0, 12.0) for _ in range(parameters['probe_after'] + 2)]
    assert any(
        decision.kind is FULL and decision.reason is Reason.ADMITTED for decision in decisions
    )


def test_half_second_spike_is_followed_by_refusals_one_probe_and_full_chunks():
    bench = Bench(probe_after=5)
    bench.settle()
    bench.tick(10.0, 500.0)
    after = [bench.tick(10.0, 8.0) for _ in range(8)]
    assert [decision.reason for decision in after] == (
        5 * [Reason.DECODE_OVER_BUDGET] + [Reason.PROBE] + 2 * [Reason.ADMITTED]
    )
    assert [decision.kind for decision in after] == 5 * [PREFILL_ONLY] + 3 * [FULL]
    assert bench.admission.counts['probe'] == 1
    assert bench.admission.counts['decode_over_budget'] == 5


def test_slow_engine_is_probed_for_ever_and_found_when_it_recovers():
    bench = Bench(probe_after=4)
    reasons = [bench.tick(40.0, 40.0).reason for _ in range(103)]
    assert reasons[:4] == 4 * [Reason.NO_ESTIMATE]
    assert reasons.count(Reason.PROBE) == 19
    assert set(reasons[4:]) == {Reason.OVER_BUDGET, Reason.PROBE}
    recovery = [bench.tick(10.0, 8.0).reason for _ in range(6)]
    assert recovery[-1] is Reason.ADMITTED


@pytest.mark.parametrize('warmup_samples', [0, 1, 4])
def test_warm_up_samples_never_enter_the_estimate(warmup_samples):
    bench = Bench(warmup_samples=warmup_samples)
    for _ in range(warmup_samples):
        assert bench.tick(900.0, 900.0).reason is Reason.NO_ESTIMATE
    assert bench.tick(10.0, 8.0).reason is Reason.NO_ESTIMATE
    assert bench.tick(10.0, 8.0).estimate_ms == pytest.approx(18.0)


def test_warm_up_samples_do_not_move_a_seeded_estimate():
    bench = Bench(warmup_samples=3)
    bench.admission.seed(10.0, 8.0)
    for _ in range(3):
        decision = bench.tick(900.0, 900.0)
        assert (decision.reason, decision.estimate_ms) == (Reason.ADMITTED, 18.0)
    bench.tick(900.0, 900.0)
    assert bench.tick(10.0, 8.0).estimate_ms > 900.0


@settings(deadline=None)
@given(st.floats(1001.0, 1e6), st.floats(0.1, 900.0))
def test_first_run_after_an_idle_gap_is_flagged_and_left_out(gap_ms, cold_ms):
    bench = Bench(idle_gap_ms=1000.0)
    settled = bench.settle()
    bench.now_ns += int(gap_ms * NS_PER_MS)
    cold = bench.tick(cold_ms, cold_ms)
    assert (cold.kind, cold.reason) == (FULL, Reason.STALE_ESTIMATE)
    warm = bench.tick(10.0, 8.0)
    assert (warm.reason, warm.estimate_ms) == (Reason.ADMITTED, settled.estimate_ms)


def test_long_run_is_no_idle_gap():
    bench = Bench(idle_gap_ms=1000.0)
    bench.settle()
    bench.tick(10.0, 20_000.0)
    assert [bench.tick(10.0, 8.0).reason for _ in range(7)][-2:] == [
        Reason.PROBE,
        Reason.ADMITTED,
    ]


def test_locked_loop_recovers_through_an_idle_gap_with_one_more_probe():
    bench = Bench(probe_after=3)
    bench.settle()
    bench.tick(10.0, 500.0)
    bench.now_ns += 60_000 * NS_PER_MS
    reasons = [bench.tick(10.0, 8.0).reason for _ in range(6)]
    # the first samples after the gap are left out: the decode one is the first probe's
    assert reasons[3:] == [Reason.PROBE, Reason.PROBE, Reason.ADMITTED]


def test_bound_lies_near_the_95th_percentile_of_normal_jitter():
    bench = Bench()
    decode_ms = np.random.default_rng(0).normal(12.0, 1.0, 4000)
    bounds = [bench.tick(5.0, decode).estimate_ms for decode in decode_ms][20:]
    assert np.mean(bounds) == pytest.approx(5.0 + np.percentile(decode_ms, 95), abs=0.25)


def test_faster_runs_do_not_raise_the_bound():
    bench = Bench(warmup_samples=0)
    bench.settle(14.0, 14.0, ticks=5)
    before_ms = bench.tick(2.0, 2.0).estimate_ms
    assert bench.tick(2.0, 2.0).estimate_ms < before_ms


def test_parameters_can_be_replaced_between_two_decisions():
    bench = Bench()
    bench.settle()
    bench.admission.parameters = AdmissionParameters(margin_ms=20.0)
    assert bench.tick(10.0, 8.0).reason is Reason.DECODE_OVER_BUDGET


def test_refusals_by_the_loop_are_counted_under_their_names():
    admission = AdmissionController()
    decision = admission.refuse(Reason.NO_FRAME)
    assert (decision.kind, decision.reason) == (REFUSE, Reason.NO_FRAME)
    assert math.isnan(decision.estimate_ms)
    assert admission.counts['no_frame'] == 1


def test_parameters_out_of_range_are_refused_by_name():
    with pytest.raises(ConfigError, match='margin_ms must be in'):
        AdmissionParameters(margin_ms=-1.0)


def test_runs_that_are_always_rare_still_teach_the_estimate():
    admission = AdmissionController(AdmissionParameters(idle_gap_ms=1000.0, warmup_samples=0))
    admission.seed(5.0, 5.0)
    now_ns = 0
    for _ in range(60):
        now_ns += 1_100 * NS_PER_MS
        decision = admission.decide(now_ns, now_ns + 33 * NS_PER_MS)
        if decision.kind is DecisionKind.FULL:
            admission.observe(Stage.PREFILL, 40 * NS_PER_MS)
            admission.observe(Stage.DECODE, 40 * NS_PER_MS)
    assert decision.estimate_ms > 60.0
