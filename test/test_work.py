"""What the time of a run went into: told from the trace, in order and without overlaps."""

from types import SimpleNamespace

import numpy as np
import pytest

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.runtime.admission import Reason
from vla_edge_ros.telemetry.energy import Interval
from vla_edge_ros.telemetry.work import (
    DECODE,
    LATE,
    PARTS,
    PREFILL,
    REFUSALS,
    REFUSED,
    RETRIES,
    seconds_by_part,
    trace_columns,
    work_intervals,
)

PERIOD_MS = 30
PERIOD_NS = PERIOD_MS * NS_PER_MS


def tick(number, published_ms=0.0, runs=0, reason='admitted', late=False, observe=4.0, decode=6.0):
    """Return a tick's result; times count from when it was due."""
    ran = runs > 0
    due_ns = (1 + number) * PERIOD_NS
    return SimpleNamespace(
        scheduled_ns=due_ns, published_ns=due_ns + int(published_ms * NS_PER_MS),
        reason=Reason(reason), runs=runs, late=late,
        preprocess_ms=1.0 if ran else np.nan, vision_ms=1.0 if ran else np.nan,
        prefill_ms=observe - 2 if ran else np.nan, decode_ms=decode if ran else np.nan)


def intervals(*ticks):
    return work_intervals(trace_columns(ticks), PERIOD_NS)


def at(kind, tick_number, start_ms, end_ms):
    due_ns = (1 + tick_number) * PERIOD_NS
    return Interval(kind, due_ns + int(start_ms * NS_PER_MS), due_ns + int(end_ms * NS_PER_MS))


def test_a_run_ends_when_its_action_goes_out():
    assert intervals(tick(0, 10.5, 1), tick(1, 11, 1)) == [
        at(PREFILL, 0, 0.5, 4.5), at(DECODE, 0, 4.5, 10.5),
        at(PREFILL, 1, 1, 5), at(DECODE, 1, 5, 11)]


def test_a_run_that_only_takes_the_frame_in_decodes_nothing():
    assert intervals(tick(0, 5, 1, 'decode_over_budget', decode=np.nan)) == [at(PREFILL, 0, 1, 5)]


@pytest.mark.parametrize(('reason', 'late', 'kind'), [
    ('probe', False, RETRIES), ('policy_error', False, LATE), ('admitted', True, LATE)])
def test_retried_failed_and_late_runs_are_told_as_a_whole(reason, late, kind):
    found = intervals(tick(0, 12, 1, reason, late))
    assert found == [at(kind, 0, 2, 6), at(kind, 0, 6, 12)]


def test_a_late_run_and_the_one_after_it_in_one_tick_are_told_apart():
    assert intervals(tick(0, 0.5, 0), tick(1, 21, 2, 'admitted', True)) == [
        at(LATE, 1, 1, 5), at(LATE, 1, 5, 11), at(PREFILL, 1, 11, 15), at(DECODE, 1, 15, 21)]


def test_a_refusal_costs_what_is_left_of_its_tick():
    found = intervals(tick(0, 1, 0, 'over_budget'), tick(1, 20, 1, 'deadline_passed', True))
    assert found[0] == at(REFUSED, 0, 0, 30)
    assert found[-1] == at(REFUSED, 1, 20, 30) and found[1].kind == LATE


def test_no_frame_is_idle_and_no_refusal():
    assert intervals(tick(0, 1, 0, 'no_frame'), tick(1, 1, 0, 'playing')) == []
    assert set(REFUSALS) <= {reason.value for reason in Reason}


def test_runs_between_two_ticks_lie_before_one_another():
    # Two runs were collected at 1, one at 2: the second of them ended before that one began.
    found = intervals(tick(1, 0, 2), tick(2, -25, 1))
    assert found == [
        at(PREFILL, 1, -25, -21), at(DECODE, 1, -21, -15), at(PREFILL, 1, -15, -11),
        at(DECODE, 1, -11, -5), at(PREFILL, 1, -5, -1), at(DECODE, 1, -1, 5)]


def test_a_refused_tick_ends_where_the_next_run_began():
    found = intervals(tick(0, 1, 0, 'over_budget'), tick(1, 4, 1))
    assert found == [at(REFUSED, 0, 0, 24), at(PREFILL, 1, -6, -2), at(DECODE, 1, -2, 4)]


def test_seconds_add_up_to_the_run_with_the_rest_idle():
    found = intervals(tick(0, 10, 1), tick(1, 1, 0, 'over_budget'))
    start_ns, end_ns = PERIOD_NS + 5 * NS_PER_MS, 4 * PERIOD_NS
    seconds = seconds_by_part(found, start_ns, end_ns)
    assert set(seconds) == set(PARTS)
    assert sum(seconds.values()) == pytest.approx((end_ns - start_ns) * 1e-9)
    assert seconds[PREFILL] == 0 and seconds[DECODE] == pytest.approx(0.005)
    assert seconds[REFUSED] == pytest.approx(0.03)
