"""Every schedule survives what may come: no tick is silent or late, and each says why."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from loop_rig import names, rig_of, SCHEDULES
import numpy as np
import pytest

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters

DEADLINE_NS = 33 * NS_PER_MS
every_schedule = pytest.mark.parametrize(
    'loop', SCHEDULES, ids=lambda loop: '-'.join(map(str, loop.values())))
every_length = pytest.mark.parametrize('steps', [1, 3, 16])
both_moments = pytest.mark.parametrize('publish', ['on_ready', 'on_tick'])


def check_rate(results):
    """Check that each tick published in its own period, and from the first action on one each."""
    for result in results:
        assert result.scheduled_ns <= result.published_ns <= result.scheduled_ns + DEADLINE_NS
    first = next(i for i, result in enumerate(results) if result.action is not None)
    assert all(result.action is not None for result in results[first:])
    assert set(names(results[:first], 'cause')) <= {'waiting'}
    return first


@every_schedule
@every_length
@both_moments
def test_an_engine_slower_than_the_period_for_ever_leaves_no_tick_silent(loop, steps, publish):
    rig = rig_of(50.0, steps, publish=publish, **loop)
    results = rig.run(600)
    assert check_rate(results) <= 2
    causes = Counter(names(results, 'cause'))
    assert causes == Counter({name: n for name, n in rig.loop.causes.items() if n})
    assert causes['fresh'] + causes['late'] + causes['blended'] >= 34
    assert not causes.keys() & {'safe_hold', 'safe_zeros', 'safe_stop'}


def test_an_engine_of_50_ms_moves_the_robot_as_often_as_its_schedule_says():
    counts = [
        {'waiting': 2, 'late': 88, 'queued': 510},
        {'waiting': 1, 'fresh': 36, 'queued': 528, 'thinking': 35},
        {'waiting': 1, 'fresh': 1, 'late': 37, 'queued': 524, 'hold': 37},
        {'waiting': 1, 'fresh': 75, 'queued': 524},
        {'waiting': 1, 'fresh': 1, 'queued': 2, 'blended': 596},
        {'waiting': 1, 'fresh': 399, 'queued': 200},
    ]
    for loop, expected in zip(SCHEDULES, counts):
        results = rig_of(50.0, 16, **loop).run(600)
        assert Counter(names(results, 'cause')) == expected, loop


@every_schedule
@both_moments
def test_a_single_stall_of_two_seconds_is_bridged_by_name_and_left_behind(loop, publish):
    queue = {'safe_action': 'zeros', 'max_consecutive_fallbacks': 5}
    rig = rig_of([8.0] * 30 + [2000.0], queue=queue, publish=publish, **loop)
    rig.policy.values = 1.0
    results = rig.run(240)
    check_rate(results)
    reasons = names(results, 'reason')
    start = next(i for i in range(240) if reasons[i:i + 58] == ['busy'] * 58)
    held = results[start + 6:start + 58]
    name = 'thinking' if loop['schedule'] == 'sync' else 'safe_zeros'
    assert set(names(held, 'cause')) == {name}
    assert not any(result.action.any() for result in held)
    used = [result for result in results if result.cause.value not in ('hold', 'waiting')]
    assert max(result.observation_age_ms for result in used if result.action.any()) < 400.0
    before, after = (Counter(names(part, 'cause')).keys() for part in (
        results[5:start - 1], results[start + 70:]))
    assert after <= before | {'queued'}, 'all is as it was'
    assert 'fresh' in after or before == after


@every_schedule
@every_length
def test_a_camera_at_5_hz_is_looked_at_once_a_frame(loop, steps):
    rig = rig_of(20.0, steps, {'rate_hz': 5.0}, **loop)
    results = rig.run(300)
    check_rate(results)
    observed = [call[1] for call in rig.policy.calls if call[0] == 'observe']
    assert len(observed) == len(set(observed))
    causes, reasons = Counter(names(results, 'cause')), Counter(names(results, 'reason'))
    if steps < 6 or loop['schedule'] in ('deadline', 'latest'):
        assert len(observed) == 50
        assert reasons['repeated_frame'] > 100
    else:
        assert 12 <= len(observed) <= 50
    if steps < 6:
        assert sum(causes[name] for name in ('hold', 'safe_hold')) > 50
    assert causes['waiting'] <= 1


@every_schedule
def test_a_camera_at_200_hz_is_never_queued_up(loop):
    ages = {}
    for rate_hz in (60.0, 200.0):
        results = rig_of(20.0, 3, {'rate_hz': rate_hz}, **loop).run(300)
        check_rate(results)
        ages[rate_hz] = max(result.observation_age_ms for result in results[10:])
    assert ages[200.0] <= ages[60.0]
    assert ages[200.0] <= {'deadline': 26, 'sync': 95, 'overlap': 129, 'latest': 61}[
        loop['schedule']]


@settings(deadline=None, max_examples=120)
@given(
    st.integers(0, len(SCHEDULES) - 1),
    st.lists(st.floats(0.0, 300.0), max_size=60),
    st.integers(1, 16),
    st.integers(0, 16),
    st.floats(1.0, 240.0),
    st.sampled_from(['on_ready', 'on_tick']),
    st.lists(st.sampled_from(
        ['', '', '', 'reset', 'hold', 'release', 'instruct', 'fail', 'next schedule'])),
)
def test_every_tick_is_on_time_and_says_the_truth(
    index, cost_ms, steps, chunk_steps, rate_hz, publish, events
):
    fixed = {'publish': publish, 'chunk_steps': chunk_steps}
    rig = rig_of(cost_ms, steps, {'rate_hz': rate_hz}, **fixed, **SCHEDULES[index])
    newest_stamp_ns = last_stamp_ns = 0
    for event in events + [''] * 40:
        if event == 'reset':
            rig.loop.reset()
            newest_stamp_ns = last_stamp_ns = 0
        elif event in ('hold', 'release'):
            rig.loop.set_hold(event == 'hold')
        elif event == 'instruct':
            rig.loop.set_instruction('touch the blue cube')
        elif event == 'next schedule':
            index = (index + 1) % len(SCHEDULES)
            rig.loop.set_parameters(ControlLoopParameters(**fixed, **SCHEDULES[index]))
        rig.policy.fail = RuntimeError() if event == 'fail' else None
        result = rig.tick()
        cause, reason = result.cause.value, result.reason.value
        assert result.schedule == SCHEDULES[index]['schedule']
        assert result.started_ns <= result.published_ns <= result.scheduled_ns + DEADLINE_NS
        assert result.error or (cause == 'operator_hold') == (reason == 'operator_hold')
        if result.chunk is None:
            assert result.action is None and cause in ('waiting', 'operator_hold')
            continue
        age_ns = result.action_stamp_ns - result.observation_stamp_ns
        assert result.observation_age_ms == pytest.approx(age_ns / NS_PER_MS)
        assert result.chunk_index < min(steps, chunk_steps or 16)
        np.testing.assert_array_equal(result.action, result.chunk.values[result.chunk_index])
        if cause in ('fresh', 'late'):
            assert result.observation_stamp_ns >= newest_stamp_ns, 'an older plan came back'
            newest_stamp_ns = result.observation_stamp_ns
        elif cause in ('hold', 'safe_hold', 'thinking', 'operator_hold'):
            assert result.observation_stamp_ns == last_stamp_ns, 'what is held is the last one'
        last_stamp_ns = result.observation_stamp_ns
    assert sum(rig.loop.causes.values()) == sum(rig.loop.counts.values()) == len(events) + 40
