"""What each schedule promises, in virtual time."""

from collections import Counter
import math
import threading

from loop_rig import Camera, FakePolicy, names, PERIOD_NS, rig_of
from loop_rig import SCHEDULES as EVERY_SCHEDULE
import numpy as np
import pytest

from vla_edge_ros.clock import MonotonicClock, NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.parameters import describe
from vla_edge_ros.runtime.action_queue import ActionQueue, blend_weights
from vla_edge_ros.runtime.admission import AdmissionController
from vla_edge_ros.runtime.control_loop import ControlLoop
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters, ScheduleParameters
from vla_edge_ros.runtime.runner import ThreadRunner
from vla_edge_ros.runtime.schedules import SCHEDULES

every_schedule = pytest.mark.parametrize(
    'loop', EVERY_SCHEDULE, ids=lambda loop: '-'.join(map(str, loop.values())))


def test_sync_holds_while_it_thinks_and_plays_every_action_of_a_chunk():
    queue = {'safe_action': 'zeros'}
    rig = rig_of(80.0, 4, queue=queue, schedule='sync', publish='on_tick')
    rig.policy.values = 1.0
    results = rig.run(60)
    played = [(result.cause.value, result.chunk_index) for result in results]
    cycle = [('thinking', None)] * 3 + [('fresh', 0), ('queued', 1), ('queued', 2), ('queued', 3)]
    assert played[:3] == [('waiting', None)] * 3
    assert played[3:] == (cycle * 9)[3:60]
    assert names(results[:7], 'reason') == ['requested', 'busy', 'busy'] + ['playing'] * 4
    for result in results[3:]:
        assert result.action.any() == (result.cause.value != 'thinking')
    ages = [result.observation_age_ms for result in results if result.cause.value == 'fresh']
    assert all(3 * 33.3 <= age <= 3 * 33.4 + 1e3 / 60 for age in ages)


def test_sync_publishes_a_chunk_as_soon_as_it_is_there():
    results = rig_of(20.0, 4, schedule='sync').run(9)
    assert names(results, 'cause') == ['fresh', 'queued', 'queued', 'queued'] * 2 + ['fresh']
    for result in results:
        begin_ns = 20 * NS_PER_MS if result.chunk_index == 0 else 0
        assert result.published_ns == result.scheduled_ns + begin_ns


def test_sync_never_plays_a_chunk_that_is_too_old_and_names_it():
    queue = {'max_action_age_ms': 100.0, 'safe_action': 'zeros'}
    results = rig_of([20.0, 150.0, 20.0], 3, queue=queue, schedule='sync').run(10)
    assert names(results, 'cause') == [
        'fresh', 'queued', 'queued', 'thinking', 'thinking', 'thinking', 'thinking', 'safe_zeros',
        'fresh', 'queued']
    assert not any(result.action.any() for result in results[3:8])


@pytest.mark.parametrize(('percent', 'started_at'), [(0, 16), (25, 12), (50, 8), (75, 4)])
def test_overlap_asks_when_that_part_of_the_chunk_is_left(percent, started_at):
    rig = rig_of(10.0, 16, schedule='overlap', overlap_percent=float(percent), publish='on_tick')
    results = rig.run(100)
    asked = [result.tick for result in results if result.reason.value == 'requested']
    assert asked[0] == 0
    assert set(np.diff(asked)) == {started_at}


def test_overlap_drops_what_is_past_by_the_time_that_really_passed():
    costs_ms = [10.0, 70.0, 140.0, 30.0]
    rig = rig_of(costs_ms, 16, schedule='overlap')
    results = rig.run(40)
    began = {result.tick: None for result in results if result.reason.value == 'requested'}
    for cost_ms, tick in zip(costs_ms[1:], list(began)[1:]):
        entered = tick + math.ceil(cost_ms / (PERIOD_NS / NS_PER_MS))
        assert results[entered].chunk_index == entered - tick
        assert results[entered].cause.value == 'fresh'
        assert results[entered - 1].chunk_index == entered - 1 - tick + 8, 'the old one till then'
    assert Counter(names(results, 'cause')).keys() == {'fresh', 'queued'}


def test_overlap_that_begins_too_late_holds_and_calls_the_next_chunk_late():
    results = rig_of(150.0, 4, schedule='overlap', publish='on_tick').run(40)
    causes = names(results[5:], 'cause')
    assert causes == (['fresh'] + ['hold'] * 4) + (['late'] + ['hold'] * 4) * 6
    assert all(result.late == (result.cause.value == 'late') for result in results)


def test_blended_actions_go_over_smoothly_and_their_age_is_the_mean_of_both_images():
    rig = rig_of(60.0, 8, schedule='overlap', seam='blend')
    rig.run(5)
    rig.policy.values = 1.0
    results = rig.run(9)
    assert names(results, 'cause') == ['queued'] + (['blended'] * 2 + ['queued'] * 2) * 2
    linear = np.array([2 / 3, 1 / 3])
    old_weights = linear * np.expm1(linear) / (math.e - 1)
    for result, old_weight in zip(results[5:7], old_weights):
        assert float(result.action[0]) == pytest.approx(1.0 - old_weight, rel=1e-6)
    first, second = (results[i].observation_stamp_ns for i in (3, 7))
    for result, old_weight in zip(results[5:7], old_weights):
        mean_ns = old_weight * first + (1 - old_weight) * second
        assert result.observation_stamp_ns == pytest.approx(mean_ns, abs=100)
    assert results[0].observation_stamp_ns < first < second


def test_blend_weights_fall_from_the_old_chunk_to_the_new():
    weights = blend_weights(4)
    published = np.array([4 / 5, 3 / 5, 2 / 5, 1 / 5])  # the linear mask of the reference code
    np.testing.assert_allclose(weights, published * np.expm1(published) / np.expm1(1), rtol=1e-6)
    assert blend_weights(1).tolist() == [pytest.approx(0.18877, abs=1e-5)]
    assert blend_weights(0).size == 0


def test_latest_starts_a_run_the_moment_the_one_before_ends():
    rig = rig_of(50.0, 3, {'rate_hz': 1000.0}, schedule='latest')
    results = rig.run(90)
    observed_ms = [call[1] / NS_PER_MS for call in rig.policy.calls if call[0] == 'observe']
    np.testing.assert_allclose(np.diff(observed_ms), 50.0, atol=1.01)
    ages = [result.observation_age_ms for result in results[3:]]
    assert min(ages) >= 50.0 and max(ages) <= 2 * 50.0 + 1.0
    assert set(names(results[2:], 'reason')) == {'requested'} | {'busy'}
    assert set(names(results[2:], 'decision')) <= {'full', 'refuse'}


def test_latest_gives_younger_actions_than_overlap_of_the_same_engine():
    p50 = {}
    for schedule in ('overlap', 'latest'):
        results = rig_of(36.0, 4, schedule=schedule, overlap_percent=100.0).run(300)
        p50[schedule] = np.median([result.observation_age_ms for result in results[5:]])
    assert p50['latest'] < p50['overlap'] - 10.0


@pytest.mark.parametrize('request_', [
    lambda loop: loop.set_instruction('touch the blue cube'), lambda loop: loop.reset()])
def test_latest_drops_a_run_that_a_request_overtook(request_):
    rig = rig_of(70.0, 3, schedule='latest')
    rig.run(10)
    (running_ns,) = [call[1] for call in rig.policy.calls if call[0] == 'observe'][-1:]
    request_(rig.loop)
    results = rig.run(9)
    stamps_ns = {result.observation_stamp_ns for result in results}
    assert running_ns not in stamps_ns and results[-1].observation_stamp_ns > running_ns


def test_latest_starts_nothing_under_an_instruction_that_is_about_to_go():
    rig = rig_of(20.0, 3, schedule='latest')
    rig.run(10)
    calls = len(rig.policy.calls)
    rig.loop.set_instruction('touch the blue cube')
    rig.loop.between_ticks(rig.next_ns)
    assert len(rig.policy.calls) == calls
    rig.tick()
    assert ('instruction', 'touch the blue cube') in rig.policy.calls[calls:calls + 1]


def test_only_ticks_count_towards_a_frozen_camera():
    rig = rig_of(8.0, 3, {'stop_ns': 10 * PERIOD_NS}, schedule='latest', frozen_camera_ticks=12)
    reasons = names(rig.run(40), 'reason')
    frozen = reasons.index('frozen_camera')
    assert reasons[frozen - 11:frozen] == ['repeated_frame'] * 11
    assert set(reasons[frozen:]) == {'frozen_camera'}


def test_latest_stands_still_during_an_operator_hold():
    rig = rig_of(50.0, 3, schedule='latest')
    rig.run(10)
    rig.loop.set_hold(True)
    rig.run(3)
    calls = len(rig.policy.calls)
    held = rig.run(5)
    assert len(rig.policy.calls) == calls
    assert set(names(held, 'reason')) == set(names(held, 'cause')) == {'operator_hold'}
    rig.loop.set_hold(False)
    assert 'fresh' in names(rig.run(3), 'cause')


def test_latest_on_a_worker_thread_goes_on_without_a_tick():
    steady = MonotonicClock()
    policy, runner = FakePolicy(), ThreadRunner(steady)
    third = threading.Event()
    act = policy.act

    def act_and_count():
        if len([call for call in policy.calls if call[0] == 'act']) == 2:
            third.set()
        return act()

    policy.act = act_and_count
    loop = ControlLoop(
        policy, Camera(steady, rate_hz=1e6), AdmissionController(), ActionQueue(), runner,
        steady, steady, ControlLoopParameters(schedule='latest', publish='on_tick',
                                              max_observation_age_ms=3e6))
    loop.set_instruction('reach the red cube')
    try:
        first = loop.tick(steady.now_ns())
        assert (first.reason.value, first.cause.value) == ('requested', 'waiting')
        while not third.is_set():
            loop.between_ticks(steady.now_ns() + NS_PER_MS)
        result = loop.tick(steady.now_ns())
        assert (result.cause.value, result.decision.value) == ('fresh', 'full')
        assert result.runs >= 2
    finally:
        assert runner.close()


@pytest.mark.parametrize('schedule', ['deadline', 'sync', 'overlap'])
def test_the_others_do_nothing_between_ticks(schedule):
    rig = rig_of(8.0, schedule=schedule)
    rig.run(2)
    calls, now_ns = len(rig.policy.calls), rig.clock.now_ns()
    rig.loop.between_ticks(now_ns + 10 * PERIOD_NS)
    assert (len(rig.policy.calls), rig.clock.now_ns()) == (calls, now_ns)


@every_schedule
def test_chunk_steps_plays_the_first_actions_only(loop):
    results = rig_of(20.0, 16, chunk_steps=2, **loop).run(50)
    assert {result.chunk_index for result in results if result.chunk is not None} <= {0, 1}
    assert all(len(r.chunk.values) == 2 for r in results if r.chunk is not None)


def test_the_schedule_changes_at_the_next_tick_also_during_a_run():
    rig = rig_of(120.0, 16, schedule='latest')
    rig.run(20)
    for schedule in ('sync', 'overlap', 'deadline', 'latest'):
        rig.loop.set_parameters(ControlLoopParameters(schedule=schedule))
        results = rig.run(40)
        assert {result.schedule for result in results} == {schedule}
        assert 'late' in names(results, 'cause') or schedule != 'deadline'


def test_what_a_run_would_cost_is_told_under_every_schedule():
    for loop in EVERY_SCHEDULE:
        result = rig_of(20.0, admission={'warmup_samples': 0}, **loop).run(12)[-1]
        started = [result.estimate_ms for result in rig_of(20.0, **loop).run(40)[20:]
                   if result.decision.value == 'full']
        assert started and started[-1] == pytest.approx(20.0), result


def test_unusable_parameters_are_refused_by_name():
    for name, value, rule in (
        ('schedule', 'fastest', 'must be one of deadline, sync, overlap, latest'),
        ('overlap_percent', 101.0, r'must be in 0.0..100.0 %'),
        ('seam', 'glue', 'must be one of switch, blend'),
        ('chunk_steps', 17, r'must be in 0..16'),
    ):
        with pytest.raises(ConfigError, match=f'{name} {rule}, got'):
            ControlLoopParameters(**{name: value})


def test_every_schedule_can_be_chosen_and_says_what_it_promises():
    metadata = {name: metadata for name, _, metadata in describe(ScheduleParameters)}
    assert metadata['schedule']['choices'] == tuple(SCHEDULES)
    for schedule in SCHEDULES.values():
        assert 'Age:' in schedule.__doc__ and 'Rate:' in schedule.__doc__
